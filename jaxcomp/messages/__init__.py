"""Payloads as bytes for any channel, with checks for receivers that do not trust the sender."""

from jaxcomp.messages.payloads import (
    from_bytes as from_bytes,
    message_limit as message_limit,
    to_bytes as to_bytes,
)
from jaxcomp.messages.reading import MessageError as MessageError

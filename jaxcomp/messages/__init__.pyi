from jaxcomp.messages.payloads import (
    from_bytes as from_bytes,
    message_limit as message_limit,
    to_bytes as to_bytes,
)
from jaxcomp.messages.reading import MessageError as MessageError

"""Payloads as bytes for any channel, with checks for receivers that do not trust the sender."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

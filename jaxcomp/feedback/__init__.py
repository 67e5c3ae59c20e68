"""Feedback, which is the memory of a sender, and links, which join a codec and a feedback."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

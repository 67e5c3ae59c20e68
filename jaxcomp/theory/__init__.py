"""Limits of codecs, models of cost, and statistics of gradients."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

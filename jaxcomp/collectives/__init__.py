"""Compressed collectives: JAX's own, with a codec forward and one back."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

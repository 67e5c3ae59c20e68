"""Gradient transformations that a user chains with optax."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

"""Update rules that optax does not have."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

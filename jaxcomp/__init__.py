"""Communication-compressed training in JAX: gradient compression as optax transformations."""

from jaxcomp import adapters as adapters, lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

__version__ = "0.2.0.dev0"

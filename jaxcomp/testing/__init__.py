"""Contract checks in the style of chex, the same that the library's own recipes must pass.

Each check raises an `AssertionError` with the expected and the actual behaviour. `Relay` stands for
an internet link in tests of programs that use sockets.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

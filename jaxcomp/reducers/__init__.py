"""Reducers, and the legs of which they consist.

`Gather`, `TwoShot` and the other reducers are names of `jaxcomp`; here is what a reducer of your
own is made of.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

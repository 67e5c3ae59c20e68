"""The parts of codecs, combinators of codecs, and entropy coders.

Levels, scales, roundings and steps are parts of a `Quantizer`; choices and indices are parts of a
`Sparsifier`; coders are parts of `Coded`.
"""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

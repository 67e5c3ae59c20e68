"""Weights for readers: versions of a model at a URL, as snapshots and lossless patches."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

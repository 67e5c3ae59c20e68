"""Forecasts of a step's bytes and time, and of the gain from compression."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

"""Telemetry of training: the statistics of each step as records, for any writer, and alarms."""

from jaxcomp import lazy

__getattr__, __dir__, __all__ = lazy.exports(__name__)

"""Weights for readers: versions of a model at a URL, as snapshots and lossless patches."""

from jaxcomp.weights.publisher import Publisher as Publisher

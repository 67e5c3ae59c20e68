"""Reads published weights with numpy and fsspec alone; `jaxcomp.weights` writes them."""

from jaxcomp_weights.errors import (
    Damaged as Damaged,
    Untrusted as Untrusted,
    VersionGap as VersionGap,
    WeightsError as WeightsError,
)
from jaxcomp_weights.reader import (
    Change as Change,
    Reader as Reader,
)

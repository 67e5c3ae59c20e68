"""The mean of dense leaves, with one collective for each dtype, and its bytes."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jaxcomp.exchange import over_workers, packing, trips
from jaxcomp.types import Array, ArrayLike, AxisName
from jaxcomp.wire import cost as wire_cost


def fused_mean(
    leaves: Sequence[Array],
    axis_name: AxisName,
    weight: Array | None = None,
    delay: float | None = None,
) -> list[Array]:
    """The mean of small leaves by one all-reduce for each dtype."""

    def mean(flat: Array) -> Array:
        return over_workers.mean([flat], axis_name, weight, delay)[0]

    means = packing.by_dtype([x.reshape(-1) for x in leaves], mean)
    return [x.reshape(leaf.shape) for x, leaf in zip(means, leaves, strict=True)]


def fused_link_bytes(
    leaves: Sequence[ArrayLike], workers: int, delay: float | None = None
) -> Fraction:
    """The bytes that one device sends for the mean of these leaves."""
    total = Fraction(0)
    for dtype, size in _sizes(leaves).items():
        if over_workers.is_narrow(dtype):  # In equal slices of whole elements.
            total += wire_cost.ring(-(-size // workers) * workers * dtype.itemsize, workers)
        else:
            total += trips.sum_bytes(size, dtype, workers, delay)
    return total


def fused_messages(leaves: Sequence[ArrayLike], workers: int, delay: float | None = None) -> int:
    """The sequential messages of the mean of these leaves, one sum for each dtype."""
    total = 0
    for dtype, size in _sizes(leaves).items():
        if over_workers.is_narrow(dtype):
            total += 2 * trips.messages(size * dtype.itemsize / workers, workers, delay)
        else:
            total += trips.sum_messages(size * dtype.itemsize, workers, delay)
    return total


def _sizes(leaves: Sequence[ArrayLike]) -> dict[Any, int]:
    """The elements of each dtype."""
    sizes: dict[Any, int] = {}
    for leaf in leaves:
        if size := math.prod(leaf.shape):
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + size
    return sizes

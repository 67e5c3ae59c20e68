"""The mean of dense leaves, with one collective for each dtype, and its bytes."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from jaxcomp.exchange import over_workers, packing
from jaxcomp.types import Array, ArrayLike, AxisName
from jaxcomp.wire import cost as wire_cost


def fused_mean(
    leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
) -> list[Array]:
    """The mean of small leaves by one all-reduce for each dtype."""

    def mean(flat: Array) -> Array:
        return over_workers.mean([flat], axis_name, weight)[0]

    means = packing.by_dtype([x.reshape(-1) for x in leaves], mean)
    return [x.reshape(leaf.shape) for x, leaf in zip(means, leaves, strict=True)]


def fused_link_bytes(leaves: Sequence[ArrayLike], workers: int) -> Fraction:
    """The bytes that one device sends for the mean of these leaves."""
    sizes: dict[Any, int] = {}
    for leaf in leaves:
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + math.prod(leaf.shape)
    total = Fraction(0)
    for dtype, size in sizes.items():
        if over_workers.is_narrow(dtype):  # In equal slices of whole elements.
            size = -(-size // workers) * workers
        total += wire_cost.ring(size * dtype.itemsize, workers)
    return total

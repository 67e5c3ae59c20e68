"""The mean of dense leaves, with one collective for each dtype, and its bytes."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.exchange import over_workers
from jaxcomp.types import Array, ArrayLike, AxisName
from jaxcomp.wire import cost as wire_cost


def fused_mean(
    leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
) -> Sequence[Array]:
    """The mean of small leaves by one all-reduce for each dtype."""
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.size:
            groups.setdefault(leaf.dtype, []).append(number)
    means = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]  # The result for empty leaves.
    for numbers in groups.values():
        flat = xla.joined([leaves[i] for i in numbers])
        (mean,) = over_workers.mean([flat], axis_name, weight)
        sizes = [leaves[i].size for i in numbers]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        for i, part in zip(numbers, xla.cut(mean, begins, sizes), strict=True):
            means[i] = part.reshape(leaves[i].shape)
    return means


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

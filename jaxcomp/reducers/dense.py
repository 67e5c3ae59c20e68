"""The uncompressed mean: the baseline, and the fallback."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Collected, Reducer
from jaxcomp.layout import trees
from jaxcomp.layout.policy import NOTHING
from jaxcomp.reducers import over_workers
from jaxcomp.theory import cost
from jaxcomp.types import Array, ArrayLike, AxisName, Batches, PyTree, Stacks
from jaxcomp.wire import cost as wire_cost


@dataclasses.dataclass(frozen=True)
class Dense(Reducer):
    """The mean of the gradients by an all-reduce.

    Args:
        dtype: the dtype in which elements are sent, such as "bfloat16"; None for their own.

    Note:
        Floats of 16 bits are added in float32 and rounded once. If the platform's all-reduce does
        not do that, as for float16 and on a CPU, they are sent in two shots, an all-to-all and an
        all-gather, of the same bytes; `link_bytes` counts those. On an accelerator, bfloat16 uses
        the platform's all-reduce, which adds in bfloat16 and sends up to `4(n − 1)` bytes less,
        since slices need not be of whole elements. A sum of float32 or float64 that exceeds the
        largest number of its dtype is infinite, as in `jax.lax.pmean`: the mean of `n` workers is
        finite if the sum of each element is.
    """

    dtype: str | None = None
    uplink = None

    def __post_init__(self):
        checks.choice("dtype", self.dtype, (None, "float32", "bfloat16", "float16"))

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: tuple,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        share = 1.0 if weight is None else lax.pmean(weight, axis_name)
        return Collected(message, message, share, state)  # No leaf is compressed.

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        sent = [leaf.astype(self.dtype or leaf.dtype) for leaf in leaves]
        means = over_workers.mean(sent, axis_name, weight)
        return [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]

    def efforts(self, batches: Batches, workers: int) -> tuple[tuple[Any, cost.Effort], ...]:
        """The efforts of an all-reduce, and of the casts around it."""
        return ((self, cost.Effort(2 * (workers - 1), encodes=1)),)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """The bytes of an all-reduce of every leaf: `2(n − 1)/n` of its bytes."""
        likes = trees.layout(NOTHING, like).likes
        sent = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(self.dtype or x.dtype)) for x in likes]
        return math.ceil(fused_link_bytes(sent, workers))


def fused_mean(
    leaves: Sequence[Array], axis_name: AxisName, weight: Array | None
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

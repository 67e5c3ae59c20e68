"""The mean as JAX takes it, uncompressed: the baseline, and the way out."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks, compiler, trees, wire
from jaxcomp.policy import NOTHING
from jaxcomp.protocols import Array, ArrayLike, AxisName, Batches, Collected, PyTree, Stacks
from jaxcomp.theory import cost


@dataclasses.dataclass(frozen=True)
class Dense:
    """The mean of the gradients by an all-reduce.

    Args:
        dtype: what to send the elements as, for instance "bfloat16"; None for their own dtype.

    Note:
        A CPU's all-reduce sends bfloat16 as float32; `collective_bytes` shows it.
    """

    dtype: str | None = None
    uplink = None

    def __post_init__(self):
        checks.choice("dtype", self.dtype, (None, "float32", "bfloat16", "float16"))

    def init(self, batches: Batches, axis_name: AxisName) -> tuple:
        return ()

    def part_like(self, batches: Batches, axis_name: AxisName) -> tuple:
        return ()

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
        return Collected(message, message, share, state)  # Nothing is compressed: both are empty.

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: tuple, axis_name: AxisName
    ) -> tuple[Stacks, tuple]:
        return part, state

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        sent = [leaf.astype(self.dtype or leaf.dtype) for leaf in leaves]
        means = weighted_mean(sent, axis_name, weight)
        return [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]

    def efforts(self, batches: Batches, workers: int) -> tuple[tuple[Any, cost.Effort], ...]:
        """An all-reduce, and the casts around it."""
        return ((self, cost.Effort(2 * (workers - 1), encodes=1)),)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """An all-reduce of every leaf: `2(n − 1)/n` of its bytes."""
        return sum(
            wire.ring_bytes(leaf.size * jnp.dtype(self.dtype or leaf.dtype).itemsize, workers)
            for leaf in trees.layout(NOTHING, like).likes
        )


def weighted_mean(tree: PyTree, axis_name: AxisName, weight: Array | None) -> PyTree:
    """`Σ wᵢ·xᵢ / n`; a worker of weight zero adds nothing, even if it is not finite."""
    if weight is not None:
        tree = jax.tree.map(lambda x: jnp.where(weight == 0, 0, weight.astype(x.dtype) * x), tree)
    return lax.pmean(tree, axis_name)


def fused_mean(
    leaves: Sequence[Array], axis_name: AxisName, weight: Array | None
) -> Sequence[Array]:
    """The mean of small leaves by one all-reduce for each dtype."""
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.size:
            groups.setdefault(leaf.dtype, []).append(number)
    means = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]  # Stays for empty leaves.
    for numbers in groups.values():
        flat = compiler.joined([leaves[i] for i in numbers])
        mean = weighted_mean(flat, axis_name, weight)
        sizes = [leaves[i].size for i in numbers]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        for i, part in zip(numbers, compiler.cut(mean, begins, sizes), strict=True):
            means[i] = part.reshape(leaves[i].shape)
    return means


def fused_link_bytes(leaves: Sequence[ArrayLike], workers: int) -> Fraction:
    """Bytes that one device sends for their `fused_mean`."""
    sizes: dict[Any, int] = {}
    for leaf in leaves:
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + size
    return wire.ring(sum(sizes.values()), workers)

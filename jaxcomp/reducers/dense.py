"""The mean as JAX takes it, uncompressed: the baseline, and the way out."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks, wire
from jaxcomp.protocols import Array, AxisName, Collected, PyTree


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

    def init(self, like: PyTree, axis_name: AxisName) -> tuple:
        return ()

    def part_like(self, like: PyTree, axis_name: AxisName) -> PyTree:
        return like

    def collect(
        self,
        key: Array,
        message: PyTree,
        state: tuple,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        sent = message if self.dtype is None else jax.tree.map(self._narrow, message)
        part, share = weighted_mean(sent, axis_name, weight)

        def back(x, like):
            return x.astype(like.dtype)

        return Collected(
            jax.tree.map(back, part, message), jax.tree.map(back, sent, message), share, state
        )

    def spread(
        self, key: Array, part: PyTree, like: PyTree, state: tuple, axis_name: AxisName
    ) -> tuple[PyTree, tuple]:
        return part, state

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """An all-reduce of every leaf: `2(n − 1)/n` of its bytes."""
        return sum(
            wire.ring_bytes(
                leaf.size * jnp.dtype(self.dtype or leaf.dtype).itemsize,
                workers,
            )
            for leaf in jax.tree.leaves(like)
        )

    def _narrow(self, x: Array) -> Array:
        return x.astype(self.dtype)


def weighted_mean(
    tree: PyTree, axis_name: AxisName, weight: Array | None
) -> tuple[PyTree, Array | float]:
    """`Σ wᵢ·xᵢ / n` and `Σ wᵢ / n`; a worker of weight zero adds nothing, even if not finite."""
    if weight is None:
        return lax.pmean(tree, axis_name), 1.0

    def term(x):
        return jnp.where(weight == 0, 0, weight.astype(x.dtype) * x)

    return lax.pmean(jax.tree.map(term, tree), axis_name), lax.pmean(weight, axis_name)

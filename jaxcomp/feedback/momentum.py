"""Momentum before compression, as deep gradient compression corrects it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec, Feedback
from jaxcomp.feedback import memory
from jaxcomp.numerics import summing
from jaxcomp.types import Array, PyTree


class MomentumState(NamedTuple):
    """The memory of a sender with momentum.

    Attributes:
        momentum: `m·u`, decayed already: what the next gradient is added to.
        velocity: `v`, what of all velocities has not been sent yet.
    """

    momentum: PyTree
    velocity: PyTree


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Momentum before compression, so that an element that waits gathers its momentum too.

    `u ← m·u + g`, `v ← v + u`, send `C(v)`, `v ← v − C(v)`, and `u ← 0` where `C(v) ≠ 0` (factor
    masking: momentum of what has just been sent is out of date). With Nesterov's momentum
    `u ← m·(u + g)`, `v ← v + u + g`. What arrives has its momentum: chain plain `optax.sgd(rate)`
    after the mean, and momentum for the leaves that are sent dense, which pass by the feedback:

    `optax.masked(optax.trace(0.9), jaxcomp.dense_leaves(link))`.

    Args:
        momentum: how much of `u` is kept, in [0, 1].
        nesterov: look ahead, as in `optax.trace(nesterov=True)`.
        masking: clear `u` where an element was sent. An element that decodes to zero counts as
            not sent, so this is for sparsifiers: a codec that sends every element clears all of
            `u` and leaves none of the momentum.
        dtype: dtype of both memories; None for that of the gradient, "int8" for eight-bit blocks.

    Raises:
        ValueError: for a momentum outside [0, 1], or a dtype that is not floating.

    Example:
        >>> import jaxcomp, optax
        >>> link = jaxcomp.Link(jaxcomp.top_k(fraction=0.001), MomentumCorrection(momentum=0.9))
        >>> tx = optax.chain(
        ...     jaxcomp.clip_local(2.0, axis_name="data"),
        ...     jaxcomp.compressed_mean(link, axis_name="data"),
        ...     optax.masked(optax.trace(0.9), jaxcomp.dense_leaves(link)),
        ...     optax.sgd(0.1),
        ... )

    References:
        Lin et al., `Deep gradient compression <https://arxiv.org/abs/1712.01887>`_, 2018.

    Note:
        Of `v`, what was sent is subtracted where the paper clears it, which is the same for values
        that arrive as they are and keeps what a quantiser rounds off. With a codec that sends
        everything this is, up to rounding, SGD with momentum; with masking it is SGD without, since
        no momentum lasts (Nesterov's then makes steps `1 + m` times as long). Clipping is a
        transformation of its own, `clip_local`. A worker that does not take part in a step (weight
        zero) keeps its whole message, and its momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    dtype: str | None = None
    kind = "momentum"
    bounded = True

    def __post_init__(self):
        checks.number("momentum", self.momentum, 0.0, 1.0)
        checks.choice("nesterov", self.nesterov, (False, True))
        checks.choice("masking", self.masking, (False, True))
        memory.check(self.dtype)

    def check(self, codec: Codec, size: int | None) -> None:
        """Raises a `ValueError` for a codec around which the memory would grow."""
        memory.check_residual(self, codec, size)

    def init(self, like: PyTree, part_like: PyTree) -> MomentumState:
        del part_like

        def zeros():
            return jax.tree.map(lambda leaf: memory.zeros(leaf, self.dtype), like)

        return MomentumState(zeros(), zeros())  # Two trees, so that both may be donated.

    def compensate(self, x: PyTree, state: MomentumState) -> tuple[PyTree, MomentumState]:
        # In the wider dtype, for a wide memory is there to add up what a narrow gradient cannot.
        held = memory.tree(state)
        wide = jax.tree.map(
            lambda g, u: g.astype(jnp.promote_types(g.dtype, u.dtype)), x, held.momentum
        )
        total = jax.tree.map(memory.added, wide, held.momentum)
        # Decayed before it is stored: a product next to a sum may or may not be fused with it.
        momentum = jax.tree.map(lambda u: u * self.momentum, total)
        step = jax.tree.map(memory.added, wide, momentum) if self.nesterov else total
        velocity = jax.tree.map(memory.added, step, held.velocity)
        message = jax.tree.map(lambda v, g: summing.saturated(v, g.dtype), velocity, x)
        return message, MomentumState(momentum, velocity)

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: MomentumState,
    ) -> tuple[PyTree, MomentumState]:
        del message  # It may be a narrower rounding of the velocity.
        arrived = jax.tree.map(
            lambda c: c if weight is None else jnp.where(weight == 0, 0, c), sent
        )

        def left(v, c):
            return memory.store(v - c, self.dtype or c.dtype)

        def kept(u, c):
            return memory.store(
                jnp.where(c != 0, 0, u) if self.masking else u, self.dtype or c.dtype
            )

        velocity = jax.tree.map(left, state.velocity, arrived)
        momentum = jax.tree.map(kept, state.momentum, arrived)
        return part, MomentumState(momentum, velocity)

    def unsent(self, state: MomentumState) -> PyTree:
        return memory.tree(state.velocity)

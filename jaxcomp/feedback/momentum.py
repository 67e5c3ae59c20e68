"""Momentum correction, as in deep gradient compression."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec, Feedback, FeedbackFacts, sent_later
from jaxcomp.feedback import memory
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


@sent_later("velocity")
class MomentumState(NamedTuple):
    """The memory of a sender with momentum.

    Attributes:
        momentum: `m·u`, already decayed; the next gradient is added to it.
        velocity: `v`, the unsent part of the accumulated velocity.
    """

    momentum: PyTree
    velocity: PyTree


@dataclasses.dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Applies momentum before compression, so that unsent elements accumulate momentum too.

    `u ← m·u + g`, `v ← v + u`, send `C(v)`, `v ← v − C(v)`, and `u ← 0` where `C(v) ≠ 0` (factor
    masking, because the momentum of an element just sent is out of date). With Nesterov's momentum
    `u ← m·(u + g)`, `v ← v + u + g`. The mean includes the momentum already: chain plain
    `optax.sgd(rate)` after it. Dense leaves bypass the feedback; give them momentum with
    `optax.masked(optax.trace(0.9), jaxcomp.dense_leaves(link))`.

    Args:
        momentum: the decay of `u`, in [0, 1].
        nesterov: use Nesterov's momentum, as in `optax.trace(nesterov=True)`.
        masking: clear `u` where an element was sent. An element that decodes to zero counts as
            not sent, so this is for sparsifiers: a codec that sends every element would clear all
            of `u`, and no momentum would remain.
        dtype: dtype of both memories; None for float32 (float64 for float64), "int8" for
            eight-bit blocks.

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
        The sent values are subtracted from `v`; the paper clears `v` there. Both are the same for
        values sent exactly, and subtraction keeps a quantiser's rounding error. With a codec that
        sends everything, this is SGD with momentum up to rounding; with masking it is SGD without
        momentum (with Nesterov's, the steps are `1 + m` times as long). Clipping is a separate
        transformation, `clip_local`. A non-participating worker (weight zero) keeps its whole
        message and its momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    dtype: str | None = None
    facts = FeedbackFacts(bounded=True, keeps_unsent=True, accelerates=True)

    def __post_init__(self):
        checks.number("momentum", self.momentum, 0.0, 1.0)
        checks.choice("nesterov", self.nesterov, (False, True))
        checks.choice("masking", self.masking, (False, True))
        memory.check(self.dtype)

    def check(self, codec: Codec, size: int | None) -> None:
        """Raises a `ValueError` for a codec with which the memory would grow."""
        memory.check_residual(self, codec, size)

    def init(self, like: PyTree, part_like: PyTree) -> MomentumState:
        del part_like

        def zeros():
            return jax.tree.map(lambda leaf: memory.zeros(leaf, self.dtype), like)

        return MomentumState(zeros(), zeros())  # Separate trees, so that both may be donated.

    def compensate(self, x: PyTree, state: MomentumState) -> tuple[PyTree, MomentumState]:
        # Add in the wider dtype: a wide memory must accumulate more digits than a narrow gradient.
        held = memory.tree(state)
        wide = jax.tree.map(
            lambda g, u: g.astype(jnp.promote_types(g.dtype, u.dtype)), x, held.momentum
        )
        total = jax.tree.map(memory.add_saturated, wide, held.momentum)
        # Decay before storing: a product next to a sum may or may not be fused with it.
        momentum = jax.tree.map(lambda u: u * self.momentum, total)
        step = jax.tree.map(memory.add_saturated, wide, momentum) if self.nesterov else total
        velocity = jax.tree.map(memory.add_saturated, step, held.velocity)
        message = jax.tree.map(lambda v, g: addition.saturate(v, g.dtype), velocity, x)
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

        # Within the range of messages: a wider memory of one gradient near the largest float16
        # would be sent for many steps, and what sums the means would overflow in each of them.
        def subtract(v, c):
            return memory.store(addition.within(v - c, c.dtype), self.dtype)

        def clear(u, c):
            rest = jnp.where(c != 0, 0, u) if self.masking else u
            return memory.store(addition.within(rest, c.dtype), self.dtype)

        velocity = jax.tree.map(subtract, state.velocity, arrived)
        momentum = jax.tree.map(clear, state.momentum, arrived)
        return part, MomentumState(momentum, velocity)

    def unsent(self, state: MomentumState) -> PyTree:
        return memory.tree(state.velocity)

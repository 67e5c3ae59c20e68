"""`NoFeedback`, and `Residual`, which is error feedback."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec, Feedback, FeedbackFacts, sent_later
from jaxcomp.feedback import memory
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class NoFeedback(Feedback):
    """Sends the gradient unchanged, and has no memory."""

    facts = FeedbackFacts(memory=False, bounded=True)

    def init(self, like: PyTree, part_like: PyTree) -> tuple:
        del like, part_like
        return ()

    def compensate(self, x: PyTree, state: tuple) -> tuple[PyTree, tuple]:
        return x, state

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: tuple,
    ) -> tuple[PyTree, tuple]:
        return part, state


@sent_later("residual")
class ResidualState(NamedTuple):
    """The unsent part of past messages, already decayed."""

    residual: PyTree


@dataclasses.dataclass(frozen=True)
class Residual(Feedback):
    """Error feedback: the compression error of a message is added to the next one.

    `p = g + e`, send `C(p)`, `e ← decay · (p − C(p))`. The residual stays bounded with a
    contractive codec, and with an unbiased codec of variance `ω` if `decay² · ω < 1`; otherwise a
    `Link` raises.

    Args:
        decay: the fraction of the residual that is kept, in [0, 1].
        dtype: dtype of the memory; None for float32 (float64 for float64), "int8" for
            eight-bit blocks.

    References:
        Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al.,
        `Error feedback fixes SignSGD <https://arxiv.org/abs/1901.09847>`_, 2019.

    Note:
        The paper stores `γg`, the learning rate times the gradient; this stores the gradient, which
        is the same as long as the learning rate is constant. Messages and residuals of finite
        gradients saturate at the largest number of their dtype; the excess is lost. A
        non-participating worker (weight zero) keeps its whole message.
    """

    decay: float = 1.0
    dtype: str | None = None

    def __post_init__(self):
        checks.number("decay", self.decay, 0.0, 1.0)
        memory.check(self.dtype)

    @functools.cached_property
    def facts(self) -> FeedbackFacts:  # pyright: ignore[reportIncompatibleVariableOverride]
        return FeedbackFacts(bounded=True, keeps_unsent=True, conserves=self.decay == 1)

    def check(self, codec: Codec, size: int | None) -> None:
        """Raises a `ValueError` for a codec whose residual would grow."""
        memory.check_residual(self, codec, size, self.decay)

    def init(self, like: PyTree, part_like: PyTree) -> ResidualState:
        del part_like
        return ResidualState(jax.tree.map(lambda leaf: memory.zeros(leaf, self.dtype), like))

    def compensate(self, x: PyTree, state: ResidualState) -> tuple[PyTree, ResidualState]:
        # Add in the wider dtype: a wide memory must accumulate more digits than a narrow gradient.
        total = jax.tree.map(
            lambda g, e: memory.add_saturated(g.astype(jnp.promote_types(g.dtype, e.dtype)), e),
            x,
            memory.tree(state.residual),
        )
        message = jax.tree.map(lambda p, g: addition.saturate(p, g.dtype), total, x)
        return message, ResidualState(total)

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: ResidualState,
    ) -> tuple[PyTree, ResidualState]:
        del message  # It may be rounded to a narrower dtype than the memory.

        def subtract(p, c):
            arrived = c if weight is None else jnp.where(weight == 0, 0, c)
            rest = p - arrived
            # Decay before storing: a product next to a sum may or may not be fused with it.
            rest = rest if self.decay == 1 else rest * self.decay
            return memory.store(rest, self.dtype)

        return part, ResidualState(jax.tree.map(subtract, state.residual, sent))

    def unsent(self, state: ResidualState) -> PyTree:
        return memory.tree(state.residual)

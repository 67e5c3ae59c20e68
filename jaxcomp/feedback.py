"""What a sender remembers of what it could not say, and the link that joins it to a codec."""

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks, offers, policy as policy_
from jaxcomp.policy import Policy
from jaxcomp.protocols import Array, Codec, Feedback, PyTree


@dataclasses.dataclass(frozen=True)
class NoFeedback:
    """Sends what it is given and remembers nothing."""

    kind = "none"

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


class ResidualState(NamedTuple):
    """What has not been sent yet, already decayed."""

    residual: PyTree


@dataclasses.dataclass(frozen=True)
class Residual:
    """Error feedback: what a message lost is added to the next one.

    `p = g + e`, send `C(p)`, `e ← decay · (p − C(p))`. With a contractive codec the error stays
    bounded; on top of an unbiased codec whose error can exceed its input it may grow.

    Args:
        decay: how much of the residual is kept, in [0, 1].
        dtype: dtype of the memory; None for that of the gradient.

    References:
        Seide et al., 1-bit stochastic gradient descent, 2014; Karimireddy et al.,
        `Error feedback fixes SignSGD <https://arxiv.org/abs/1901.09847>`_, 2019.

    Note:
        The paper keeps `γg`, the step times the gradient; this keeps the gradient, which is the
        same while the learning rate is constant. A worker that does not take part in a step
        (weight zero) keeps its whole message.
    """

    decay: float = 1.0
    dtype: str | None = None
    kind = "residual"

    def __post_init__(self):
        checks.number("decay", self.decay, 0.0, 1.0)
        checks.choice("dtype", self.dtype, (None, "float64", "float32", "bfloat16", "float16"))

    def init(self, like: PyTree, part_like: PyTree) -> ResidualState:
        del part_like
        return ResidualState(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, self.dtype or leaf.dtype), like)
        )

    def compensate(self, x: PyTree, state: ResidualState) -> tuple[PyTree, ResidualState]:
        return jax.tree.map(lambda g, e: g + e.astype(g.dtype), x, state.residual), state

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: ResidualState,
    ) -> tuple[PyTree, ResidualState]:
        def lost(p, c, e):
            arrived = c if weight is None else jnp.where(weight == 0, 0, c)
            rest = p - arrived
            # Decayed before it is stored: a product next to a sum may or may not be fused with it.
            rest = rest if self.decay == 1 else rest * self.decay
            # What a narrower memory cannot hold it must not turn into Inf, which would stay.
            largest = jnp.finfo(e.dtype).max.astype(rest.dtype)
            narrow = jnp.finfo(e.dtype).max < jnp.finfo(rest.dtype).max
            return (jnp.clip(rest, -largest, largest) if narrow else rest).astype(e.dtype)

        return part, ResidualState(jax.tree.map(lost, message, sent, state.residual))


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction of travel: a codec with its feedback.

    Args:
        codec: a codec, which takes the leaves that the default policy gives it, or a `Policy`.
        feedback: the sender's memory.

    Raises:
        ValueError: if `codec` or `feedback` is not one.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.Link(jaxcomp.top_k(fraction=0.01), jaxcomp.Residual()).feedback
        Residual(decay=1.0, dtype=None)
    """

    codec: "Codec | Policy"
    feedback: Feedback = NoFeedback()

    def __post_init__(self):
        if isinstance(self.codec, type) or not isinstance(self.codec, Codec | Policy):
            raise ValueError(
                "`codec` must be a codec such as jaxcomp.qsgd_inf(bits=4), or a Policy, "
                f"got {self.codec!r}"
            )
        if isinstance(self.feedback, type) or not hasattr(self.feedback, "compensate"):
            raise ValueError(
                "`feedback` must be a feedback such as jaxcomp.Residual() or jaxcomp.NoFeedback(), "
                f"got {self.feedback!r}"
            )
        lossy = [codec for codec in self.policy.codecs if offers.contractive(codec)]
        if lossy and isinstance(self.feedback, NoFeedback):
            warnings.warn(
                f"{lossy[0]!r} is biased, and without feedback what it drops is lost for good; "
                "use Link(codec, Residual()).",
                stacklevel=3,
            )
        loose = [codec for codec in self.policy.codecs if not offers.contractive(codec)]
        if loose and isinstance(self.feedback, Residual):
            warnings.warn(
                f"{loose[0]!r} is not contractive: where its error exceeds its input, a residual "
                "on top of it grows from step to step. Use NoFeedback(), or a contractive codec.",
                stacklevel=3,
            )

    @property
    def policy(self) -> Policy:
        """Which codec for which leaf."""
        return policy_.of(self.codec)


def default(codec: "Codec | Policy") -> Feedback:
    """The feedback that a codec's error class asks for: residual for contractive, else none.

    Raises:
        ValueError: if a policy mixes both classes, since one feedback serves the whole tree.
    """
    classes = {offers.contractive(member) for member in policy_.of(codec).codecs}
    if len(classes) > 1:
        raise ValueError(
            "`codec` is a policy that mixes contractive codecs, which need feedback, with others, "
            "which do not; say which feedback you want with jaxcomp.Link(policy, feedback), got "
            f"{codec!r}"
        )
    return Residual() if classes == {True} else NoFeedback()

"""What a sender remembers of what it could not say, and the link that joins it to a codec."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp import checks, offers, policy as policy_
from jaxcomp.policy import Policy
from jaxcomp.protocols import Array, Codec, Feedback, PyTree

_DTYPES = (None, "float64", "float32", "bfloat16", "float16")


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
        checks.choice("dtype", self.dtype, _DTYPES)

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
            return _stored(rest if self.decay == 1 else rest * self.decay, e.dtype)

        return part, ResidualState(jax.tree.map(lost, message, sent, state.residual))

    def unsent(self, state: ResidualState) -> PyTree:
        return state.residual


class MomentumState(NamedTuple):
    """What a sender with momentum remembers.

    Attributes:
        momentum: `m·u`, decayed already: what the next gradient is added to.
        velocity: `v`, what of all velocities has not been sent yet.
    """

    momentum: PyTree
    velocity: PyTree


@dataclasses.dataclass(frozen=True)
class MomentumCorrection:
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
        dtype: dtype of both memories; None for that of the gradient.

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

    def __post_init__(self):
        checks.number("momentum", self.momentum, 0.0, 1.0)
        checks.choice("nesterov", self.nesterov, (False, True))
        checks.choice("masking", self.masking, (False, True))
        checks.choice("dtype", self.dtype, _DTYPES)

    def init(self, like: PyTree, part_like: PyTree) -> MomentumState:
        del part_like

        def zeros():
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, self.dtype or leaf.dtype), like)

        return MomentumState(zeros(), zeros())  # Two trees, so that both may be donated.

    def compensate(self, x: PyTree, state: MomentumState) -> tuple[PyTree, MomentumState]:
        # In the wider dtype, for a wide memory is there to add up what a narrow gradient cannot.
        wide = jax.tree.map(
            lambda g, u: g.astype(jnp.promote_types(g.dtype, u.dtype)), x, state.momentum
        )
        total = jax.tree.map(jnp.add, wide, state.momentum)
        # Decayed before it is stored: a product next to a sum may or may not be fused with it.
        momentum = jax.tree.map(lambda u: u * self.momentum, total)
        step = jax.tree.map(jnp.add, wide, momentum) if self.nesterov else total
        velocity = jax.tree.map(jnp.add, state.velocity, step)
        message = jax.tree.map(lambda v, g: v.astype(g.dtype), velocity, x)
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
            return _stored(v - c, self.dtype or c.dtype)

        def kept(u, c):
            return _stored(jnp.where(c != 0, 0, u) if self.masking else u, self.dtype or c.dtype)

        velocity = jax.tree.map(left, state.velocity, arrived)
        momentum = jax.tree.map(kept, state.momentum, arrived)
        return part, MomentumState(momentum, velocity)

    def unsent(self, state: MomentumState) -> PyTree:
        return state.velocity


def _stored(x: Array, dtype: Any) -> Array:
    """What a memory of this dtype keeps of `x`."""
    if jnp.finfo(dtype).max < jnp.finfo(x.dtype).max:
        # What a narrower memory cannot hold it must not turn into Inf, which would stay.
        largest = jnp.finfo(dtype).max.astype(x.dtype)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


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
        if loose and isinstance(self.feedback, Residual | MomentumCorrection):
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

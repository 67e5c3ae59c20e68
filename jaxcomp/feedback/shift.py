"""Shifts: workers send the difference from a memory that sender and receiver both keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Codec, Feedback, FeedbackFacts, Mirrored
from jaxcomp.feedback import memory
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Shift(Feedback):
    """Compresses each gradient's difference from a learned shift, which the receivers mirror.

    `m = g − h`, send `C(m)`, `h ← h + a · C(m)`; the estimate is `H + Σ C(mᵢ)/n`, and the mirror
    `H ← H + a · Σ C(mᵢ)/n` stays the mean of all `hᵢ`. When gradients converge, the messages go to
    zero, and so does the codec's error: full gradients converge to the exact solution even if they
    differ between workers.

    With partial participation, each participant moves its `h` by `a · C(m)` and the mirror moves by
    `a · Σ_S C(mᵢ)/n`. The estimate is `H + Σ_S C(mᵢ)/(p·n)`, whose expectation is that of all
    workers, or `H + Σ_S C(mᵢ)/n` for EF21, whose biased messages no factor corrects (EF21-PP).

    * EF21 is `a = 1` around a contractive codec;
    * DIANA is `a ≤ 1/(1 + ω)` around an unbiased codec of relative variance `ω`.

    Memory: `h` of the size of the gradient on each worker, and one mirror for all workers, of the
    size of the part of the mean that a device holds (`d` under `Gather`, `d/n` under `TwoShot`).

    Args:
        step: `a`, in (0, 1].
        dtype: dtype of both memories; None for float32 (float64 for float64). In narrower ones `h`
            and `H` would round differently, and the difference would persist.
        absent: the treatment of non-participants under a gate. "remembered": the mirror represents
            them (Artemis's PP2). "left out": the estimate is `Σ_S (hᵢ + C(mᵢ)) / (p·n)` over the
            participants, whose noise does not vanish at the solution. "left out" is for
            comparisons: it works only with `Gather`, and averages the `hᵢ` dense, which
            `wire_bytes` does not count.

    Raises:
        ValueError: for a step outside (0, 1], another dtype or another `absent`. A `Link` raises if
            the step is too long for the codec.

    Example:
        >>> import jaxcomp
        >>> jaxcomp.Link(jaxcomp.sign(), Shift())  # EF21.
        Link(codec=..., feedback=Shift(step=1.0, dtype=None, absent='remembered'))

    References:
        Richtárik et al., `EF21 <https://arxiv.org/abs/2106.05203>`_, 2021; Mishchenko et al.,
        `Distributed learning with compressed gradient differences
        <https://arxiv.org/abs/1901.09269>`_ (DIANA), 2019. Partial participation: Philippenko and
        Dieuleveut, `Artemis <https://arxiv.org/abs/2006.14591>`_, 2020; Fatkhullin et al., `EF21
        with bells & whistles <https://arxiv.org/abs/2110.03294>`_ (EF21-PP), 2021.

    Note:
        Memories start at zero, so that those of EF21 are `C(∇f(x⁰))` after the first message, as in
        the paper. A worker of weight zero keeps its memory. The public code of Artemis moves the
        mirror by `1/p` of this rule, so that it is the mean of the memories only at the solution.
    """

    step: float = 1.0
    dtype: str | None = None
    absent: str = "remembered"

    def __post_init__(self):
        checks.number("step", self.step, 0.0, 1.0)
        checks.positive("step", self.step)
        memory.check(self.dtype, exact=True)
        checks.choice("absent", self.absent, ("remembered", "left out"))

    @functools.cached_property
    def facts(self) -> FeedbackFacts:  # pyright: ignore[reportIncompatibleVariableOverride]
        return FeedbackFacts(mirrors=True, forgets_absent=self.absent == "left out")

    def check(self, codec: Codec, size: int | None) -> None:
        """Raises a `ValueError` for a codec with which the shift would not converge."""
        if codec.contractive:
            if self.step != 1:
                raise ValueError(
                    f"`feedback` must be Shift(step=1.0), EF21, around a contractive codec, since "
                    f"a shorter step does not average out its bias, got {self!r} around {codec!r}; "
                    "DIANA's shorter step needs an unbiased codec, such as jaxcomp.qsgd()"
                )
            return
        if not codec.unbiased:
            raise ValueError(
                f"`feedback` must be Residual() or NoFeedback() around {codec!r}, which is neither "
                f"unbiased nor contractive, so that a shift may not converge, got {self!r}; or use "
                "jaxcomp.codecs.Contractive(codec), an unbiased codec, or a contractive one"
            )
        omega = None if size is None else codec.variance_bound(size)
        if omega is not None and self.step * (1 + omega) >= 2:
            raise ValueError(
                f"`step` must be at most 1/(1 + ω) = {1 / (1 + omega):.4g} for the variance "
                f"ω = {omega:.4g} of {codec!r} on buckets of {size}, since from twice that on the "
                f"memory may grow, got {self.step}; or use "
                "jaxcomp.codecs.Contractive(codec) with Shift(step=1.0)"
            )

    def init(self, like: PyTree, part_like: PyTree) -> Mirrored:
        def zeros(tree):
            return jax.tree.map(lambda leaf: memory.zeros(leaf, self.dtype), tree)

        return Mirrored(own=zeros(like), mirror=zeros(part_like))

    def compensate(self, x: PyTree, state: Mirrored) -> tuple[PyTree, Mirrored]:
        return jax.tree.map(lambda g, h: (g - h).astype(g.dtype), x, state.own), state

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: Mirrored,
    ) -> tuple[PyTree, Mirrored]:
        def move(held, c, weight=None):
            wide = addition.wide(held.dtype)
            c = c.astype(wide)
            if weight is not None or self.step != 1:
                times = jnp.asarray(self.step, wide) * (1 if weight is None else weight)
                # Block a fused multiply-add with the memory, which would round differently.
                c = xla.block_fma(c * times.astype(wide))
            return (held.astype(wide) + c).astype(held.dtype)

        def follow(h, c):
            # A value that saturated in decoding differs from its part in the mean of all messages.
            whole = jnp.abs(c) < jnp.finfo(c.dtype).max
            return jnp.where(whole, move(h, c, weight), jnp.nan)

        own = jax.tree.map(follow, state.own, sent)
        if weight is not None:  # An unsent message may have any value.
            own = jax.tree.map(lambda h, now: jnp.where(weight == 0, h, now), state.own, own)
        estimate = jax.tree.map(lambda m, p: m + p.astype(m.dtype), state.mirror, part)
        mirror = jax.tree.map(move, state.mirror, part)
        estimate = jax.tree.map(lambda e, p: e.astype(p.dtype), estimate, part)
        return estimate, Mirrored(own, mirror)

    def known(self, sent: PyTree, state: Mirrored) -> PyTree:
        return jax.tree.map(lambda h, c: (h + c.astype(h.dtype)).astype(c.dtype), state.own, sent)

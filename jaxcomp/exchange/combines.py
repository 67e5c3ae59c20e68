"""Combinations of a leg: the rows that a device makes of the payloads that it received."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Combine, Heard, Outcome
from jaxcomp.exchange import guarding, moves, receive, send
from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree, Stacks


@dataclasses.dataclass(frozen=True)
class Average(Combine):
    """The mean of all decoded messages, `Σ wᵢ·cᵢ / n`, added in the order of the workers.

    Args:
        over: "workers"; "senders" to divide each element by the weights of its senders, for which
            the codec must be a sparsifier; "one" for the sum.
    """

    over: str = "workers"

    def __post_init__(self):
        checks.choice("over", self.over, ("workers", "senders", "one"))

    def check(self, link: Any) -> None:
        if self.over != "senders":
            return
        dense = [c for c in link.policy.codecs if not c.facts.names_senders]
        if dense:
            raise ValueError(
                f"`over` must be 'workers' for codecs that send every element, got 'senders' with "
                f"{dense[0]!r}; 'senders' needs a sparsifier such as jaxcomp.demo() or "
                "jaxcomp.top_k()"
            )
        if link.feedback.facts.mirrors:
            raise ValueError(
                "`over` must be 'workers' with a feedback that has a mirror, got 'senders' with "
                f"{link.feedback!r}; 'senders' can be combined with "
                "jaxcomp.Residual()"
            )

    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: PyTree) -> Outcome:
        value = receive.mean(
            key,
            stage.arrives,
            heard.payloads,
            sent.sides,
            heard.weights,
            stage.workers,
            stage.first,
            over=self.over,
        )
        return Outcome(value, sent.sent, heard.share, state)


@dataclasses.dataclass(frozen=True)
class Each(Combine):
    """Each worker's decoded message: arrays with a leading axis of workers."""

    over = "each"

    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: PyTree) -> Outcome:
        given = (key, stage.arrives, heard.payloads, sent.sides, stage.workers, stage.first)
        return Outcome(receive.each(*given), sent.sent, heard.share, state)

    def effort(self, stage: Any) -> tuple[float, float]:
        return stage.workers, 0.0


@dataclasses.dataclass(frozen=True)
class Join(Combine):
    """The rows of all workers one after another, of which each encoded its own slice."""

    takes = "slices"

    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: PyTree) -> Outcome:
        given = (key, stage.batches, heard.payloads, sent.sides, stage.workers)
        return Outcome(receive.slices(*given), sent.sent, heard.share, state)

    def effort(self, stage: Any) -> tuple[float, float]:
        return stage.workers, 0.0


@dataclasses.dataclass(frozen=True)
class Sum(Combine):
    """The mean from the sum of all payloads, of which one is decoded."""

    takes = "sum"

    def check(self, link: Any) -> None:
        for codec in link.policy.codecs:
            codec.summable(1)

    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: PyTree) -> Outcome:
        def mean(batch: Any, payload: PyTree) -> Callable[..., Array]:
            before, factor = moves.factors(stage.workers, batch, payload)
            like = addition.accumulator(batch.like)

            def decode(key, payload, side):
                if batch.codec.facts.scales_sums:
                    side = jax.tree.map(lambda part: part * jnp.float32(before), side)
                whole = batch.codec.decode(key, payload, like, side)
                # The reciprocal: compiled code divides by a constant so, eager code does not.
                return (whole * jnp.asarray(factor, whole.dtype)).astype(batch.dtype)

            return xla.compile_separately(decode, batches_.lanes(payload, batch.size))

        # Any worker's key will do: a linear codec uses no private noise in decoding.
        keys = batches_.batch_keys(key, stage.batches, 0)
        value = tuple(
            batches_.real(batch, mean(batch, payload)(own, payload, side))
            for own, batch, payload, side in zip(
                keys, stage.batches, heard.payloads, sent.sides, strict=True
            )
        )
        return Outcome(value, sent.sent, heard.share, state)

    def effort(self, stage: Any) -> tuple[float, float]:
        return 1.0, 0.0


@dataclasses.dataclass(frozen=True)
class Mix(Combine):
    """Mixes the neighbours' messages with this worker's own: `partᵢ = Σⱼ wᵢⱼ · sentⱼ`.

    Sender and receivers alike leave out a message with an element that is not finite after
    decoding: its weight goes to the receiver's own message, and the sender does not mix in that
    round.
    """

    excludes = True
    takes = "neighbours"

    def check(self, link: Any) -> None:
        for codec in link.policy.codecs:
            facts = codec.facts
            if facts.agrees or facts.sided or facts.shaped:
                raise ValueError(
                    "`link` must have codecs that every worker uses by itself, for leaves of every "
                    f"shape, got {codec!r}; use a codec such as jaxcomp.qsgd_inf(bits=4)"
                )
        if link.feedback.facts.accelerates or link.feedback.facts.needs_mean:
            raise ValueError(
                "`link` must have jaxcomp.NoFeedback(), jaxcomp.Residual() or jaxcomp.Shift(), "
                f"since gossip mixes parameters, got {link.feedback!r}"
            )

    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: PyTree) -> Outcome:
        mirrors, (sources, times) = stage.leg.link.feedback.facts.mirrors, heard.weights
        own, usable = _usable(sent.sent, mirrors)
        part = own
        for number, payload in enumerate(heard.payloads):
            decoded = send.decode(key, stage.batches, payload, sent.sides, sources[number])
            theirs, sound = _usable(decoded, mirrors)
            weight = times[number]
            if not mirrors:  # The sender keeps its weight for itself.
                weight = jnp.where(sound & usable, weight, 0)
            part = jax.tree.map(functools.partial(_mixed, weight), part, own, theirs)
        return Outcome(part, own, heard.share, state)

    def effort(self, stage: Any) -> tuple[float, float]:
        return 1.0, stage.leg.move.messages(stage)


def _usable(stacks: Stacks, mirrors: bool) -> tuple[Stacks, Array]:
    """A decoded message, and whether all of it is finite.

    An unusable message adds nothing to the memory of a shift at both ends; without a mirror it
    stays, so that its sender sees it.
    """
    # Decoding saturates at the largest number of a dtype.
    within = [jnp.all(jnp.abs(x) < jnp.finfo(x.dtype).max) for x in stacks]
    sound = guarding.all_finite(stacks)
    sound &= functools.reduce(jnp.logical_and, within, jnp.asarray(np.True_))
    if mirrors:
        stacks = jax.tree.map(lambda x: jnp.where(sound, x, 0), stacks)
    return stacks, sound


def _mixed(weight: Array, part: Array, own: Array, theirs: Array) -> Array:
    """`part + weight · (theirs − own)`: the differences of an edge cancel in the mean.

    The product is not fused with the sum, which would round differently from program to program.
    """
    wide = addition.wide(part.dtype)
    apart = theirs.astype(wide) - own.astype(wide)
    by = xla.block_fma(jnp.where(weight == 0, 0, apart * weight.astype(wide)))
    return (part.astype(wide) + by).astype(part.dtype)

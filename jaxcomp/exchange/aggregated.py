"""The combination of decoded messages by a rule other than the mean."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt32

from jaxcomp.aggregates import combining
from jaxcomp.base import Aggregate, Combine, Heard, Outcome
from jaxcomp.exchange import receive, send
from jaxcomp.mesh import kinds
from jaxcomp.types import Array, Batches, PyTree, Stacks


@kinds.EVERYONES.register
class AggregateState(NamedTuple):
    """The state of an aggregate.

    Attributes:
        everyones: the aggregate's state, the same on all workers; its arrays have a leading axis of
            workers.
        excluded: the number of messages that were excluded in the last step.
    """

    everyones: PyTree
    excluded: UInt32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Aggregation(Combine):
    """The messages combined by an aggregate, without those that are not finite.

    A weight says whether a worker is present: it counts as 1 if it is above zero.

    Args:
        aggregate: the rule.
    """

    aggregate: Aggregate
    excludes = True
    slices = False

    def check(self, link: Any) -> None:
        agreeing = [codec for codec in link.policy.codecs if codec.facts.agrees]
        if agreeing:
            raise ValueError(
                "`link` must have codecs that every worker uses by itself, got "
                f"{agreeing[0]!r}: the workers agree on its scales or levels, and a hostile one "
                "would set them for all; use a codec such as jaxcomp.qsgd_inf(bits=4)"
            )
        shaped = [codec for codec in link.policy.codecs if codec.facts.shaped]
        if shaped:
            raise ValueError(
                "`link` must have codecs for leaves of every shape, so that no leaf is averaged "
                f"dense, got {shaped[0]!r}; use a codec such as jaxcomp.qsgd_inf(bits=4)"
            )
        feedback = link.feedback
        if feedback.facts.mirrors:
            raise ValueError(
                "`link` must have no feedback with a mirror, which follows the mean of all "
                f"messages and would differ from the senders' shifts, got {feedback!r} with "
                f"{self.aggregate!r}; use jaxcomp.NoFeedback() with an unbiased codec, or "
                "jaxcomp.Gather"
            )
        if not self.aggregate.linear and feedback.facts.memory:
            raise ValueError(
                "`link` must have jaxcomp.NoFeedback() with an aggregate that is not linear, got "
                f"{feedback!r} with {self.aggregate!r}: a residual assumes that the steps add up "
                "to the sum of all messages, so that what one message lost may be sent in a later "
                "one. Use an unbiased codec, such as jaxcomp.qsgd(bits=4), or "
                "jaxcomp.aggregates.Mean()"
            )

    def init(self, stage: Any) -> AggregateState:
        likes = tuple(batch.like for batch in stage.batches)
        held = self.aggregate.init(likes, stage.workers)
        return AggregateState(held, jnp.zeros((), jnp.uint32))

    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: Any) -> Outcome:
        absent = heard.weights is None
        present = jnp.ones(stage.workers, bool) if absent else heard.weights > 0
        weights = present.astype(jnp.float32)
        share = 1.0 if absent else jnp.sum(weights) * (1 / stage.workers)
        if not stage.batches:
            return Outcome((), sent.sent, share, state)

        def message(worker: Array) -> Stacks:
            payload = jax.tree.map(lambda leaf: leaf[worker], heard.payloads)
            return send.decode(key, stage.batches, payload, sent.sides, worker)

        everything = key, stage.batches, heard.payloads, sent.sides
        if self.aggregate.linear:
            found = _mean(everything, message, weights)
        elif self.aggregate.streams:
            found = _streamed(self.aggregate, stage, message, weights)
        else:
            messages = receive.each(*everything, stage.workers)
            found = combining.combine(self.aggregate, messages, weights, state.everyones)
        value = found.value
        if not absent and not self.aggregate.linear:
            value = jax.tree.map(lambda x: (x * share).astype(x.dtype), value)
        held = state.everyones if self.aggregate.streams else found.state
        return Outcome(value, sent.sent, share, AggregateState(held, found.excluded))

    def effort(self, stage: Any) -> tuple[float, float]:
        return stage.workers, 0.0


def _mean(
    everything: tuple[Array, Batches, Any, Any], message: Any, weights: Array
) -> combining.Combined:
    """`Σ wᵢ·cᵢ / n`, decoded as one sum, with the mean of the others for excluded messages."""

    def is_finite(_: None, worker: Array) -> tuple[None, Array]:
        own = jax.tree.map(lambda x: x[None], message(worker))
        return None, combining.finite(own)[0]

    workers = len(weights)
    _, sound = lax.scan(is_finite, None, jnp.arange(workers))
    usable, excluded = combining.exclude(sound, weights)
    present = jnp.sum(usable)
    usable = usable * (jnp.sum(weights) / jnp.maximum(present, 1))  # Times 1 if all are finite.
    value = receive.mean(*everything, usable, workers)
    sound = combining.has_quorum(present.astype(jnp.uint32), excluded)
    return combining.Combined(combining.nan_unless(sound, value), (), excluded)


def _streamed(aggregate: Aggregate, stage: Any, message: Any, weights: Array) -> combining.Combined:
    """The mean of prepared messages, of which one at a time is decoded."""
    likes = tuple(batch.like for batch in stage.batches)

    def add(total: combining.Total, worker: Array) -> tuple[combining.Total, None]:
        return combining.add(aggregate, total, message(worker), weights[worker]), None

    # Begin with a message, whose type says over which axes it differs.
    first, _ = add(combining.zero_total(likes), jnp.asarray(0))
    total, _ = lax.scan(add, first, jnp.arange(1, len(weights)))
    return combining.mean_of(total, likes)

"""Robust: every worker gathers all payloads, and combines them by a rule other than the mean."""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt32

from jaxcomp import checks
from jaxcomp.aggregates import combining
from jaxcomp.base import Aggregate, Codec, Collected, Costs, Reducer, ReducerFacts
from jaxcomp.codecs.identity import Identity
from jaxcomp.exchange import collectives, receive, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import kinds
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.theory import cost
from jaxcomp.types import Array, Batches, PyTree, Stacks
from jaxcomp.wire import cost as wire_cost


@kinds.EVERYONES.register
class RobustState(NamedTuple):
    """The state of `Robust`.

    Attributes:
        codec: the states of this worker's codecs.
        everyones: the aggregate's state, the same on all workers; its arrays have a leading axis of
            workers.
        excluded: the number of messages that were excluded in the last step.
    """

    codec: PerWorker
    everyones: PyTree
    excluded: UInt32[Array, ""]


@dataclasses.dataclass(frozen=True)
class Robust(Reducer):
    """Gathers all payloads, decodes each, and combines them by an aggregate instead of the mean.

    Every worker computes the same from the same payloads. It sends the bytes of `Gather`. Leaves
    that the policy leaves dense are gathered too, uncompressed, and are part of the messages: an
    all-reduce would let one worker set them to anything.

    A message with an element that is not finite is excluded, and its worker keeps its memory as it
    was. If at least half of the messages are excluded the result is NaN on all workers, and the
    guard of `compressed_mean` undoes the step. `Stats.excluded` and the state count them.

    Under a gate, the result is the combination of the participants' messages times their share, so
    that the gate's factor applies as to a mean. A weight says whether a worker takes part: positive
    ones count as 1, since a hostile worker chooses its own.

    Args:
        link: the link from each worker; a bare codec or policy means `Link(codec)`.
        aggregate: how messages are combined: `CoordinateMedian()`, `TrimmedMean(trim)`,
            `ClippedMean(norm)`, `Credible()` or `Mean()` of `jaxcomp.aggregates`.
        collectives: the number of all-gathers, as in `Gather`.

    Raises:
        ValueError: for a link or aggregate of another kind; for a codec whose workers agree on
            scales, which one worker could set; for a feedback with a mirror, and for any feedback
            with memory around an aggregate that is not linear.

    Example:
        >>> import jaxcomp
        >>> median = jaxcomp.aggregates.CoordinateMedian()
        >>> tx = jaxcomp.compressed_mean(Robust(jaxcomp.qsgd_inf(bits=8), median), "data")
        >>> grads = jnp.array([[[1.0, -2.0]], [[2.0, -2.0]], [[3e38, jnp.nan]]])
        >>> robust = lambda g: tx.update(g, tx.init(g))[0]
        >>> jax.vmap(robust, axis_name="data")(grads)[2]
        Array([[ 1.5, -2. ]], dtype=float32)

    Note:
        `sent` is a worker's own decoded message, and the law `pmean(sent) == part` of reducers
        holds for linear aggregates only. With `param_specs` every device combines its own shard:
        norms, exclusion and credibility are those of shards.
    """

    link: "Link | Codec | Policy"
    aggregate: Aggregate
    collectives: int | None = None

    def __post_init__(self):
        checks.part("aggregate", self.aggregate, Aggregate)
        if self.collectives is not None:
            checks.integer("collectives", self.collectives, 1)
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", self._linked(self.link))
        agreeing = [codec for codec in self._given.policy.codecs if codec.facts.agrees]
        if agreeing:
            raise ValueError(
                "`link` must have codecs that every worker uses by itself, got "
                f"{agreeing[0]!r}: the workers agree on its scales or levels, and a hostile one "
                "would set them for all; use a codec such as jaxcomp.qsgd_inf(bits=4)"
            )
        shaped = [codec for codec in self._given.policy.codecs if codec.facts.shaped]
        if shaped:
            raise ValueError(
                "`link` must have codecs for leaves of every shape, so that no leaf is averaged "
                f"dense, got {shaped[0]!r}; use a codec such as jaxcomp.qsgd_inf(bits=4)"
            )
        self._check_memory()

    def _linked(self, codec: Any) -> Link:
        """A link without feedback; a biased codec loses something, and a residual is no advice."""
        if self.aggregate.linear:
            return Link(codec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            link = Link(codec)
        lossy = [codec for codec in link.policy.codecs if codec.contractive]
        if lossy:
            warnings.warn(
                f"{lossy[0]!r} is biased, and what it drops is lost for good: a residual cannot "
                f"send it later with {self.aggregate!r}, which is not linear. Use an unbiased "
                "codec, such as jaxcomp.qsgd(bits=4).",
                stacklevel=4,
            )
        return link

    def _check_memory(self) -> None:
        feedback = self._given.feedback
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

    @property
    def _given(self) -> Link:
        return cast(Link, self.link)

    @property
    def facts(self) -> ReducerFacts:
        return ReducerFacts(excludes=True, composes=False, collectives=self.collectives)

    @functools.cached_property
    def uplink(self) -> Link:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The link of all leaves, those that the policy leaves dense included."""
        given = self._given
        policy = dataclasses.replace(given.policy, rest=given.policy.rest or Identity())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # `link` has warned already.
            return Link(policy, given.feedback)

    def init(self, plan: Plan) -> RobustState:
        return RobustState(
            codec=PerWorker.wrap(send.init(plan.batches), "codec", plan.axis_name),
            everyones=self.aggregate.init(plan.likes, plan.workers),
            excluded=jnp.zeros((), jnp.uint32),
        )

    def collect(
        self,
        plan: Plan,
        key: Array,
        message: Stacks,
        state: RobustState,
        weight: Array | None = None,
    ) -> Collected:
        batches, workers, worker = plan.batches, plan.workers, lax.axis_index(plan.axis)
        memory = send.Memory((), state.codec.own())
        own = send.send(key, batches, message, memory, worker, plan.axis, weight=weight)
        everything = (own.payloads, () if weight is None else (weight,))
        gathered, claimed = collectives.all_gather(everything, plan.axis, plan.collectives)
        present = jnp.ones(workers, bool) if weight is None else claimed[0] > 0
        weights = present.astype(jnp.float32)
        sent = own.sent
        after = state._replace(codec=PerWorker.wrap(own.memory.codecs, "codec", plan.axis_name))
        if not batches:
            return Collected((), sent, _share(weight, weights), after)
        heard = _Heard(key, batches, gathered, own.sides, workers)
        if self.aggregate.linear:
            found = _mean(heard, weights)
        elif self.aggregate.streams:
            found = _streamed(self.aggregate, heard, weights)
        else:
            messages = receive.each(*heard)
            found = combining.combine(self.aggregate, messages, weights, state.everyones)
        share = _share(weight, weights)
        whole = weight is None or self.aggregate.linear
        part = found.value if whole else _scaled(found.value, share)
        kept = state.everyones if self.aggregate.streams else found.state
        return Collected(part, sent, share, after._replace(everyones=kept, excluded=found.excluded))

    def costs(self, plan: Plan) -> Costs:
        """`n − 1` payloads, as many messages in each all-gather, and `n` decodings."""
        like, n = wire_cost.payload_like(plan.batches), plan.workers
        effort = cost.Effort(plan.rounds(like), encodes=1, decodes=n)
        return Costs((n - 1) * plan.encoded_bytes, ((self.uplink, effort),))


class _Heard(NamedTuple):
    """All workers' payloads, and what decodes them."""

    key: Array
    batches: Batches
    payloads: tuple[PyTree, ...]
    sides: tuple[Any, ...]
    workers: int


def _share(weight: Array | None, weights: Array) -> Array | float:
    return 1.0 if weight is None else jnp.sum(weights) * (1 / len(weights))


def _scaled(tree: Stacks, share: Array | float) -> Stacks:
    return jax.tree.map(lambda x: (x * share).astype(x.dtype), tree)


def _message(heard: _Heard, worker: Array) -> Stacks:
    key, batches, all_payloads, sides, _ = heard
    own = jax.tree.map(lambda leaf: leaf[worker], all_payloads)
    return send.decode(key, batches, own, sides, worker)


def _mean(heard: _Heard, weights: Array) -> combining.Combined:
    """`Σ wᵢ·cᵢ / n`, decoded as one sum, with the mean of the others for excluded messages."""

    def is_finite(_: None, worker: Array) -> tuple[None, Array]:
        own = jax.tree.map(lambda x: x[None], _message(heard, worker))
        return None, combining.finite(own)[0]

    _, sound = lax.scan(is_finite, None, jnp.arange(heard.workers))
    usable, excluded = combining.exclude(sound, weights)
    present = jnp.sum(usable)
    usable = usable * (jnp.sum(weights) / jnp.maximum(present, 1))  # Times 1 if all are finite.
    key, batches, all_payloads, sides, workers = heard
    value = receive.mean(key, batches, all_payloads, sides, usable, workers)
    sound = combining.has_quorum(present.astype(jnp.uint32), excluded)
    return combining.Combined(combining.spoilt_unless(sound, value), (), excluded)


def _streamed(aggregate: Aggregate, heard: _Heard, weights: Array) -> combining.Combined:
    """The mean of prepared messages, of which one at a time is decoded."""
    likes = tuple(batch.like for batch in heard.batches)

    def add(total: combining.Total, worker: Array) -> tuple[combining.Total, None]:
        message = _message(heard, worker)
        return combining.add(aggregate, total, message, weights[worker]), None

    # Begin with a message, whose type says over which axes it differs.
    first, _ = add(combining.zero_total(likes), jnp.asarray(0))
    total, _ = lax.scan(add, first, jnp.arange(1, heard.workers))
    return combining.mean_of(total, likes)

"""Two shots: each worker averages a slice of the vector, and sends the result to all others."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks
from jaxcomp.base import Codec, Collected, Costs, Reducer, ReducerFacts
from jaxcomp.codecs.identity import Identity
from jaxcomp.exchange import collectives, receive, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.layout import batches as batches_, policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.numerics.segments import Segments
from jaxcomp.theory import cost
from jaxcomp.types import Array, ArrayLike, PyTree, Stacks
from jaxcomp.wire import buffer, cost as wire_cost

_DOWN = 0x646F776E
"""Folded into the key of a step for the way down."""


class TwoShotState(NamedTuple):
    """The states of the codecs of both directions, and the downlink's memory.

    Attributes:
        up: the states of the uplink's codecs.
        down: the states of the downlink's codecs.
        memory: the memory of the downlink's feedback, for this worker's part of the mean.
    """

    up: PerWorker
    down: PerWorker
    memory: PyTree


@dataclasses.dataclass(frozen=True)
class TwoShot(Reducer):
    """A compressed reduce-scatter, then a compressed all-gather.

    Each worker sends to every other one a slice of its payload (an all-to-all), decodes and
    averages the slices that it receives, and sends the result to all (an all-gather). One device
    sends `(n − 1)/n` of the uplink's payload and of the downlink's, for any number of workers.

    The downlink is a separate link: its error adds to that of the uplink. With a biased codec it
    needs a separate feedback, whose memory has the size of a slice.

    Args:
        up: the link from each worker; a bare codec or policy means `Link(codec)`.
        down: the link to all workers, a codec or a `Link`; None sends the mean uncompressed. It
            sends the leaves that `up` compresses, regardless of its own policy, and needs buckets
            of the same size.
        collectives: the number of collectives that the payload is split into each way, in whole
            arrays, so that the first can start before the last gradient is computed; None for four
            if there are at least four million elements, else one.

    Raises:
        ValueError: if `up` or `down` is not a link, the links do not match, or `collectives` is not
            positive.

    Example:
        >>> import jaxcomp
        >>> ef21 = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
        >>> reducer = TwoShot(up=ef21, down=ef21)
        >>> like = {"w": jnp.zeros((1024, 1024))}
        >>> jaxcomp.wire_bytes(reducer, like, workers=8)
        243719
        >>> jaxcomp.wire_bytes(jaxcomp.Gather(ef21), like, workers=8)
        974855

    References:
        Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, whose
        `compressed_allreduce` this is; Fatkhullin et al., `EF21 with bells & whistles
        <https://arxiv.org/abs/2110.03294>`_, 2021, for feedback in both directions.

    Note:
        Slices consist of whole buckets; empty buckets pad them to equal size. A codec without
        buckets (`bucket_size=None`) encodes each worker's slice of a leaf instead of the whole.
    """

    up: "Link | Codec | Policy"
    down: "Link | Codec | None" = None
    collectives: int | None = None

    def __post_init__(self):
        if not isinstance(self.up, Link):
            object.__setattr__(self, "up", Link(self.up))
        if self.down is not None and not isinstance(self.down, Link):
            object.__setattr__(self, "down", Link(self.down))
        if self.collectives is not None:
            checks.integer("collectives", self.collectives, 1)
        _check(self.uplink, self.downlink)

    @property
    def uplink(self) -> Link:
        return cast(Link, self.up)

    @property
    def downlink(self) -> Link:
        """The link to all workers."""
        return Link(Identity()) if self.down is None else cast(Link, self.down)

    @property
    def facts(self) -> ReducerFacts:
        return ReducerFacts(splits=True, collectives=self.collectives)

    def init(self, plan: Plan) -> TwoShotState:
        cuts = self._cuts(plan.slices)
        memory = self.downlink.feedback.init(_likes(cuts), _likes(cuts, plan.workers))
        return TwoShotState(
            up=PerWorker.wrap(send.init(plan.batches), "codec", plan.axis_name),
            down=_hold_states(cuts, send.init(cuts), plan),
            memory=per_worker.wrap(memory, "slice", plan.axis_name),
        )

    def collect(
        self,
        plan: Plan,
        key: Array,
        message: Stacks,
        state: TwoShotState,
        weight: Array | None = None,
    ) -> Collected:
        batches, slices, n = plan.batches, plan.slices, plan.workers
        worker = lax.axis_index(plan.axis)
        memory = send.Memory((), state.up.own())
        own = send.send(key, batches, message, memory, worker, plan.axis, weight=weight)
        rows = tuple(
            jax.tree.map(own_slice.rows, payload)
            for own_slice, payload in zip(slices, own.payloads, strict=True)
        )
        weights = () if weight is None else (jnp.broadcast_to(weight, (n,)),)
        arrived, weights = collectives.all_to_all((rows, weights), plan.axis, plan.collectives)
        total = weights[0] if weights else None
        first = tuple(worker * own_slice.buckets for own_slice in slices)
        return Collected(
            part=receive.mean(key, slices, arrived, own.sides, total, n, first),
            sent=own.sent,
            share=1.0 if total is None else lax.pmean(weight, plan.axis),
            state=state._replace(up=PerWorker.wrap(own.memory.codecs, "codec", plan.axis_name)),
        )

    def spread(
        self, plan: Plan, key: Array, part: Stacks, state: TwoShotState
    ) -> tuple[Stacks, TwoShotState]:
        key, worker = noise.fold(key, _DOWN), lax.axis_index(plan.axis)
        cuts, feedback = self._cuts(plan.slices), self.downlink.feedback
        part = tuple(batches_.real(cut, cut.cut(x)) for cut, x in zip(cuts, part, strict=True))
        memory = send.Memory(per_worker.unwrap(state.memory), state.down.own())
        own = send.send(key, cuts, part, memory, worker, plan.axis, feedback=feedback, first=True)
        gathered = collectives.all_gather(own.payloads, plan.axis, plan.collectives)
        whole = receive.slices(key, cuts, gathered, own.sides, plan.workers)
        held = own.memory.feedback
        whole, memory = feedback.update(own.message, own.sent, whole, 1.0, None, held)
        down = _hold_states(cuts, own.memory.codecs, plan)
        memory = per_worker.wrap(memory, "slice", plan.axis_name)
        return _joined(plan, cuts, whole), state._replace(down=down, memory=memory)

    def known(self, plan: Plan, part: Stacks, state: TwoShotState) -> Stacks:
        """The mean in a closed round: the memory of the downlink that all workers share."""
        mirror = per_worker.unwrap(state.memory).mirror
        return _joined(plan, self._cuts(plan.slices), mirror)

    def costs(self, plan: Plan) -> Costs:
        """`n − 1` slices up and as many down, the agreement, and as many messages each way."""
        n, cuts = plan.workers, self._cuts(plan.slices)
        up = tuple(
            jax.tree.map(lambda x, n=own_slice.buckets: _rows(x, n), payload)
            for own_slice, payload in zip(
                plan.slices, wire_cost.payload_like(plan.batches), strict=True
            )
        )
        down = wire_cost.payload_like(cuts)
        slices = buffer.fused_bytes(up) + buffer.fused_bytes(down)
        first = cost.Effort(plan.rounds(up), encodes=1, decodes=1 / n, adds=(n - 1) / n)
        second = cost.Effort(plan.rounds(down), encodes=1 / n, decodes=1)
        return Costs(
            link_bytes=(n - 1) * slices + plan.agreed_bytes,
            efforts=((self.uplink, first), (self.downlink, second)),
        )

    def _cuts(self, slices: Sequence[batches_.Slice]) -> tuple[batches_.Recut, ...]:
        """The slices as the downlink cuts them."""
        link = self.downlink
        if isinstance(link.codec, Policy):
            codecs = dict(zip(self.uplink.policy.codecs, link.codec.codecs, strict=True))
            return tuple(_cut(own_slice, codecs[own_slice.picked]) for own_slice in slices)
        return tuple(_cut(own_slice, cast(Codec, link.codec)) for own_slice in slices)


def _cut(own_slice: batches_.Slice, codec: Codec) -> batches_.Recut:
    """A share in the buckets of a codec, or with its leaves as the segments of the share."""
    segments = own_slice.segments
    if segments is None or codec.bucket_size is not None:
        return batches_.Recut(own_slice, codec)
    return batches_.Recut(own_slice, cast(Codec, codec.segmented(segments)))


def _check(up: Link, down: Link) -> None:
    shaped = [c for c in (*up.policy.codecs, *down.policy.codecs) if c.facts.shaped]
    if shaped:
        raise ValueError(
            f"`up` and `down` must have codecs of buckets, which can be split over workers, got "
            f"{shaped[0]!r}; for low-rank factors use jaxcomp.PowerIteration"
        )
    codecs = down.policy.codecs
    if isinstance(down.codec, Policy):
        if policy_.without_codecs(down.codec) != policy_.without_codecs(up.policy):
            raise ValueError(
                "`down` must be a codec for all leaves, or a Policy with the rules of `up` and "
                f"other codecs, got {down.codec!r} beside {up.policy!r}"
            )
    else:
        codecs = codecs * len(up.policy.codecs)
    for one, other in zip(up.policy.codecs, codecs, strict=True):
        longer = one.bucket_size and (other.bucket_size or 0) > one.bucket_size
        if longer:
            raise ValueError(
                "`down` must have buckets no longer than those of `up`, which are split over the "
                f"workers, got bucket_size={other.bucket_size} after {one.bucket_size}"
            )
        leaves = Segments((64, 32), 32)
        whole = one.bucket_size is None and other.bucket_size is None
        if whole and one.segmented(leaves) and not other.segmented(leaves):
            raise ValueError(
                f"`down` must have a bucket_size after {one!r}, which puts leaves of several sizes "
                f"into one bucket, or do the same, got {other!r}"
            )


def _rows(x: ArrayLike, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)


def _likes(batches: Sequence[batches_.Recut], times: int = 1) -> tuple:
    return tuple(_rows(batch.like, times * batch.buckets) for batch in batches)


def _joined(plan: Plan, cuts: Sequence[batches_.Recut], whole: Stacks) -> Stacks:
    """All slices, one after another, as the rows of each batch."""
    return tuple(
        cut.joined(x)[: batch.buckets].astype(batch.dtype)
        for cut, x, batch in zip(cuts, whole, plan.batches, strict=True)
    )


def _hold_states(cuts: Sequence[batches_.Recut], states: PyTree, plan: Plan) -> PerWorker:
    """The states of the downlink's codecs, whose kind says whether they are of single buckets."""

    def rows(cut: batches_.Recut, buckets: int) -> list[tuple[int, ...]]:
        like = jax.ShapeDtypeStruct((buckets, cut.size), cut.dtype)
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda: cut.codec.init(like)))]

    kind = "codec slice" if all(rows(cut, 1) != rows(cut, 2) for cut in cuts) else "codec"
    return PerWorker.wrap(states, kind, plan.axis_name)

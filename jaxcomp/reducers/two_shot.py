"""Two shots: each worker averages a slice of the vector, and sends the result to all others."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Collected, Feedback, Mirrored, Reducer
from jaxcomp.codecs.identity import Identity
from jaxcomp.feedback import Link
from jaxcomp.layout import batches as batches_, policy as policy_
from jaxcomp.layout.policy import Policy
from jaxcomp.mesh import per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.numerics.segments import Segments
from jaxcomp.reducers import accounting, dense as dense_, payloads, shard_memory
from jaxcomp.theory import cost
from jaxcomp.types import Array, ArrayLike, AxisName, Batches, PyTree, Stacks
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
class TwoShot(Reducer, public=("feedback",)):
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
    splits = True

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
    def feedback(self) -> Feedback:
        """The feedback of the downlink."""
        return self.downlink.feedback

    def shares(self, workers: tuple[int, ...]) -> int:
        """One bucket for each worker, for a leaf whose codec has no bucket size."""
        return math.prod(workers)

    def init(self, batches: Batches, axis_name: AxisName) -> TwoShotState:
        cuts = self._down(batches, axis_name)
        memory = self.feedback.init(_likes(cuts), _likes(cuts, axes.size(axis_name)))
        return TwoShotState(
            up=PerWorker.wrap(payloads.init(batches), "codec", axis_name),
            down=PerWorker.wrap(payloads.init(cuts), "codec share", axis_name),
            memory=_hold(memory, axis_name),
        )

    def fitted(self, batches: Batches, state: TwoShotState, axis_name: AxisName) -> TwoShotState:
        """The state with the memory of only this worker's slice."""
        cuts, memory = self._down(batches, axis_name), per_worker.unwrap(state.memory)
        n, rows = axes.size(axis_name), _likes(self._alone(batches, axis_name))
        whole = jax.eval_shape(lambda: self.feedback.init(rows, rows))
        wanted = jax.eval_shape(lambda: self.feedback.init(_likes(cuts), _likes(cuts, n)))
        if isinstance(memory, Mirrored):
            own = shard_memory.own(memory.own, wanted.own, axis_name, whole.own)
            memory = Mirrored(own, shard_memory.padded(memory.mirror, wanted.mirror))
        else:
            memory = shard_memory.own(memory, wanted, axis_name, whole)
        return state._replace(
            down=self._fresh(cuts, state.down, axis_name), memory=_hold(memory, axis_name)
        )

    def _fresh(
        self, cuts: Sequence[batches_.Recut], down: PerWorker, axis_name: AxisName
    ) -> PerWorker:
        """The codecs' initial states for this slice, which replace unused states for all rows."""
        wanted = jax.eval_shape(lambda: payloads.init(cuts))
        if jax.tree.map(jnp.shape, down.own()) == jax.tree.map(jnp.shape, wanted):
            return down
        return PerWorker.wrap(payloads.init(cuts), "codec share", axis_name)

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        return tuple(shard.like for shard in batches_.shards(batches, axis_name))

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: TwoShotState,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        worker, n = lax.axis_index(axis_name), axes.size(axis_name)
        own = payloads.encode(
            key, batches, message, state.up.own(), worker, axis_name, weight=weight
        )
        shards = batches_.shards(batches, axis_name)
        rows = tuple(
            jax.tree.map(shard.rows, payload)
            for shard, payload in zip(shards, own.payloads, strict=True)
        )
        weights = () if weight is None else (jnp.broadcast_to(weight, (n,)),)
        runs = accounting.collectives(self, batches)
        arrived, weights = buffer.exchange((rows, weights), axis_name, runs)
        total = weights[0] if weights else None
        first = tuple(worker * shard.buckets for shard in shards)
        return Collected(
            part=payloads.mean(key, shards, arrived, own.sides, total, n, first),
            sent=payloads.decode(key, batches, own.payloads, own.sides, worker),
            share=1.0 if total is None else lax.pmean(weight, axis_name),
            state=state._replace(up=PerWorker.wrap(own.states, "codec", axis_name)),
        )

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: TwoShotState, axis_name: AxisName
    ) -> tuple[Stacks, TwoShotState]:
        key, worker = noise.fold(key, _DOWN), lax.axis_index(axis_name)
        cuts = self._down(batches, axis_name)
        memory = per_worker.unwrap(state.memory)
        part = tuple(batches_.real(cut, cut.cut(x)) for cut, x in zip(cuts, part, strict=True))
        message, memory = self.feedback.compensate(part, memory)
        own = payloads.encode(key, cuts, message, state.down.own(), worker, axis_name, first=True)
        runs = accounting.collectives(self, batches)
        gathered = buffer.gather(own.payloads, axis_name, runs)
        whole = payloads.all_shares(key, cuts, gathered, own.sides, axes.size(axis_name))
        sent = payloads.decode(key, cuts, own.payloads, own.sides, worker, first=True)
        whole, memory = self.feedback.update(message, sent, whole, 1.0, None, memory)
        mean = tuple(
            cut.joined(x)[: batch.buckets]
            for cut, x, batch in zip(cuts, whole, batches, strict=True)
        )
        down = PerWorker.wrap(own.states, "codec share", axis_name)
        return mean, state._replace(down=down, memory=_hold(memory, axis_name))

    def unchanged(
        self, batches: Batches, part: Stacks, state: TwoShotState, axis_name: AxisName
    ) -> Stacks:
        """The mean in a closed round: the memory of the downlink that all workers share."""
        cuts, memory = self._down(batches, axis_name), per_worker.unwrap(state.memory)
        return tuple(
            cut.joined(x)[: batch.buckets].astype(batch.dtype)
            for cut, x, batch in zip(cuts, memory.mirror, batches, strict=True)
        )

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return dense_.fused_mean(leaves, axis_name, weight)

    def efforts(self, batches: Batches, workers: int) -> tuple[tuple[Link, cost.Effort], ...]:
        """The efforts of equal numbers of messages up and down, and of the decodings."""
        n = workers
        up, down = (accounting.rounds(self, batches, sent, n) for sent in self._sent(batches, n))
        first = cost.Effort(up, encodes=1, decodes=1 / n, adds=(n - 1) / n)
        second = cost.Effort(down, encodes=1 / n, decodes=1)
        return (self.uplink, first), (self.downlink, second)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """Bytes of `n − 1` slices up and as many down, of the agreement, and of dense leaves."""
        return accounting.link_bytes(self, like, workers)

    def batches_link_bytes(self, batches: Batches, workers: int) -> Fraction | int:
        """The part of `link_bytes` for the compressed leaves."""
        share = sum(map(buffer.fused_bytes, self._sent(batches, workers)))
        return (workers - 1) * share + wire_cost.agreed_bytes(batches, workers)

    def _sent(self, batches: Batches, workers: int) -> tuple[PyTree, PyTree]:
        """Shapes and dtypes of the arrays that one worker sends to another, up and down."""
        shards = tuple(batches_.Shard(batch, workers, None) for batch in batches)
        up = tuple(
            jax.tree.map(lambda x, n=shard.buckets: _rows(x, n), payload)
            for shard, payload in zip(shards, wire_cost.payload_like(batches), strict=True)
        )
        return up, wire_cost.payload_like(self._recut(shards))

    def _down(self, batches: Batches, axis_name: AxisName) -> tuple[batches_.Recut, ...]:
        """The slices as the downlink cuts them."""
        return self._recut(batches_.shards(batches, axis_name))

    def _alone(self, batches: Batches, axis_name: AxisName) -> tuple[batches_.Recut, ...]:
        """All rows as the downlink cuts them for a single worker."""
        return self._recut([batches_.Shard(batch, 1, axis_name) for batch in batches])

    def _recut(self, shards: Sequence[batches_.Shard]) -> tuple[batches_.Recut, ...]:
        link = self.downlink
        if isinstance(link.codec, Policy):
            codecs = dict(zip(self.uplink.policy.codecs, link.codec.codecs, strict=True))
            return tuple(_cut(shard, codecs[shard.picked]) for shard in shards)
        return tuple(_cut(shard, cast(Codec, link.codec)) for shard in shards)


def _cut(shard: batches_.Shard, codec: Codec) -> batches_.Recut:
    """A share in the buckets of a codec, or with its leaves as the segments of the share."""
    segments = shard.segments
    if segments is None or codec.bucket_size is not None:
        return batches_.Recut(shard, codec)
    return batches_.Recut(shard, cast(Codec, codec.segmented(segments)))


def _check(up: Link, down: Link) -> None:
    shaped = [c for c in (*up.policy.codecs, *down.policy.codecs) if c.shaped]
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


def _hold(memory: PyTree, axis_name: AxisName) -> PyTree:
    return per_worker.wrap(memory, "share", axis_name)

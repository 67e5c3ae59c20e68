"""How payloads move between workers: the moves of a leg."""

import dataclasses
import functools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Graph, Heard, Move
from jaxcomp.exchange import collectives, dense, over_workers, packing
from jaxcomp.graphs import Ring, mixing
from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import addition, noise
from jaxcomp.types import Array, AxisName, Batches, PyTree
from jaxcomp.wire import buffer, cost as wire_cost

_DRAW = 0x67726170
"""Folded into a round's key, so that the drawn graph is independent of the codecs' noise."""


@dataclasses.dataclass(frozen=True)
class AllGather(Move):
    """Every worker's payload on all workers; a device sends `n − 1` payloads.

    Args:
        collectives: the number of all-gathers that the payload is split into, in whole arrays; None
            for four if there are at least four million elements, else one.
        delay: seconds that a message takes one way. Where they are long against the bytes, it is
            sent to all workers at once, not along a ring. None for what is assumed: half a
            millisecond between CPUs of several processes, else nothing.
    """

    collectives: int | None = None
    delay: float | None = None

    def run(
        self, stage: Any, key: Array, sent: Any, weight: Array | None, state: PyTree
    ) -> tuple[Heard, PyTree]:
        del key
        given = (sent.payloads, () if weight is None else (weight,))
        payloads, weights = collectives.all_gather(given, stage.axis, stage.collectives, self.delay)
        if weight is None:
            return Heard(payloads, None, 1.0), state
        return Heard(payloads, weights[0], jnp.sum(weights[0]) * (1 / stage.workers)), state

    def link_bytes(self, stage: Any) -> int:
        payload = wire_cost.payload_like(stage.batches)
        return (stage.workers - 1) * buffer.fused_bytes(payload)

    def messages(self, stage: Any) -> float:
        return stage.rounds(wire_cost.payload_like(stage.batches))


@dataclasses.dataclass(frozen=True)
class AllToAll(Move):
    """To each worker its slice of the rows; a device sends `(n − 1)/n` of a payload.

    Args:
        collectives: the number of all-to-alls that the payload is split into; as of `AllGather`.
        delay: as of `AllGather`; without it, CPUs of several processes send in turns.
    """

    collectives: int | None = None
    delay: float | None = None
    splits = True

    def arrives(self, batches: Batches, workers: int, axis_name: AxisName) -> Batches:
        return tuple(batches_.Rows(batch, batch.codec, workers, axis_name) for batch in batches)

    def run(
        self, stage: Any, key: Array, sent: Any, weight: Array | None, state: PyTree
    ) -> tuple[Heard, PyTree]:
        del key
        rows = tuple(
            jax.tree.map(own.rows, payload)
            for own, payload in zip(stage.arrives, sent.payloads, strict=True)
        )
        weights = () if weight is None else (jnp.broadcast_to(weight, (stage.workers,)),)
        payloads, weights = collectives.all_to_all(
            (rows, weights), stage.axis, stage.collectives, self.delay
        )
        if weight is None:
            return Heard(payloads, None, 1.0), state
        # Not the sum of what arrived, which types know as different between the workers.
        return Heard(payloads, weights[0], lax.pmean(weight, stage.axis)), state

    def link_bytes(self, stage: Any) -> int:
        return (stage.workers - 1) * buffer.fused_bytes(_slices_like(stage))

    def messages(self, stage: Any) -> float:
        return stage.rounds(_slices_like(stage))


def _slices_like(stage: Any) -> tuple[PyTree, ...]:
    """Shapes and dtypes of the payload of a slice."""
    return tuple(
        jax.tree.map(lambda x, n=own.buckets: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), one)
        for own, one in zip(stage.arrives, wire_cost.payload_like(stage.batches), strict=True)
    )


@dataclasses.dataclass(frozen=True)
class AllReduce(Move):
    """The sum of all payloads on all workers; a device sends `2(n − 1)/n` of a payload.

    Codecs must be linear, or have integers that add up; weights of integers must be 0 or 1.
    """

    gives = "sum"

    def encodes(self, batches: Batches, workers: int) -> Batches:
        found = []
        for batch in batches:
            codec = batch.codec.summable(workers)
            found.append(batch if codec is batch.codec else batches_.Rows(batch, codec))
        return tuple(found)

    def run(
        self, stage: Any, key: Array, sent: Any, weight: Array | None, state: PyTree
    ) -> tuple[Heard, PyTree]:
        del key
        share = 1.0 if weight is None else lax.pmean(weight, stage.axis)
        leaves, treedef = jax.tree.flatten(sent.payloads)
        before = [
            factor
            for batch, payload in zip(stage.batches, sent.payloads, strict=True)
            for factor in [factors(stage.workers, batch, payload)[0]]
            * len(jax.tree.leaves(payload))
        ]
        for leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
                raise ValueError(
                    "`link` must have codecs whose payloads are floats or integers of 32 bits, "
                    f"since a sum of narrower integers wraps around, got {leaf.dtype.name}"
                )
        terms = [
            x if over_workers.is_narrow(x.dtype) else _weighted(x, weight, factor)
            for x, factor in zip(leaves, before, strict=True)
        ]

        def add(flat: Array) -> Array:
            if over_workers.is_narrow(flat.dtype):
                return over_workers.mean([flat], stage.axis, weight)[0]
            return over_workers.total([flat], stage.axis)[0]

        sums = packing.by_dtype([x.reshape(-1) for x in terms], add)
        sums = [x.reshape(leaf.shape) for x, leaf in zip(sums, leaves, strict=True)]
        return Heard(jax.tree.unflatten(treedef, sums), None, share), state

    def link_bytes(self, stage: Any) -> Fraction:
        payload = wire_cost.payload_like(stage.batches)
        return dense.fused_link_bytes(jax.tree.leaves(payload), stage.workers)

    def messages(self, stage: Any) -> float:
        return 2 * (stage.workers - 1)


def factors(workers: int, batch: Any, payload: PyTree) -> tuple[float, float]:
    """The factors on each term, or on its decoder, and on the decoded sum, that give the mean.

    Terms that might overflow are divided before the sum, as far as this does not round; floats of
    16 bits are averaged in the collective.
    """
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(payload)}
    before, after = addition.mean_factors(workers)
    if any(jnp.issubdtype(dtype, jnp.integer) for dtype in dtypes):
        return (before, after) if batch.codec.facts.scales_sums else (1.0, 1 / workers)
    return (before * after, 1.0) if any(map(over_workers.is_narrow, dtypes)) else (before, after)


def _weighted(x: Array, weight: Array | None, factor: float) -> Array:
    """Floats times the weight and the factor, integers unchanged; zeros for weight zero."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x if weight is None else jnp.where(weight == 0, 0, x)
    return addition.weigh(x * addition.hold_factor(factor, x.dtype), weight)


@dataclasses.dataclass(frozen=True)
class Permute(Move):
    """Each neighbour's payload in a graph, one permutation of all workers after another.

    Args:
        graph: the graph, one of `jaxcomp.graphs`.
    """

    graph: Graph = Ring()
    same_on_all = False
    gives = "neighbours"

    def init(self) -> Array:
        """The number of the next round's matrix."""
        return jnp.zeros((), jnp.uint32)

    def run(
        self, stage: Any, key: Array, sent: Any, weight: Array | None, state: PyTree
    ) -> tuple[Heard, PyTree]:
        if weight is not None:
            raise ValueError(
                "`gate` must be None with jaxcomp.Gossip; leave out silent workers with "
                "jaxcomp.graphs.Without(graph, silent)"
            )
        if stage.leg.link.feedback.facts.mirrors and len(self.graph.matrices(stage.workers)) > 1:
            raise ValueError(
                "`graph` must not change from round to round with jaxcomp.Shift, whose mirror is a "
                f"sum with fixed weights, got {self.graph!r} with {stage.leg.link.feedback!r}; use "
                "jaxcomp.Residual(), jaxcomp.NoFeedback() or a graph such as "
                "jaxcomp.graphs.Exponential()"
            )
        graph, worker = mixing.rounds(self.graph, stage.workers), lax.axis_index(stage.axis)
        number = noise.fold(key, _DRAW)[0] if self.graph.drawn else state
        turn = (number % jnp.uint32(len(graph.sources))).astype(jnp.int32)
        words = _of_neighbours(buffer.fuse(sent.payloads), graph, turn, stage.axis)
        payloads = [buffer.split(words[n], sent.payloads) for n in range(graph.sources.shape[1])]
        # A copy: JAX may keep an array that it has narrowed where float64 was off.
        times = jnp.asarray(graph.weights.copy(), jnp.result_type(float))[turn, :, worker]
        weights = jnp.asarray(graph.sources)[turn, :, worker], times
        after = (state + 1) % jnp.uint32(len(graph.sources))
        return Heard(payloads, weights, 1.0), after

    def link_bytes(self, stage: Any) -> Fraction:
        """A payload for each neighbour, on average over rounds and workers."""
        payload = buffer.fused_bytes(wire_cost.payload_like(stage.batches))
        return mixing.rounds(self.graph, stage.workers).degree * payload

    def messages(self, stage: Any) -> float:
        """Those of the busiest worker, as long as which a round lasts."""
        return float(mixing.rounds(self.graph, stage.workers).busiest)


def _of_neighbours(words: Array, graph: mixing.Rounds, turn: Array, axis_name: AxisName) -> Array:
    """`[messages, words]`: the buffers that this worker receives from this round's neighbours."""
    most, words = graph.sources.shape[1], axes.vary(words, axis_name)

    def branch(sources: np.ndarray, messages: int) -> Array:
        found = collectives.permute(words, sources[:messages].tolist(), axis_name)
        # Of weight zero, in the places of further neighbours.
        return jnp.concatenate([found] + [words[None]] * (most - messages))

    rounds = list(zip(graph.sources, graph.messages, strict=True))
    if len(rounds) == 1:
        return branch(*rounds[0])
    return lax.switch(turn, [functools.partial(branch, *one) for one in rounds])

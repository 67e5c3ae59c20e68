"""Gather: every worker sends its payload to every other, and each decodes them all."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import axes, compiler, noise, offers, summing, trees, wire
from jaxcomp.feedback import Link
from jaxcomp.policy import Policy
from jaxcomp.protocols import Array, AxisName, Batches, Codec, Collected, Key, PyTree, Stacks
from jaxcomp.reducers import dense as dense_
from jaxcomp.workers import PerWorker


@dataclasses.dataclass(frozen=True)
class Gather:
    """The mean of all decoded payloads, by one all-gather for the whole model.

    One device sends `(n − 1)` payloads, so this pays for few workers or small payloads: b-bit
    codes beat a float32 all-reduce only if `b < 64 / n`.

    Args:
        link: the link from each worker; a bare codec or policy is `Link(codec)`.

    Raises:
        ValueError: if `link` is none of these.
    """

    link: "Link | Codec | Policy"

    def __post_init__(self):
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))

    @property
    def uplink(self) -> Link:
        return cast(Link, self.link)

    def init(self, batches: Batches, axis_name: AxisName) -> PerWorker:
        states = tuple(batch.codec.init(batch.like) for batch in batches)
        return PerWorker.wrap(states, "codec", axis_name)

    def part_like(self, batches: Batches, axis_name: AxisName) -> tuple:
        return tuple(batch.like for batch in batches)

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: PerWorker,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        worker, workers = lax.axis_index(axis_name), axes.size(axis_name)
        payloads, states, sides = [], [], []
        for number, (batch, x, memory) in enumerate(
            zip(batches, message, state.own(), strict=True)
        ):
            count = trees.counts(batch)
            own = trees.batch_key(key, number, worker)
            agreed = offers.agree(batch.codec, own, x, count, memory, axis_name)
            payload, memory = batch.codec.encode(own, x, count, agreed)
            payloads.append(payload)
            states.append(memory)
            sides.append(offers.side(batch.codec, agreed))

        everything = (tuple(payloads), () if weight is None else (weight,))
        gathered, weights = wire.split(axes.gather(wire.fuse(everything), axis_name), everything)
        total = weights[0] if weights else None
        return Collected(
            part=tuple(
                _mean(batch, number, key, part, side, total, workers)
                for number, (batch, part, side) in enumerate(
                    zip(batches, gathered, sides, strict=True)
                )
            ),
            sent=tuple(
                _decode(batch, trees.batch_key(key, number, worker), part, side)
                for number, (batch, part, side) in enumerate(
                    zip(batches, payloads, sides, strict=True)
                )
            ),
            share=1.0 if total is None else jnp.sum(total) * (1 / workers),
            state=PerWorker.wrap(tuple(states), "codec", axis_name),
        )

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> tuple[Stacks, PyTree]:
        return part, state

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return dense_.fused_mean(leaves, axis_name, weight)

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """`n − 1` payloads, and an all-reduce of the leaves that the policy leaves dense."""
        plan = trees.layout(self.uplink.policy, like)
        payload = wire.fused_bytes(wire.payload_like(plan))
        dense = [plan.likes[i] for i in plan.dense]
        return (workers - 1) * payload + dense_.fused_link_bytes(dense, workers)


def _decode(batch: trees.Batch, key: Key, payload: Any, side: Any) -> Array:
    def decode(key, payload, side):
        return batch.codec.decode(key, payload, batch.like, side)

    return compiler.outlined(decode)(key, payload, side)


def _mean(
    batch: trees.Batch,
    number: int,
    key: Array,
    payloads: Any,
    side: Any,
    weights: Array | None,
    workers: int,
) -> Array:
    """`Σ wᵢ·decode(payloadᵢ) / n` of one batch."""
    shared = noise.fold(key, number)
    everyone = jnp.arange(workers, dtype=jnp.uint32)
    own = jax.vmap(noise.fold, in_axes=(None, 0))(shared, everyone)
    keys = Key(shared, own, jnp.zeros((), jnp.uint32))

    def mean(keys, payloads, side, weights):
        total = summing.decode_sum(batch.codec, keys, payloads, batch.like, weights, side)
        # Times the reciprocal: compiled, division by a constant is that; eagerly it is not.
        return (total * jnp.asarray(1 / workers, total.dtype)).astype(batch.dtype)

    return compiler.outlined(mean)(keys, payloads, side, weights)

"""Gather: every worker sends its payload to every other, and each decodes them all."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import axes, noise, summing, trees, wire
from jaxcomp.feedback import Link
from jaxcomp.mesh import PerWorker
from jaxcomp.protocols import Array, AxisName, Codec, Collected, Key, PyTree
from jaxcomp.reducers import dense as dense_


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

    link: Link

    def __post_init__(self):
        if not isinstance(self.link, Link):
            object.__setattr__(self, "link", Link(self.link))

    @property
    def uplink(self) -> Link:
        return self.link

    def init(self, like: PyTree, axis_name: AxisName) -> PerWorker:
        plan = self._plan(like)
        states = tuple(batch.codec.init(batch.like) for batch in plan.batches)
        return PerWorker.wrap(states, "codec", axis_name)

    def part_like(self, like: PyTree, axis_name: AxisName) -> PyTree:
        return like

    def collect(
        self,
        key: Array,
        message: PyTree,
        state: PerWorker,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        plan, leaves = self._plan(message), jax.tree.leaves(message)
        worker, workers = lax.axis_index(axis_name), axes.size(axis_name)
        payloads, states = [], []
        for number, (batch, memory) in enumerate(zip(plan.batches, state.own(), strict=True)):
            x, count = trees.stack(batch, leaves), trees.counts(batch)
            agreed = agree(batch.codec, x, count, memory, axis_name)
            payload, memory = batch.codec.encode(
                trees.batch_key(key, number, worker), x, count, agreed
            )
            payloads.append(payload)
            states.append(memory)

        everything = (tuple(payloads), () if weight is None else (weight,))
        gathered, weights = wire.split(axes.gather(wire.fuse(everything), axis_name), everything)
        total = weights[0] if weights else None
        sums = [
            self._mean(batch, number, key, part, total, workers)
            for number, (batch, part) in enumerate(zip(plan.batches, gathered, strict=True))
        ]
        own = [
            batch.codec.decode(trees.batch_key(key, number, worker), part, batch.like)
            for number, (batch, part) in enumerate(zip(plan.batches, payloads, strict=True))
        ]
        small = [leaves[i] for i in plan.dense]
        means = dense_mean(small, axis_name, weight)
        return Collected(
            part=trees.assemble(plan, sums, means),
            sent=trees.assemble(plan, own, small),
            share=1.0 if total is None else jnp.sum(total) * (1 / workers),
            state=PerWorker.wrap(tuple(states), "codec", axis_name),
        )

    def spread(
        self, key: Array, part: PyTree, like: PyTree, state: PyTree, axis_name: AxisName
    ) -> tuple[PyTree, PyTree]:
        return part, state

    def link_bytes(self, like: PyTree, workers: int) -> int:
        """`n − 1` payloads, and an all-reduce of the leaves that the policy leaves dense."""
        plan = self._plan(like)
        payload = wire.fused_bytes(wire.payload_like(plan))
        sizes: dict[Any, int] = {}
        for i in plan.dense:
            leaf = plan.likes[i]
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.size * leaf.dtype.itemsize
        return (workers - 1) * payload + sum(
            wire.ring_bytes(size, workers) for size in sizes.values()
        )

    def _plan(self, like: PyTree) -> trees.Layout:
        return trees.layout(self.link.policy, like)

    def _mean(
        self,
        batch: trees.Batch,
        number: int,
        key: Array,
        payloads: Any,
        weights: Array | None,
        workers: int,
    ) -> Array:
        shared = noise.fold(key, number)
        everyone = jnp.arange(workers, dtype=jnp.uint32)
        own = jax.vmap(noise.fold, in_axes=(None, 0))(shared, everyone)
        keys = Key(shared, own, jnp.zeros((), jnp.uint32))
        total = summing.decode_sum(batch.codec, keys, payloads, batch.like, weights)
        # Times the reciprocal: division by a constant is compiled to that anyway, but not eagerly.
        return (total * jnp.asarray(1 / workers, total.dtype)).astype(batch.dtype)


def agree(codec: Codec, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
    """What the workers must agree on before they encode: the state itself for most codecs."""
    hook = getattr(codec, "agree", None)
    return state if hook is None else hook(x, count, state, axis_name)


def dense_mean(
    leaves: Sequence[Array], axis_name: AxisName, weight: Array | None
) -> Sequence[Array]:
    """The mean of small leaves by one all-reduce for each dtype."""
    groups: dict[Any, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(number)
    means: list[Any] = [None] * len(leaves)
    for numbers in groups.values():
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in numbers])
        mean, _ = dense_.weighted_mean(flat, axis_name, weight) if flat.size else (flat, None)
        start = 0
        for i in numbers:
            means[i] = mean[start : start + leaves[i].size].reshape(leaves[i].shape)
            start += leaves[i].size
    return means

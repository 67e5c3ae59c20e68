"""A tree as messages to all workers, to each worker or to one, and what arrives of them.

Leaves that the policy leaves dense travel by JAX's own collectives.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.exchange import collectives, receive, send
from jaxcomp.layout import grouping, trees
from jaxcomp.layout.batches import Batch
from jaxcomp.layout.policy import Policy
from jaxcomp.numerics.segments import Segments
from jaxcomp.types import Array, AxisName, PyTree, Stacks
from jaxcomp.wire import buffer, cost as wire_cost


@dataclasses.dataclass(frozen=True)
class Wire:
    """How one collective encodes a tree.

    Attributes:
        axis_name: the axes of the workers.
        policy: the codec of each leaf, chosen by the shape of one message before rows are padded.
        per_row: whether no bucket has elements of two rows of the last axis.
    """

    axis_name: AxisName
    policy: Policy
    per_row: bool

    @property
    def workers(self) -> int:
        return axes.size(self.axis_name)

    def for_leaves(self, like: PyTree) -> "Wire":
        """The same wire, whose codecs hold however these leaves are padded or reshaped."""
        flat = jax.tree_util.tree_leaves_with_path(like)
        shapes = {trees.path_name(path): x.shape for path, x in flat}
        return dataclasses.replace(self, policy=self.policy.for_leaves(shapes))

    def layout(self, like: PyTree) -> tuple[trees.Layout, PyTree]:
        """The batches of one message, and how many zeros to append to the rows of each leaf.

        All buckets of a leaf are equal then.
        """
        own = self.for_leaves(like).policy
        plan = trees.layout(own, like, per_row=self.per_row)

        def missing(shape: tuple[int, ...], codec: Codec | None) -> int:
            if codec is None or not self.per_row or not shape or 0 in shape:
                return 0
            return -shape[-1] % grouping.row_bucket(codec, shape[-1])

        found = [missing(x.shape, c) for x, c in zip(plan.likes, plan.codecs, strict=True)]
        padding = jax.tree.unflatten(plan.treedef, found)
        with_rows = jax.eval_shape(lambda tree: jax.tree.map(_append, tree, padding), like)
        return trees.layout(own, with_rows, per_row=self.per_row), padding


@dataclasses.dataclass(frozen=True)
class Copies:
    """The batch of messages to several workers, one message after another.

    Attributes:
        message: the batch of one message.
        times: the number of messages.
    """

    message: Batch
    times: int

    @property
    def codec(self) -> Codec:
        return self.message.codec

    @property
    def size(self) -> int:
        return self.message.size

    @property
    def buckets(self) -> int:
        return self.times * self.message.buckets

    @property
    def segments(self) -> Segments | None:
        return self.message.segments

    @property
    def full(self) -> bool:
        return self.message.full

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.buckets, self.size), self.message.dtype)

    def counts(self) -> Array:
        """The number of real elements: `int32[buckets]`, or `int32[buckets, segments]`."""
        one = self.message.counts()
        return jnp.tile(one, (self.times,) + (1,) * (one.ndim - 1))


def to_all(wire: Wire, key: Array, tree: PyTree) -> PyTree:
    """Every worker's tree as all workers decode it, with a leading axis of workers."""
    layout, with_rows, restore = _padded(wire, tree, 0)
    stacks, dense = trees.stacks(layout, with_rows)
    payloads, sides = _encoded(wire, key, layout.batches, stacks)
    everyones = collectives.all_gather(payloads, wire.axis_name)
    found = receive.each(key, layout.batches, everyones, sides, wire.workers)
    dense = tuple(axes.everyones(x, wire.axis_name) for x in dense)
    return restore(_assembled(layout, found, dense, wire.workers))


def to_each(wire: Wire, key: Array, trees_: PyTree) -> PyTree:
    """The trees that this worker receives, in the order of their senders.

    Args:
        wire: the codecs.
        key: the key of the messages.
        trees_: leaves `[workers, …]`, of which row `j` goes to worker `j`.
    """
    layout, arrived, sides, dense, restore, first = _exchanged(wire, key, trees_)
    found = receive.each(key, layout.batches, arrived, sides, wire.workers, first)
    dense = tuple(lax.all_to_all(x, wire.axis_name, 0, 0) for x in dense)
    return restore(_assembled(layout, found, dense, wire.workers))


def sum_of_each(wire: Wire, key: Array, trees_: PyTree) -> PyTree:
    """The sum of the trees that this worker receives, in the order of their senders."""
    layout, arrived, sides, dense, restore, first = _exchanged(wire, key, trees_)
    workers = wire.workers
    found = receive.mean(key, layout.batches, arrived, sides, None, workers, first, over="one")
    dense = tuple(lax.psum_scatter(x, wire.axis_name, scatter_dimension=0) for x in dense)
    return restore(trees.assemble(layout, found, dense))


def sum_of_all(wire: Wire, key: Array, tree: PyTree) -> PyTree:
    """The sum of all workers' trees, each sent whole to all workers."""
    layout, with_rows, restore = _padded(wire, tree, 0)
    stacks, dense = trees.stacks(layout, with_rows)
    payloads, sides = _encoded(wire, key, layout.batches, stacks)
    everyones = collectives.all_gather(payloads, wire.axis_name)
    found = receive.mean(key, layout.batches, everyones, sides, None, wire.workers, over="one")
    return restore(trees.assemble(layout, found, lax.psum(dense, wire.axis_name)))


def to_one(wire: Wire, key: Array, tree: PyTree, perm: Sequence[tuple[int, int]]) -> PyTree:
    """The tree of the worker that sends to this one, and zeros where none does.

    Args:
        wire: the codecs.
        key: the key of the messages.
        tree: this worker's tree.
        perm: pairs of a sender and its receiver.
    """
    layout, with_rows, restore = _padded(wire, tree, 0)
    stacks, dense = trees.stacks(layout, with_rows)
    payloads, sides = _encoded(wire, key, layout.batches, stacks)
    send_on = functools.partial(axes.permute_some, pairs=perm, axis_name=wire.axis_name)
    arrived = buffer.split(send_on(buffer.fuse(payloads)), payloads)
    sources = np.full(wire.workers, -1)
    for source, receiver in perm:
        sources[receiver] = source
    source = jnp.asarray(sources)[lax.axis_index(wire.axis_name)]
    found = send.decode(key, layout.batches, arrived, sides, jnp.maximum(source, 0))
    found = tuple(jnp.where(source < 0, 0, x) for x in found)
    return restore(trees.assemble(layout, found, tuple(map(send_on, dense))))


def bytes_of(wire: Wire, like: PyTree) -> tuple[int, int]:
    """The bytes of the compressed leaves of one message, and of its dense leaves."""
    layout, _ = wire.layout(like)
    payload = wire_cost.payload_like(layout.batches)
    return buffer.fused_bytes(payload), trees.dense_bytes(layout)


def _encoded(
    wire: Wire, key: Array, batches: Sequence[Any], stacks: Stacks
) -> tuple[tuple[PyTree, ...], tuple[Any, ...]]:
    memory = send.Memory((), send.init(batches))
    own = send.send(key, batches, stacks, memory, lax.axis_index(wire.axis_name))
    return own.payloads, own.sides


def _exchanged(wire: Wire, key: Array, trees_: PyTree) -> Any:
    """The payloads from all workers to this one, and what their decoders need."""
    layout, with_rows, restore = _padded(wire, trees_, 1)
    n = wire.workers
    stacks, dense = jax.vmap(lambda tree: trees.stacks(layout, tree), axis_size=n)(with_rows)
    every = tuple(Copies(batch, n) for batch in layout.batches)
    flat = tuple(x.reshape(-1, x.shape[-1]) for x in stacks)
    payloads, sides = _encoded(wire, key, every, flat)
    rows = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), payloads)
    arrived = collectives.all_to_all(rows, wire.axis_name)
    worker = lax.axis_index(wire.axis_name)
    first = tuple(worker * batch.buckets for batch in layout.batches)
    return layout, arrived, sides, dense, restore, first


def _assembled(
    layout: trees.Layout, stacks: Stacks, dense: Sequence[Array], workers: int
) -> PyTree:
    assemble = functools.partial(trees.assemble, layout)
    return jax.vmap(assemble, axis_size=workers)(stacks, dense)


def _padded(
    wire: Wire, tree: PyTree, leading: int
) -> tuple[trees.Layout, PyTree, Callable[[PyTree], PyTree]]:
    """The batches of one message, the tree with rows of equal buckets, and how to cut them again.

    The first `leading` axes of each leaf number the messages.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[leading:], x.dtype), tree)
    layout, padding = wire.layout(like)

    def cut(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x, by: x[..., : x.shape[-1] - by] if by else x, tree, padding)

    return layout, jax.tree.map(_append, tree, padding), cut


def _append(x: Array, by: int) -> Array:
    """An array whose rows have that many zeros more."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, by)]) if by else x

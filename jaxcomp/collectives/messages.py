"""A tree as messages to all workers, to each worker or to one, and what arrives of them.

Leaves that the policy leaves dense travel by JAX's own collectives.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Codec, Combine, Leg, Move
from jaxcomp.exchange import legs, send
from jaxcomp.exchange.combines import Average, Each
from jaxcomp.exchange.moves import AllGather, AllToAll
from jaxcomp.exchange.plan import Shapes, by_shapes
from jaxcomp.exchange.stages import stages_of
from jaxcomp.layout import grouping, trees
from jaxcomp.layout.batches import Rows
from jaxcomp.layout.policy import Policy
from jaxcomp.types import Array, AxisName, PyTree
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
        return by_shapes(_layout_of, self, like)


@functools.lru_cache(maxsize=1024)
def _layout_of(wire: Wire, shapes: Shapes) -> tuple[trees.Layout, PyTree]:
    like = shapes.tree
    own = wire.for_leaves(like).policy
    layout = trees.layout(own, like, per_row=wire.per_row)

    def missing(shape: tuple[int, ...], codec: Codec | None) -> int:
        if codec is None or not wire.per_row or not shape or 0 in shape:
            return 0
        return -shape[-1] % grouping.row_bucket(codec, shape[-1])

    found = [missing(x.shape, c) for x, c in zip(layout.likes, layout.codecs, strict=True)]
    padding = jax.tree.unflatten(layout.treedef, found)
    if any(found):
        with_rows = jax.eval_shape(lambda tree: jax.tree.map(_append, tree, padding), like)
        layout = trees.layout(own, with_rows, per_row=wire.per_row)
    return layout, padding


def to_all(wire: Wire, key: Array, tree: PyTree) -> PyTree:
    """Every worker's tree as all workers decode it, with a leading axis of workers."""
    return _sent(wire, key, tree, AllGather(), Each(), axes.everyones)


def to_each(wire: Wire, key: Array, trees_: PyTree) -> PyTree:
    """The trees that this worker receives, in the order of their senders.

    Args:
        wire: the codecs.
        key: the key of the messages.
        trees_: leaves `[workers, …]`, of which row `j` goes to worker `j`.
    """

    def exchange(x: Array, axis_name: AxisName) -> Array:
        return lax.all_to_all(x, axis_name, 0, 0)

    return _sent(wire, key, trees_, AllToAll(), Each(), exchange, leading=1)


def sum_of_each(wire: Wire, key: Array, trees_: PyTree) -> PyTree:
    """The sum of the trees that this worker receives, in the order of their senders."""
    scatter = functools.partial(lax.psum_scatter, scatter_dimension=0)
    return _sent(wire, key, trees_, AllToAll(), Average("one"), scatter, leading=1)


def sum_of_all(wire: Wire, key: Array, tree: PyTree) -> PyTree:
    """The sum of all workers' trees, each sent whole to all workers."""
    return _sent(wire, key, tree, AllGather(), Average("one"), lax.psum)


def _sent(
    wire: Wire,
    key: Array,
    tree: PyTree,
    move: Move,
    combine: Combine,
    dense_move: Callable[[Array, AxisName], Array],
    leading: int = 0,
) -> PyTree:
    """Runs one leg, without memory, on a tree whose first `leading` axes number the messages."""
    layout, with_rows, restore = _padded(wire, tree, leading)
    n, batches = wire.workers, layout.batches
    stacks_of = functools.partial(trees.stacks, layout)
    stacks, dense = jax.vmap(stacks_of, axis_size=n)(with_rows) if leading else stacks_of(with_rows)
    if leading:
        stacks = tuple(x.reshape(-1, x.shape[-1]) for x in stacks)
        batches = tuple(Rows(batch, batch.codec, times=n) for batch in batches)
    (stage,) = stages_of((Leg(move, None, combine),), batches, wire.axis_name, n)
    found = legs.run_once(stage, key, stacks)
    dense = tuple(dense_move(x, wire.axis_name) for x in dense)
    assemble = functools.partial(trees.assemble, layout)
    if isinstance(combine, Each):
        assemble = jax.vmap(assemble, axis_size=n)
    return restore(assemble(found, dense))


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
    memory, worker = send.Memory((), send.init(layout.batches)), lax.axis_index(wire.axis_name)
    payloads, sides, *_ = send.send(key, layout.batches, stacks, memory, worker)
    send_on = functools.partial(axes.permute_some, pairs=perm, axis_name=wire.axis_name)
    arrived = buffer.split(send_on(buffer.fuse(payloads)), payloads)
    sources = np.full(wire.workers, -1)
    for source, receiver in perm:
        sources[receiver] = source
    source = jnp.asarray(sources)[worker]
    found = send.decode(key, layout.batches, arrived, sides, jnp.maximum(source, 0))
    found = tuple(jnp.where(source < 0, 0, x) for x in found)
    return restore(trees.assemble(layout, found, tuple(map(send_on, dense))))


def bytes_of(wire: Wire, like: PyTree) -> tuple[int, int]:
    """The bytes of the compressed leaves of one message, and of its dense leaves."""
    layout, _ = wire.layout(like)
    payload = wire_cost.payload_like(layout.batches)
    return buffer.fused_bytes(payload), trees.dense_bytes(layout)


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

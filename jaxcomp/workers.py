"""What differs between workers: the memory in an optimizer state, and how to tell it apart."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomp import axes, axis_types
from jaxcomp.protocols import AxisName, Mirrored, PyTree
from jaxcomp.quantize import blocks

_MARK = "per_worker"
"""In a leaf's path, says that it differs between workers, even where a library (flax's nnx) has
turned the `PerWorker` node itself into a plain mapping."""

_SHARD = "per_shard:"
"""The same for what differs between shards of the model, with the names of their axes after it."""

_SHARE = "per_worker_share"
"""The same, for rows that are shared out: each worker has some of them, and none has all."""


@jax.tree_util.register_pytree_with_keys_class
class PerWorker:
    """A tree that differs between workers.

    Its arrays carry a leading axis: of length 1 inside the mapped function, of length `workers`
    outside. Everything in an optimizer state that is not inside a `PerWorker` is replicated.

    Args:
        tree: arrays with that leading axis.
        kind: what they are ("residual", "momentum", "shift", "codec", "local", or "share" for rows
            of which each worker has its share); `resize_workers` reads it.
    """

    def __init__(self, tree: PyTree, kind: str):
        self.tree = tree
        self.kind = kind
        _tell_flax()

    @classmethod
    def wrap(cls, tree: PyTree, kind: str, axis_name: AxisName | None = None) -> "PerWorker":
        """One worker's tree, without the leading axis, as a `PerWorker`."""
        tree = jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
        if axis_name is not None and axes.bound(axis_name):
            tree = axes.vary(tree, axis_name)
        return cls(tree, kind)

    def own(self) -> PyTree:
        """This worker's tree, without the leading axis.

        Raises:
            ValueError: if the leading axis is not of length 1.
        """
        for leaf in jax.tree.leaves(self.tree):
            if leaf.ndim == 0 or leaf.shape[0] != 1:
                raise ValueError(
                    "`state` holds the memory of several workers where one worker's was expected "
                    f"(a leaf of shape {leaf.shape}). Inside the mapped function the leading axis "
                    "is 1: pass the state with in_specs=jaxcomp.state_specs(state, axis_name), or "
                    "let jaxcomp.data_parallel do it."
                )
        return jax.tree.map(lambda x: x[0], self.tree)

    def tree_flatten_with_keys(self):
        mark = _SHARE if self.kind == "share" else _MARK
        return ((jax.tree_util.GetAttrKey(mark), self.tree),), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(children[0], kind)

    def __repr__(self) -> str:
        return f"PerWorker({self.tree!r}, kind={self.kind!r})"


@jax.tree_util.register_pytree_with_keys_class
class PerShard:
    """A tree that differs between the shards of a model.

    Its arrays carry an axis of length `shards`: after that of the workers in a `PerWorker`, and
    before all others elsewhere.

    Args:
        tree: arrays with that axis.
        axes: the names of the mesh axes that the model is sharded over.
    """

    def __init__(self, tree: PyTree, axes: tuple[str, ...]):
        self.tree = tree
        self.axes = axes
        _tell_flax()

    def tree_flatten_with_keys(self):
        mark = _SHARD + ",".join(self.axes)
        return ((jax.tree_util.GetAttrKey(mark), self.tree),), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        return cls(children[0], axes)

    def __repr__(self) -> str:
        return f"PerShard({self.tree!r}, axes={self.axes!r})"


def _tell_flax() -> None:
    """Lets flax's msgpack checkpoints hold these nodes, if flax is in use at all."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or PerWorker in serialization._STATE_DICT_REGISTRY:
        return
    serialization.register_serialization_state(
        PerShard,
        lambda node: {_SHARD: serialization.to_state_dict(node.tree)},
        lambda node, state: PerShard(
            serialization.from_state_dict(node.tree, state[_SHARD]), node.axes
        ),
    )
    serialization.register_serialization_state(
        PerWorker,
        lambda node: {_MARK: serialization.to_state_dict(node.tree)},
        lambda node, state: PerWorker(
            serialization.from_state_dict(node.tree, state[_MARK]), node.kind
        ),
    )


def is_per_worker(node: Any) -> bool:
    """Whether a node of a tree is a `PerWorker`."""
    return isinstance(node, PerWorker)


def marked(path: tuple) -> bool:
    """Whether the leaf at this path differs between workers."""
    return _has(path, _MARK) or _has(path, _SHARE)


def shared_out(path: tuple) -> bool:
    """Whether the leaf at this path is a worker's share of rows."""
    return _has(path, _SHARE)


def _has(path: tuple, mark: str) -> bool:
    return any(mark in _names(key) for key in path)


def _names(key: Any) -> tuple:
    return getattr(key, "name", None), getattr(key, "key", None)


def shard_axes(path: tuple) -> tuple[str, ...] | None:
    """The axes over which the leaf at this path differs between shards; None if it does not."""
    for name in (name for key in path for name in _names(key)):
        if isinstance(name, str) and name.startswith(_SHARD):
            return tuple(filter(None, name.removeprefix(_SHARD).split(",")))
    return None


def spec(path: tuple, axis_name: AxisName) -> PartitionSpec:
    """How the memory at this path lies on the whole mesh: over workers, shards, both or neither."""
    shards = shard_axes(path)
    over = [axis_name] if marked(path) else []
    return PartitionSpec(*over, *([shards or None] if shards is not None else []))


def hold(memory: PyTree, kind: str, axis_name: AxisName, *, splits: bool = False) -> PyTree:
    """A feedback's memory as it lies in a state: what a sender remembers differs between workers.

    Its mirror, if it has one, is the same on all of them, unless each has a share of it (`splits`).
    """
    if not isinstance(memory, Mirrored):
        return PerWorker.wrap(memory, kind, axis_name)
    mirror = PerWorker.wrap(memory.mirror, "share", axis_name) if splits else memory.mirror
    return Mirrored(PerWorker.wrap(memory.own, kind, axis_name), mirror)


def held(state: PyTree) -> PyTree:
    """The memory that `hold` wrapped, of this worker."""
    return jax.tree.map(
        lambda node: node.own() if is_per_worker(node) else node, state, is_leaf=is_per_worker
    )


def replicated(state: PyTree) -> PyTree:
    """The part of a state that is the same on every worker; None in place of the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if marked(path) else leaf, state
    )


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """PartitionSpecs for any tree: `PerWorker` split over the axis, everything else replicated.

    `jax.shard_map` takes them as they are. For `nnx.shard_map`, wrap those of an optimizer:
    `nnx.StateSharding(jaxcomp.state_specs(nnx.state(optimizer), axis_name))`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: PartitionSpec(axis_name) if marked(path) else PartitionSpec(), state
    )


@axis_types.automatically
def resize_workers(tx: Any, state: PyTree, params: PyTree, workers: int) -> PyTree:
    """Moves a state to another number of workers.

    Replicated state stays, such as the mirror of all shifts. Of the memory of `n` workers, each of
    the new ones gets the mean, so that the mean residual, the mean momentum and velocity (both are
    sums of gradients), and the mean shift that the mirror must equal, stay what they were;
    counters, which are equal on all workers, are kept. Rows of which each worker has a share (the
    memory of a downlink) are shared out again.

    Args:
        tx: the transformation that the state belongs to.
        state: its state, outside of the mapped function (leading axis `n`).
        params: the parameters.
        workers: the new number of workers.

    Raises:
        ValueError: if `workers` is not positive or `state` is not a state of `tx`.

    Returns:
        The state with leading axis `workers`, on the mesh where it was; place it on the new one
        with `jaxcomp.place`, or with `jax.device_put` and `state_specs`. That of a sharded model
        keeps its shards.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"`workers` must be a positive integer, got {workers!r}")
    expected = jax.eval_shape(tx.init, params)
    same = jax.tree.structure(state) == jax.tree.structure(expected)
    if not same or _shapes(state) != _shapes(expected):
        raise ValueError(
            "`state` must be a state of `tx` for these `params`, with memory that does not depend "
            "on the number of workers but for its shares, got shapes "
            f"{[x for x in _shapes(state) if x not in _shapes(expected)]} that `tx` does not have. "
            "What jaxcomp.Hierarchical remembers, and jaxcomp.TwoShot of leaves that a codec takes "
            "whole, is cut by the number of workers: begin a new state with jaxcomp.init_state"
        )

    def move(path, x, like):
        if not marked(path):
            return x
        sharded = shard_axes(path) is not None
        if shared_out(path):
            rows = jax.tree.leaves(like)[0].shape[2 if sharded else 1]
            change = functools.partial(_shared_out, total=rows, workers=workers)
        else:
            change = functools.partial(_averaged, workers=workers)
        return jax.vmap(change, in_axes=1, out_axes=1)(x) if sharded else change(x)

    return jax.tree_util.tree_map_with_path(
        move, state, expected, is_leaf=lambda node: isinstance(node, blocks.Blocks8)
    )


def _averaged(x: Any, workers: int) -> Any:
    """`[n, …]`: their mean, or what is equal on all of them, for each of so many workers."""
    if isinstance(x, blocks.Blocks8):
        kept = blocks.pack(jnp.mean(jax.vmap(blocks.unpack)(x), axis=0))
    elif jnp.issubdtype(x.dtype, jnp.floating):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kept = jnp.mean(x, axis=0, dtype=wide).astype(x.dtype)
    else:
        kept = x[0]
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape)), kept)


def _shared_out(x: Any, total: int, workers: int) -> Any:
    """`[n, rows, …]`, of which `total` rows are real, as equal shares of so many workers."""
    if isinstance(x, blocks.Blocks8):
        whole = jax.vmap(blocks.unpack)(x)
        return jax.vmap(blocks.pack)(_shared_out(whole, total, workers))
    if x.ndim < 2 or x.shape[1] == 0:  # No rows: an empty memory stays one.
        return jnp.broadcast_to(x[:1], (workers, *x.shape[1:]))
    rows = x.reshape(-1, *x.shape[2:])[:total]
    each = -(-total // workers)
    missing = each * workers - rows.shape[0]
    rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
    return rows.reshape(workers, each, *x.shape[2:])


def _shapes(state: PyTree) -> list[tuple]:
    """What must agree between states of different worker counts."""

    def shape(path, leaf):
        if not marked(path):
            return leaf.shape
        kept, rows = leaf.shape[1:], 0 if shard_axes(path) is None else 1
        return kept[:rows] + kept[rows + 1 :] if shared_out(path) else kept

    return [
        (shape(path, leaf), jnp.dtype(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]

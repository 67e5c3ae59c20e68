"""Converts an optimizer state to another number of workers."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Mirrored
from jaxcomp.mesh import axis_types, kinds, on_graph, per_worker, pmapped
from jaxcomp.quantize import blocks
from jaxcomp.types import Array, PyTree

_WHOLE = (
    "What jaxcomp.TwoShot remembers of leaves that a codec takes whole is cut by the number of "
    "workers: give the codec a bucket_size, or begin a new state with jaxcomp.init_state"
)

_OTHER = (
    "If `tx` has another codec than the state, keep all but the memory with jaxcomp.graft(tx, "
    "state, params, mesh, axis_name), for any number of workers."
)

# Compiled as a whole: run one by one, their operations take seconds for each shape.
_pack, _unpack = jax.jit(jax.vmap(blocks.pack)), jax.jit(jax.vmap(blocks.unpack))


def resize_workers(tx: Any, state: PyTree, params: PyTree, workers: int) -> PyTree:
    """Converts a state to another number of workers, without losing unsent residuals.

    The memory of `n` workers becomes that of `workers` workers by these rules:

    * Residuals, velocities, momenta, shifts, offsets and accumulators: each new worker gets the
      mean. So the mean residual does not change, and the mean shift stays equal to its mirror.
    * Rows that are split over the workers (the memory of a downlink): split again.
    * The residual of a downlink, if the new workers have no downlink (by default, one or two
      workers use `Gather`): added to the residual of every worker, so that the sum of the
      downlink's residual and the uplink's mean residual does not change.
    * The state of a codec, and all arrays that are not floating: worker `j` gets the unchanged
      state of the old worker `j * n // workers`. A codec's state for each bucket of a slice moves
      with its bucket.
    * What all workers know of each, such as its credibility: as the state of a codec.
    * Replicated state is unchanged. Mirrors of a downlink are padded to equal slices again.
    * Mirrors over a graph of gossip: if `tx` has another graph, and as many workers as the state,
      each mirror is summed anew with the new weights, and all else stays as it is.

    Means are rounded to the dtype of the memory. If the number of workers and the graph are the
    same, the state is returned unchanged.

    Args:
        tx: the transformation of the state.
        state: its state, outside of the mapped function (leading axis `n`).
        params: the parameters.
        workers: the new number of workers.

    Raises:
        ValueError: if `workers` is not positive, `state` is not a state of `tx`, or it holds memory
            that cannot be converted: rows of jaxcomp.Hierarchical, which depend on the sizes of all
            axes; rows of leaves with a codec without buckets (`bucket_size=None`) in
            jaxcomp.TwoShot; or the residual of a downlink that the new workers do not have, if the
            uplink has no residual.

    Returns:
        The state with leading axis `workers`, in the shapes that jaxcomp.init_state would give it;
        place it with `jax.device_put` and `state_specs`, or with `jaxcomp.place`. The state of a
        sharded model keeps its shards.
    """
    checks.transformation("tx", tx)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"`workers` must be a positive integer, got {workers!r}")
    counts = _counts(state)
    if held := on_graph.nodes(state):
        one = like(tx, params, workers)
        if len(held) == len(on_graph.nodes(one)):  # Otherwise it is no state of `tx`.
            state = on_graph.move_memory(state, one, counts, workers)
        if counts == {(workers,)}:
            _check(state, one, workers)
    if counts == {(workers,)}:
        return state
    if len(counts) > 1:
        raise ValueError(
            "`state` must hold the memory of one number of workers, got leading axes "
            f"{sorted(counts)}"
        )
    return _resize(tx, state, params, workers, *next(iter(counts), ()))


@axis_types.automatically
def _resize(tx: Any, state: PyTree, params: PyTree, workers: int, before: int = 1) -> PyTree:
    """`resize_workers` of a state with memory of `before` workers."""
    over = jax.tree_util.tree_map_with_path
    for node in filter(kinds.REDUCTIONS.has, jax.tree.leaves(state, is_leaf=kinds.REDUCTIONS.has)):
        node.check_resizable(workers)
    _check(state, like(tx, params, before), before)
    wanted = like(tx, params, workers)
    if jax.tree.structure(wanted) != jax.tree.structure(state):
        begun = _initial_state(tx, params, workers)

        def carry(path, node, like):
            if not kinds.REDUCTIONS.has(node):
                return node
            return node.carried(like, workers, sharded=per_worker.shard_axes(path) is not None)

        state = over(carry, state, begun, is_leaf=kinds.REDUCTIONS.has)
    move = functools.partial(_move, workers)
    return over(move, state, wanted, _roles(state), is_leaf=per_worker.is_per_worker)


def like(tx: Any, params: PyTree, workers: int) -> PyTree:
    """Shapes and dtypes of one worker's state among so many workers."""
    with axes.assume_workers(workers), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The first call has warned already.
        return jax.eval_shape(lambda params: tx.init(params), params)


def _initial_state(tx: Any, params: PyTree, workers: int) -> PyTree:
    """The state of so many workers before the first step."""

    def array(x: Any) -> Any:
        shape = isinstance(x, jax.ShapeDtypeStruct)
        return jnp.zeros(x.shape, x.dtype, device=x.sharding) if shape else x

    with axes.assume_workers(workers), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = tx.init(jax.tree.map(array, params))

    def all_of_them(path, x):
        marked = per_worker.marked(path)
        return jnp.broadcast_to(x, (workers, *x.shape[1:])) if marked else x

    return jax.tree_util.tree_map_with_path(all_of_them, one)


def _counts(state: PyTree) -> set[tuple[int, ...]]:
    """The numbers of workers in a state: of memory, and of what all workers know of each."""
    found = set()

    def note(path: tuple, node: Any, role: str) -> None:
        at = 1 if role == "everyones" and per_worker.shard_axes(path) is not None else 0
        if per_worker.is_per_worker(node) or role == "everyones":
            found.update(jnp.shape(x)[at : at + 1] for x in jax.tree.leaves(node))

    over = jax.tree_util.tree_map_with_path
    over(note, state, _roles(state), is_leaf=per_worker.is_per_worker)
    return found


def _roles(state: PyTree) -> PyTree:
    """For each `PerWorker` and each replicated array, the field that tells how it is moved.

    "mirror" for a copy of the senders' mean memory, "everyones" for a row for each worker, the same
    on all of them; otherwise "".
    """

    def field(node: Any) -> str:
        if isinstance(node, Mirrored):
            return "mirror"
        return "everyones" if kinds.EVERYONES.has(node) else ""

    def end(node: Any) -> bool:
        return per_worker.is_per_worker(node) or field(node) != ""

    def roles(tree: PyTree, role: str) -> list[str]:
        found = []
        for node in jax.tree.leaves(tree, is_leaf=end):
            named = field(node)
            for name, child in node._asdict().items() if named else ():
                found += roles(child, name if name == named else role)
            found += [] if named else [role]
        return found

    treedef = jax.tree.structure(state, is_leaf=per_worker.is_per_worker)
    return jax.tree.unflatten(treedef, roles(state, ""))


def _move(workers: int, path: tuple, node: Any, wanted: Any, role: str) -> Any:
    """Converts a `PerWorker`, or one replicated array."""
    sharded = per_worker.shard_axes(path) is not None
    if not per_worker.is_per_worker(node):
        x = node
        if x.shape != wanted.shape and role == "mirror":  # The last rows are padding.
            at = 1 if sharded else 0
            x = jnp.moveaxis(_of_length(jnp.moveaxis(x, at, 0), wanted.shape[at]), 0, at)
        if role == "everyones":
            own = functools.partial(_hand_on, workers=workers)
            x = jax.vmap(own)(x) if sharded else own(x)
        _check_moved(path, x.shape, wanted.shape, workers)
        return x

    def change(x: Any, like: Any) -> Any:
        each = jax.tree.leaves(like)[0].shape[2 if sharded else 1 :][:1]
        if node.kind in ("slice", "codec slice"):
            own = functools.partial(_share_out, each=each[0], workers=workers)
        else:
            own = _hand_on if node.kind == "codec" else _average
            own = functools.partial(own, workers=workers)
        found = jax.vmap(own, in_axes=1, out_axes=1)(x) if sharded else own(x)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
            _check_moved(path, got.shape, (workers, *want.shape[1:]), workers)
        return found

    tree = jax.tree.map(
        change, node.tree, wanted.tree, is_leaf=lambda x: isinstance(x, blocks.Blocks8)
    )
    return per_worker.PerWorker(tree, node.kind, node.order)


def _average(x: Any, workers: int) -> Any:
    """The mean of `[n, …]` for each of `workers` workers; integers are passed on instead."""
    if isinstance(x, blocks.Blocks8):
        kept = _pack(jnp.mean(_unpack(x), axis=0, keepdims=True))
        kept = jax.tree.map(lambda leaf: leaf[0], kept)
    elif jnp.issubdtype(x.dtype, jnp.floating):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        kept = jnp.mean(x, axis=0, dtype=wide).astype(x.dtype)
    else:
        return _hand_on(x, workers)
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (workers, *leaf.shape)), kept)


def _hand_on(x: Array, workers: int) -> Array:
    """Passes the rows of `[n, …]` on: each of `workers` workers gets that of one old worker."""
    return x[np.arange(workers) * x.shape[0] // workers]


def _share_out(x: Any, each: int, workers: int) -> Any:
    """Splits the rows of `[n, rows, …]` again, `each` rows a worker; the last rows are padding."""
    if isinstance(x, blocks.Blocks8):
        return _pack(_share_out(_unpack(x), each, workers))
    rows = _of_length(x.reshape(-1, *x.shape[2:]), workers * each)
    return rows.reshape(workers, each, *x.shape[2:])


def _of_length(rows: Array, number: int) -> Array:
    """The first rows, or all of them padded with zeros."""
    missing = number - rows.shape[0]
    return jnp.pad(rows, [(0, max(missing, 0))] + [(0, 0)] * (rows.ndim - 1))[:number]


def _check(state: PyTree, one: PyTree, workers: int) -> None:
    """Raises a `ValueError` unless the state matches `one`, that of one of so many workers."""
    wrong = "`state` must be a state of `tx` for these `params`"
    if jax.tree.structure(state) != jax.tree.structure(one):
        pmapped.check_rows(state)
        raise ValueError(f"{wrong}, got another tree. {_OTHER} {_WHOLE}")

    def check(path, x, like):
        want = (workers, *like.shape[1:]) if per_worker.marked(path) else like.shape
        if jnp.shape(x) != want or jnp.result_type(x) != like.dtype:
            why = pmapped.reason(jnp.shape(x), like.shape) or _WHOLE
            raise ValueError(
                f"{wrong}, got shape {jnp.shape(x)} and {jnp.result_type(x)} at "
                f"{jax.tree_util.keystr(path)}, where `tx` has {want} and {like.dtype} for "
                f"{workers} workers. {why}"
            )

    jax.tree_util.tree_map_with_path(check, state, one)


def _check_moved(path: tuple, got: tuple, want: tuple, workers: int) -> None:
    if got != want:
        raise ValueError(
            f"`state` must be convertible to {workers} workers: "
            f"{jax.tree_util.keystr(path)} must have shape {want}, got {got}. {_WHOLE}"
        )

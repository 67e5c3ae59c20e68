"""Targets for restoring a checkpoint: the shapes of a state and where they lie, on any devices."""

import itertools
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcomp import checks
from jaxcomp.mesh import (
    data_parallel,
    kinds,
    per_worker,
    place,
    placement,
    resizing,
    specs as specs_,
)
from jaxcomp.types import AxisName, PyTree


def restore_target(
    tx: Any,
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    axis_name: AxisName,
    *,
    workers: "int | PyTree | None" = None,
) -> PyTree:
    """The shapes, dtypes and shardings of a saved state, to restore a checkpoint into.

    The state may have been saved by another number of workers than the mesh has: restore it into
    this target, and move it with `resize_workers`. Nothing is allocated.

    Args:
        tx: the transformation of the state.
        params: the parameters, or their shapes. Those with a `NamedSharding` by axes that `mesh`
            has, too, are sharded so on it, and so are the arrays of the state that belong to them.
        mesh: the mesh to restore on; with an `AbstractMesh`, no devices are needed.
        axis_name: the axis or axes that the workers are on.
        workers: how many workers saved the state; or the checkpoint's metadata, a tree whose leaves
            have a `shape`, which tells it. None for as many as the mesh has.

    Returns:
        A tree of `jax.ShapeDtypeStruct`. The memory of the workers is split over `axis_name` if
        its workers divide the saved ones, and is on every device otherwise.

    Raises:
        ValueError: for a checkpoint's metadata with the memory of another codec; for rows of
            jaxcomp.Hierarchical, which depend on the sizes of all axes, where
            `workers` are not those of a mesh with devices; and as `tx.init`.

    Example:
        >>> import jax.numpy as jnp, jaxcomp, optax
        >>> tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.sign(), "data"), optax.adam(1e-3))
        >>> params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
        >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
        >>> target = restore_target(tx, params, mesh, "data", workers=8)
        >>> target[0].memory.feedback.tree.residual[0].shape
        (8, 8, 512)
    """
    checks.transformation("tx", tx)
    placement.check_axes(mesh, axis_name)
    here = place.workers_of(mesh, axis_name)
    number = here if workers is None else _number(workers, here)
    saved = None if workers is None or isinstance(workers, int) else _memory(workers)
    params = jax.tree.map(lambda leaf: _on(leaf, mesh), params)
    if number == here and isinstance(mesh, Mesh):
        state = jax.eval_shape(lambda p: data_parallel.init_state(tx, p, mesh, axis_name), params)
    else:
        state = _of_all(resizing.like(tx, params, number), number)
    if saved is not None and saved != (wanted := _memory(state)):
        raise ValueError(
            "`tx` must have the codec, feedback and parameters of the checkpoint, whose memory is "
            f"{saved or 'empty'}, got {wanted or 'none'}. For another codec restore without a "
            "target, and keep all but the memory with jaxcomp.graft(tx, state, params, mesh, "
            "axis_name)"
        )
    homes = placement.homes(params, mesh)

    def lie(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        spec = placement.spec(path, leaf, homes, axis_name, mesh)
        if per_worker.marked(path) and number % here:
            spec = PartitionSpec(None, *spec[1:])
        home = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home, weak_type=leaf.weak_type)

    return jax.tree_util.tree_map_with_path(lie, state)


def _memory(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """The shapes of the workers' memory in a state or in a checkpoint's metadata, by their paths.

    A path begins at the memory: the metadata may be those of more than the state.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    found = {}
    for path, leaf in flat:
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        for at, name in enumerate(names):
            if per_worker.stored_as_workers(name):
                found["/".join(names[at:])] = tuple(leaf.shape)
    return found


def _of_all(one: PyTree, workers: int) -> PyTree:
    """The shapes of all workers' state, from those of one worker's among so many."""
    for node in filter(kinds.REDUCTIONS.has, jax.tree.leaves(one, is_leaf=kinds.REDUCTIONS.has)):
        node.check_resizable(workers)

    def whole(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (workers, *leaf.shape[1:]) if per_worker.marked(path) else leaf.shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)

    return jax.tree_util.tree_map_with_path(whole, one)


def _on(leaf: Any, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
    """The shape of a parameter, sharded over this mesh by the names of its axes."""
    sharding, spec = getattr(leaf, "sharding", None), PartitionSpec()
    if isinstance(sharding, NamedSharding):
        spec = specs_.of_axes(mesh.axis_names, sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def _number(workers: Any, here: int) -> int:
    """The number of workers, or that of a checkpoint with these shapes."""
    if isinstance(workers, int):
        checks.integer("workers", workers, 1)
        return workers
    flat, _ = jax.tree_util.tree_flatten_with_path(workers, is_leaf=lambda x: hasattr(x, "shape"))
    for path, leaf in flat:
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        if any(map(per_worker.stored_as_workers, names)):
            return leaf.shape[0]
        if ("held", "everyones") in itertools.pairwise(names):  # A row for each, on all of them.
            return leaf.shape[int(any(map(per_worker.stored_as_memory, names)))]
    return here

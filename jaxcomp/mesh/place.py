"""Trees on a mesh: memory split over workers and shards, everything else replicated."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.mesh import arguments, objects, per_worker, placement, pmapped, processes
from jaxcomp.types import AxisName, PyTree


def place(tree: PyTree, mesh: Mesh, axis_name: AxisName, *, params: PyTree | None = None) -> PyTree:
    """Puts a tree on a mesh: memory split over workers and shards, everything else replicated.

    Memory of one worker, as `tx.init` makes it outside of a mapped function, is copied to each
    worker. Leaves that are not arrays, such as functions in an equinox module, are unchanged. Other
    arrays that are already on the mesh keep their placement. Arrays on the same devices and axes,
    but with other axis types, change only their type: no data is copied, so the old array and the
    new one share their buffers.

    Args:
        tree: any tree, such as a flax `TrainState` or the state of an `nnx.Optimizer`. For shapes
            and dtypes (`jax.ShapeDtypeStruct`), it returns the same with shardings, which is a
            target for restoring a checkpoint.
        mesh: the device mesh.
        axis_name: the axis or axes that the workers are on.
        params: sharded parameters on the mesh. Arrays of the tree that belong to a parameter, such
            as moments of Adam, are sharded like it: their path ends with its path, and they have
            its shape.

    Raises:
        ValueError: if `PerWorker` memory is for another number of workers or one worker's slice of
            it, another array is split over the workers, or the tree holds a state of `jax.pmap`.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> place({"w": jnp.ones(2)}, mesh, "data")["w"].sharding.spec
        P()
    """
    placement.check_axes(mesh, axis_name)
    workers, homes = workers_of(mesh, axis_name), placement.homes(params, mesh)
    if workers > 1:
        pmapped.check(tree, axis_name)
        pmapped.check_rows(tree)

    def put(path, leaf):
        spec = placement.spec(path, leaf, homes, axis_name, mesh)
        shape = isinstance(leaf, jax.ShapeDtypeStruct)
        if per_worker.marked(path):
            if not shape and placement.of_one(leaf, workers):
                return placement.copy_to_all(leaf, mesh, workers, spec)
            check_workers(leaf, workers)
        elif workers > 1:
            arguments.check_whole(leaf, axis_name, lambda: "`tree`", path)
        if shape:
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec), weak_type=leaf.weak_type
            )
        if spec != PartitionSpec():
            return processes.put(leaf, NamedSharding(mesh, spec))
        if isinstance(leaf, core.Tracer) or placement.is_named(leaf, mesh):
            return leaf
        return placement.put(leaf, mesh, spec)

    kept, rest = objects.select(tree, objects.dynamic(tree))
    return objects.combine(jax.tree_util.tree_map_with_path(put, kept), rest)


def workers_of(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> int:
    """The number of workers on the axis."""
    return math.prod(mesh.shape[name] for name in axes.names(axis_name))


def check_workers(leaf: Any, workers: int) -> None:
    """Raises a `ValueError` for memory of another number of workers."""
    if jnp.ndim(leaf) == 0 or leaf.shape[0] != workers:
        had = leaf.shape[0] if jnp.ndim(leaf) else 0
        moved = (
            f"move it with state = jaxcomp.resize_workers(tx, state, params, workers={workers}), "
            "then jaxcomp.place(state, mesh, axis_name, params=params)"
        )
        made = (
            "make it with jaxcomp.init_state(tx, params, mesh, axis_name), give nnx.Optimizer or "
            "TrainState.create jaxcomp.on_mesh(tx, mesh, axis_name), place arrays of tx.init with "
            "jaxcomp.place, and take jaxcomp.restore_target(tx, params, mesh, axis_name) for the "
            "shapes of a checkpoint instead of jax.eval_shape(tx.init, params)"
        )
        raise ValueError(
            f"`state` must hold the memory of the mesh's {workers} workers, got that of "
            f"{had or 'no'} worker{'s' * (had != 1)}: {moved if had > 1 else made}"
        )

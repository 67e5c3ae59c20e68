"""The placement of a training step's arrays on a mesh.

A step is compiled for the mesh with automatic axes, since explicit ones reject arrays that are not
placed on the mesh yet. `to_automatic` and `to_given` change the types of arguments and results
within the compiled program, where that moves no data.
"""

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from jax import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.mesh import axis_types, per_worker, processes, specs as specs_
from jaxcomp.mesh.axis_types import automatic, explicit
from jaxcomp.types import AxisName, PyTree

Homes = dict[tuple, PartitionSpec]
"""By path and shape, how parameters and memory lie on the mesh; memory by its mark and what follows
in its path, too."""


def check_axes(mesh: Any, axis_name: AxisName) -> None:
    """Raises a `ValueError` unless `mesh` is a mesh that has these axes."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            "`mesh` must be a jax.sharding.Mesh, such as jax.make_mesh((jax.device_count(),), "
            f"('data',)), got {mesh!r}"
        )
    missing = [name for name in axes.names(axis_name) if name not in mesh.axis_names]
    if missing or not axes.names(axis_name):
        came = repr(missing[0]) if missing else "none"
        raise ValueError(f"`axis_name` must name axes of the mesh {mesh.axis_names}, got {came}")


def to_automatic(args: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """Retypes the explicit arguments of a compiled function for the automatic `mesh`."""
    plain = NamedSharding(mesh, PartitionSpec())

    def one(leaf):
        return jax.sharding.reshard(leaf, plain) if explicit(_type(leaf).mesh) else leaf

    return jax.tree.map(one, args)


def to_given(results: PyTree, mesh: Mesh, homes: Homes, axis_name: AxisName) -> PyTree:
    """Retypes the results of a compiled function for `mesh`, which has explicit axes.

    Results without a home are replicated over the explicit axes other than the workers'.
    """
    names = explicit(mesh)

    def one(path, leaf):
        of = spec(path, leaf, homes, axis_name, mesh)
        kept = PartitionSpec(*(_only(entry, names) for entry in of))
        return jax.sharding.reshard(leaf, NamedSharding(mesh, kept))

    return jax.tree_util.tree_map_with_path(one, results)


def _only(entry: Any, names: tuple) -> tuple | None:
    entries = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in entries if name in names) or None


def put(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Puts an array on the mesh by `spec`, or retypes it if it is already there.

    From a mesh of these devices in another order it is moved, and stays sharded by the same axes.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(
            f"arguments must be arrays, got the shape {leaf.shape} without values, as of "
            "jax.eval_shape: make a state with jaxcomp.init_state(tx, params, mesh, axis_name), or "
            "restore a checkpoint into jaxcomp.restore_target(tx, params, mesh, axis_name)"
        )
    found = axis_types.mesh_of(leaf)
    if found is not None and isinstance(leaf, jax.Array):
        if automatic(found) == automatic(mesh):
            return axis_types.retype(leaf, mesh)
        if _is_reordered(found, mesh):
            spec = specs_.spec(leaf.sharding)
    return processes.put(leaf, NamedSharding(mesh, spec))


def _is_reordered(found: Mesh, mesh: Mesh) -> bool:
    """Whether a mesh has the axes and devices of another one, in another order."""
    return found.shape == mesh.shape and set(found.devices.flat) == set(mesh.devices.flat)


def placed(leaf: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Whether an argument is already on the mesh; its placement there is not changed."""
    if isinstance(leaf, core.Tracer):
        return True
    here = getattr(leaf, "sharding", None)
    found = here.mesh if isinstance(here, NamedSharding) else None
    if here is None or found in (mesh, mesh.abstract_mesh):
        return here is not None
    if explicit(mesh) or (found is not None and explicit(found)):
        return False
    if isinstance(mesh, AbstractMesh) or isinstance(found, AbstractMesh):
        return False
    # In order: a program takes arrays of one order of the devices only.
    return list(here.devices_indices_map(jnp.shape(leaf))) == list(mesh.devices.flat)


def is_named(leaf: Any, mesh: Mesh | AbstractMesh) -> bool:
    """Whether an array has a sharding by names of this mesh's axes, or of an equal mesh's."""
    here = getattr(leaf, "sharding", None)
    return (
        not isinstance(leaf, core.Tracer) and isinstance(here, NamedSharding) and placed(leaf, mesh)
    )


def like(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of the result of `put`."""
    found = axis_types.mesh_of(leaf)
    if found is not None and (automatic(found) == automatic(mesh) or _is_reordered(found, mesh)):
        spec = leaf.sharding.spec
    kind = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    home = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=home, weak_type=kind.weak_type)


def of_one(leaf: Any, workers: int) -> bool:
    """Whether the memory is that of one worker although there are several workers."""
    return workers > 1 and jnp.ndim(leaf) > 0 and leaf.shape[0] == 1


def copy_to_all(leaf: Any, mesh: Mesh, workers: int, spec: PartitionSpec) -> Any:
    """Copies `[1, …]`, one worker's memory, to each of `workers` workers."""
    shape = (workers, *leaf.shape[1:])
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
    if isinstance(leaf, core.Tracer):
        return jax.device_put(jnp.broadcast_to(leaf, shape), NamedSharding(mesh, spec))
    # A device's slice of all workers' memory is the whole memory of one worker.
    own = processes.put(leaf, NamedSharding(mesh, PartitionSpec(None, *spec[1:])))
    parts = [shard.data for shard in own.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), parts)


def homes(params: PyTree, mesh: Mesh | AbstractMesh) -> Homes:
    """The shardings of the arrays of a tree on the mesh, by path."""
    found, memory = {}, defaultdict(set)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        home = _home_of(leaf, mesh)
        if home is not None:
            found[_names(path), jnp.shape(leaf)] = home
            if per_worker.marked(path):
                memory[_names(per_worker.below(path)), jnp.shape(leaf)].add(home)
    return found | {at: homes.pop() for at, homes in memory.items() if len(homes) == 1}


def _home_of(leaf: Any, mesh: Mesh | AbstractMesh) -> PartitionSpec | None:
    if is_named(leaf, mesh):
        return _short(leaf.sharding.spec) if leaf.sharding.mesh.shape == mesh.shape else None
    names = explicit(mesh)
    if not names or not isinstance(leaf, core.Tracer) or _type(leaf).mesh != mesh.abstract_mesh:
        return None
    if len(names) == len(mesh.axis_names):
        return _short(_type(leaf).spec)
    # The type of a traced array has no automatic axes.
    return PartitionSpec(*(e or PartitionSpec.UNCONSTRAINED for e in _type(leaf).spec))


def _short(spec: PartitionSpec) -> PartitionSpec:
    """The spec without trailing dimensions that are not split, as a compiled step returns it."""
    entries = list(spec)
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*entries)


def spec(
    path: tuple, leaf: Any, homes: Homes, axis_name: AxisName, mesh: Mesh | AbstractMesh
) -> PartitionSpec:
    """The spec of an array of a state: that of memory, or that of its parameter.

    Memory of a parameter's shape is split like the parameter. Where a tree holds them under
    different names, it stays split as it is.
    """
    # On automatic axes, a compiled step always returns empty arrays with this spec.
    if 0 in jnp.shape(leaf) and not explicit(mesh):
        return PartitionSpec()
    of_memory = per_worker.spec(path, axis_name)
    if per_worker.shard_axes(path) is not None:
        return of_memory
    home = _home(path, jnp.shape(leaf)[len(of_memory) :], homes)
    if home is None and of_memory:
        own = _home(path, jnp.shape(leaf), homes) or _home_of(leaf, mesh)
        home = own and own[1:]
    return PartitionSpec(*of_memory, *(home or ()))


def _home(path: tuple, shape: tuple[int, ...], homes: Homes) -> PartitionSpec | None:
    """The home of the parameter that has this shape and whose path ends this path."""
    names = _names(path)
    found = (homes.get((names[start:], shape)) for start in range(len(names) + 1))
    return next((home for home in found if home is not None), None)


def stay(arg: PyTree, homes: Homes) -> PyTree:
    """Constrains the argument to its layout at the start of a step."""

    def hold(path, leaf):
        # One worker's memory has the shape that all memory has outside, if it is the only one.
        memory = per_worker.marked(path)
        home = None if memory else _home(path, jnp.shape(leaf), homes)
        return leaf if home is None else jax.lax.with_sharding_constraint(leaf, home)

    return jax.tree_util.tree_map_with_path(hold, arg) if homes else arg


def at_home(
    results: PyTree, mesh: Mesh | AbstractMesh, homes: Homes, axis_name: AxisName
) -> PyTree:
    """Constrains each result of a step to the layout of the argument that it replaces."""

    def hold(path, leaf):
        memory = per_worker.marked(path) or per_worker.shard_axes(path) is not None
        if not memory and _home(path, jnp.shape(leaf), homes) is None:
            return leaf
        home = NamedSharding(mesh, spec(path, leaf, homes, axis_name, mesh))
        return jax.lax.with_sharding_constraint(leaf, home)

    return jax.tree_util.tree_map_with_path(hold, results) if homes else results


def _names(path: tuple) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _type(leaf: Any) -> NamedSharding:
    """The sharding in the type of an array, on an abstract mesh."""
    return jax.typeof(leaf).sharding

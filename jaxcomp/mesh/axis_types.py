"""The types of a mesh's axes: explicit (the default of `jax.make_mesh`) or automatic.

Programs here are written for automatic axes. Arguments and results change their type at the
boundary, without moving data.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxcomp.backend import axes
from jaxcomp.types import AxisName


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with the same devices and automatic axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def explicit(mesh: Any) -> tuple:
    """The names of the explicit axes."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def beside(axis_name: AxisName) -> tuple[str, ...]:
    """The axes of several devices that stay with the compiler beside the workers' manual ones."""
    mesh, names = jax.sharding.get_abstract_mesh(), axes.names(axis_name)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds.get(name) != AxisType.Manual for name in names):
        return ()
    rest = (name for name, kind in kinds.items() if kind != AxisType.Manual)
    return tuple(name for name in rest if mesh.shape[name] > 1)


def mesh_of(leaf: Any) -> Mesh | None:
    """The mesh of an array's sharding, or None."""
    if isinstance(leaf, core.Tracer):
        return None
    sharding = getattr(leaf, "sharding", None)
    found = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return found if isinstance(found, Mesh) else None


def retype(x: Any, mesh: Mesh) -> jax.Array:
    """The array on another mesh with the same devices and axes, without copying its buffers."""
    home = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, home, parts, dtype=x.dtype)


def surroundings(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Sets the mesh as the current one, so that a mesh set by the caller has no effect.

    While JAX traces, the mesh cannot be set, and the caller's mesh stays current.
    """
    try:
        return jax.set_mesh(mesh)
    except ValueError:
        return contextlib.nullcontext()


def automatically(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of eager arrays so that it accepts arrays and meshes with any axis types.

    Results on the devices of the arguments have the arguments' axis types.
    """

    @functools.wraps(function)
    def run(*args, **kwargs):
        given = {}

        def inside(leaf):
            mesh = mesh_of(leaf)
            if mesh is None or not explicit(mesh):
                return leaf
            given[automatic(mesh)] = mesh
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf.update(sharding=NamedSharding(automatic(mesh), leaf.sharding.spec))
            return retype(leaf, automatic(mesh))

        def outside(leaf):
            mesh = given.get(mesh_of(leaf))
            return leaf if mesh is None else retype(leaf, mesh)

        args, kwargs = jax.tree.map(inside, (args, kwargs))
        with _automatic_surroundings((args, kwargs)):
            results = function(*args, **kwargs)
        return jax.tree.map(outside, results)

    return run


def _automatic_surroundings(arrays: Any) -> contextlib.AbstractContextManager:
    """The current mesh with automatic axes; none if arrays are on other devices."""
    try:
        here = jax.sharding.get_mesh()
    except ValueError:  # While JAX traces.
        return contextlib.nullcontext()
    if here.empty:
        return contextlib.nullcontext()
    devices = set(here.devices.flat)
    placed = [x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array) and x.committed]
    elsewhere = any(x.sharding.device_set != devices for x in placed)
    return jax.set_mesh(None if elsewhere else automatic(here))

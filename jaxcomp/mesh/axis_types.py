"""The types of a mesh's axes: arrays with explicit ones (`jax.make_mesh`'s default), and without.

A program here is written for automatic axes. Arrays change their type on the way in and out, and
stay where they are.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import core
from jax.sharding import AxisType, Mesh, NamedSharding


def automatic(mesh: Mesh) -> Mesh:
    """The same devices, all axes automatic."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def explicit(mesh: Any) -> tuple:
    """The names of the explicit axes."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == AxisType.Explicit)


def mesh_of(leaf: Any) -> Mesh | None:
    """The mesh that an array lies on, in terms of its axes."""
    if isinstance(leaf, core.Tracer):
        return None
    sharding = getattr(leaf, "sharding", None)
    found = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return found if isinstance(found, Mesh) else None


def retyped(x: Any, mesh: Mesh) -> jax.Array:
    """An array of a mesh on another one with the same devices and axes, in the same buffers."""
    home = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, home, parts, dtype=x.dtype)


def surroundings(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Sets the mesh, so that another one in the surroundings changes nothing.

    While JAX traces, it cannot be set, and the surroundings stay.
    """
    try:
        return jax.set_mesh(mesh)
    except ValueError:
        return contextlib.nullcontext()


def automatically(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes with arrays eagerly, for arrays and surroundings of any types.

    What it returns has the types of what it was given on the same devices.
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
            return retyped(leaf, automatic(mesh))

        def outside(leaf):
            mesh = given.get(mesh_of(leaf))
            return leaf if mesh is None else retyped(leaf, mesh)

        args, kwargs = jax.tree.map(inside, (args, kwargs))
        with _automatic_surroundings((args, kwargs)):
            results = function(*args, **kwargs)
        return jax.tree.map(outside, results)

    return run


def _automatic_surroundings(arrays: Any) -> contextlib.AbstractContextManager:
    """The mesh that is set, with automatic axes; none, if arrays lie on other devices."""
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

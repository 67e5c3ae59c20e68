"""`jax.shard_map` without arguments that have no elements, and where its gradient is taken."""

import sys
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.types import Array, AxisName, PyTree


def shard_map(
    body: Callable[..., Any],
    *,
    in_specs: PyTree,
    out_specs: PyTree,
    mesh: Mesh | AbstractMesh | None = None,
    axis_names: Set[str] = frozenset(),
    check_vma: bool = True,
) -> Callable[..., Any]:
    """The same as `jax.shard_map`.

    Arguments without elements, such as the memory of a share without blocks, are created inside.
    XLA of JAX 0.11.2 crashes on them: it replaces them with constants before Shardy reads the
    shardings of the arguments, and constants have none. `--xla_enable_hlo_sharding_v3=false` avoids
    it too; 0.11.1 and 0.12 compile such programs.
    """

    on = {"out_specs": out_specs, "mesh": mesh, "axis_names": axis_names, "check_vma": check_vma}

    def run(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        # Typed PRNG keys cannot be created with `jnp.zeros`.
        empty = [
            jnp.size(leaf) == 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            for leaf in leaves
        ]
        if not any(empty):
            return jax.shard_map(body, in_specs=in_specs, **on)(*args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
        given = [number for number, without in enumerate(empty) if not without]

        def fill(*own: Array) -> Any:
            passed = iter(own)
            everything = [
                _local(leaf, spec) if without else next(passed)
                for leaf, spec, without in zip(leaves, specs, empty, strict=True)
            ]
            return body(*jax.tree.unflatten(treedef, everything))

        there = tuple(specs[number] for number in given)
        return jax.shard_map(fill, in_specs=there, **on)(*(leaves[n] for n in given))

    return run


def is_transposing(axis_name: AxisName) -> bool:
    """Whether JAX differentiates the whole mapping over these axes just now, from outside.

    Where nothing is typed, JAX then adds up the cotangents of replicated arguments by itself. Only
    the frames that call tell such a backward pass from one inside of the mapped function.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.endswith(".shard_map") and "transpose" in frame.f_code.co_name:
            # A mapping inside over other axes does not count; JAX knows them by several names.
            given = (v for name, v in frame.f_locals.items() if name.endswith("manual_axes"))
            over = next(given, None)
            if over is None or set(axes.names(axis_name)) & set(over):
                return True
        frame = frame.f_back
    return False


def _local(leaf: Array, spec: PartitionSpec) -> Array:
    """The part of an array without elements that this device has."""
    shape, split = list(leaf.shape), set(axes.varying_axes(leaf))
    for dimension, names in enumerate(spec):
        if names is not None:
            shape[dimension] //= lax.axis_size(names)
            split |= set(axes.names(names))
    part = jnp.zeros(shape, leaf.dtype)
    return axes.vary(part, tuple(sorted(split, key=str))) if split else part

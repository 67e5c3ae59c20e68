"""Checks that results are the same on all workers, bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.sharding import Mesh, PartitionSpec

from jaxcomp.backend import axes, mapping
from jaxcomp.mesh import axis_types, per_worker, placement
from jaxcomp.types import Array, AxisName, PyTree


def check(results: PyTree, mesh: Mesh, axis_name: AxisName) -> bool:
    """Compares a checksum of each array between the workers, which waits for the arrays.

    The checksum is a sum over an array's bits, so a difference is missed once in 2³².

    Raises:
        ValueError: if an array outside of `PerWorker` differs, with its name.

    Returns:
        Whether the arrays could be compared, which is not possible while JAX traces.
    """
    flat = jax.tree_util.tree_leaves_with_path(results)
    found = [(path, leaf) for path, leaf in flat if not per_worker.marked(path)]
    if not found or any(isinstance(leaf, core.Tracer) for _, leaf in found):
        return False
    with axis_types.surroundings(mesh):
        differ = _differences(mesh, axis_name)([leaf for _, leaf in found])
    for (path, _), differs in zip(found, jax.device_get(differ), strict=True):
        if differs:
            raise ValueError(
                f"result{jax.tree_util.keystr(path)} differs between the workers of "
                f"{axis_name!r}, and `check_vma=False` keeps that of one of them. "
                f"{REMEDIES}"
            )
    return True


_NARROW = {"int2", "uint2", "int4", "uint4", "float4_e2m1fn"}

REMEDIES = (
    "A loss or metric: average it with jax.lax.pmean. Optimizer state that sees gradients before "
    "the mean (local momentum, clipping statistics, optax.MultiSteps): wrap that transformation "
    "with jaxcomp.per_worker, or chain it after compressed_mean. Parameters: let compressed_mean "
    "see their gradient, or train the others only, with jaxcomp.freeze(tx, frozen) around the "
    "whole chain."
)


@functools.cache
def _differences(mesh: Mesh, axis_name: AxisName) -> Any:
    inside = axis_types.automatic(mesh)

    def body(leaves: list[Array]) -> list[Array]:
        sums = jnp.stack([_sum(leaf) for leaf in leaves])
        return list(lax.pmax(sums, axis_name) != lax.pmin(sums, axis_name))

    def run(leaves: list[Array]) -> list[Array]:
        with jax.sharding.use_abstract_mesh(inside.abstract_mesh):
            return mapping.shard_map(
                body,
                mesh=inside,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(),
                axis_names=set(axes.names(axis_name)),
                check_vma=False,
            )(placement.to_automatic(leaves, inside))

    return jax.jit(run)


def _sum(x: Array) -> Array:
    """A weighted sum over the bits of an array, with a different weight for each element."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_ or x.dtype.name in _NARROW:
        x = x.astype(jnp.float32)
    width = min(x.dtype.itemsize, 4)
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    weight = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        place = lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        weight = weight * jnp.uint32(40503) + place
    return jnp.sum(bits * (2 * weight + 1), dtype=jnp.uint32)

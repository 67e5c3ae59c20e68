"""The variance of the workers' models, from few numbers of each."""

import jax
import jax.numpy as jnp

from jaxcomp.exchange import over_workers
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, PyTree

SKETCH = 256
"""The numbers that a worker sends of its model: the variance of `n` workers that differ in random
directions is found within `sqrt(2 / (SKETCH · n))`."""


def of_models(delta: PyTree, axis_name: AxisName, key: Array, mean: PyTree | None = None) -> Array:
    """`(1/n) Σᵢ ‖Δᵢ − Δ̄‖²`, for what the workers are away from one point.

    The exact mean `Δ̄` is known only if it was sent dense. If not, each worker sends a sketch of its
    `Δᵢ`: sums over its elements with random signs, the same for all workers. The variance of the
    sketches is that of the models in expectation, whatever a codec does to the messages.

    Args:
        delta: this worker's.
        axis_name: the axes of the workers.
        key: of the signs.
        mean: `Δ̄`, if it is known.
    """
    if mean is not None:
        parts = jax.tree.leaves(jax.tree.map(jnp.subtract, delta, mean))
        own = sum(jnp.sum(jnp.square(part.astype(jnp.float32))) for part in parts)
        (found,) = over_workers.mean((jnp.asarray(own, jnp.float32),), axis_name)
        return found
    sketch = _sketch(delta, key)
    both = jnp.append(sketch, jnp.sum(jnp.square(sketch)))
    (found,) = over_workers.mean((both,), axis_name)
    return jnp.maximum(found[-1] - jnp.sum(jnp.square(found[:-1])), 0)


def _sketch(tree: PyTree, key: Array) -> Array:
    total = jnp.zeros(SKETCH, jnp.float32)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        flat = leaf.reshape(-1).astype(jnp.float32)
        rows = -(-flat.size // SKETCH)
        places = jnp.arange(rows * SKETCH, dtype=jnp.uint32).reshape(rows, SKETCH)
        high, low = noise.fold(key, number)
        table = jnp.pad(flat, (0, places.size - flat.size)).reshape(places.shape)
        signed = jnp.where(noise.at(high, low, places) >> 31 > 0, -table, table)
        total = total + jnp.sum(signed, axis=0)
    return total

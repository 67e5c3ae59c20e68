"""Selection: the places of the elements that are worth sending."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt32

from jaxcomp.protocols import Array


def top_k(x: Array, k: int) -> UInt32[Array, "n k"]:
    """Places of the `k` largest `|x|` of each row, ascending.

    Ties go to the lower place. NaN counts as larger than Inf, so that it is never left behind.

    Example:
        >>> top_k(jnp.array([[1.0, -3.0, 0.0, 2.0]]), 2)
        Array([[1, 3]], dtype=uint32)
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    whole = jnp.int64 if wide.dtype == jnp.float64 else jnp.int32
    size = lax.bitcast_convert_type(jnp.abs(wide), whole)  # Ordered like |x|, NaN on top.
    _, places = lax.top_k(size, k)
    return jnp.sort(places, axis=1).astype(jnp.uint32)

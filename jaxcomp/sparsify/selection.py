"""Selection: the places of the elements that are worth sending."""

import functools

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
    size = jnp.abs(x if x.dtype == jnp.float64 else x.astype(jnp.float32))
    # Over the bits, which are ordered like |x| with NaN on top. A CPU selects float32 forty times
    # faster than integers, with NaN on top as well, so there it is asked for that.
    if size.dtype == jnp.float32:
        places = lax.platform_dependent(
            size,
            cpu=functools.partial(_by_value, k=k),
            default=functools.partial(_by_bits, k=k),
        )
    else:
        places = _by_bits(size, k)
    return jnp.sort(places, axis=1).astype(jnp.uint32)


def _by_value(size: Array, k: int) -> Array:
    return lax.top_k(size, k)[1]


def _by_bits(size: Array, k: int) -> Array:
    whole = jnp.int64 if size.dtype == jnp.float64 else jnp.int32
    return lax.top_k(lax.bitcast_convert_type(size, whole), k)[1]

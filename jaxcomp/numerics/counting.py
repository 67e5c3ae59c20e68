"""Counts of steps that do not overflow."""

import jax.numpy as jnp

from jaxcomp.types import Array

LAST = 2**31 - 1
"""The last step that an int32 counts."""


def after(count: Array, every: int = 1) -> Array:
    """The count plus one, which stays at the largest integer.

    With an `every` it falls there by a multiple of `every` instead, to about half, so that what
    happens in each `every`-th step goes on in its rhythm.

    Example:
        >>> int(after(jnp.int32(LAST))) == LAST
        True
        >>> (LAST + 1) % 3, int(after(jnp.int32(LAST), every=3)) % 3
        (2, 2)
    """
    if every == 1:
        return jnp.minimum(count, LAST - 1) + 1
    fall = max(LAST // 2 // every, 1) * every
    return jnp.where(count < LAST, count, count - fall) + 1

"""Arrays stored in eight bits per element, for memory; they are not packed into words."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, Int8

from jaxcomp.quantize import rounding, totals
from jaxcomp.quantize.levels import FRACTION
from jaxcomp.types import Array

BLOCK = 256
"""Elements that share a step: neighbours in the flattened array."""


class Blocks8(NamedTuple):
    """An array in eight bits per element.

    Attributes:
        codes: the codes, in the array's shape.
        steps: the step size of each `BLOCK` elements.
    """

    codes: Int8[Array, "..."]
    steps: Float32[Array, " blocks"]


def pack(x: Float32[Array, "..."]) -> Blocks8:
    """Rounds each element to the nearest of 255 levels up to the largest of its block.

    Example:
        >>> pack(jnp.array([1.0, -0.5, 0.0])).codes
        Array([127, -63,   0], dtype=int8)
    """
    rows = _rows(x)
    step, factor = rounding.exact_step(totals.max_abs(rows), 127, jnp.float32)
    # Round in fixed point, so that halves go up on every platform.
    points = rounding.points(rows, factor).astype(jnp.int32) + (1 << (FRACTION - 1))
    codes = (points >> FRACTION).astype(jnp.int8)
    return Blocks8(codes.reshape(-1)[: x.size].reshape(x.shape), step[:, 0])


def unpack(held: Blocks8) -> Float32[Array, "..."]:
    """The array; a block with a non-finite element was stored as NaN."""
    rows = _rows(held.codes.astype(jnp.float32)) * held.steps[:, None]
    return rows.reshape(-1)[: held.codes.size].reshape(held.codes.shape)


def _rows(x: Array) -> Array:
    """`[blocks, BLOCK]`, filled up with zeros."""
    count = math.ceil(x.size / BLOCK)
    flat = x.reshape(-1)
    missing = count * BLOCK - x.size
    flat = lax.pad(flat, jnp.zeros((), x.dtype), ((0, missing, 0),)) if missing else flat
    return flat.reshape(count, BLOCK)

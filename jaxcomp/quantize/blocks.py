"""Arrays held in eight bits an element: memory, not wire, so nothing is packed into words."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, Int8

from jaxcomp.quantize import rounding, sums
from jaxcomp.quantize.levels import FRACTION
from jaxcomp.types import Array

BLOCK = 256
"""Elements that share a step: neighbours in the flattened array."""


class Blocks8(NamedTuple):
    """An array in eight bits an element.

    Attributes:
        codes: of the array's shape.
        steps: what a code is worth, one for each `BLOCK` elements.
    """

    codes: Int8[Array, "..."]
    steps: Float32[Array, " blocks"]


def pack(x: Float32[Array, "..."]) -> Blocks8:
    """Each element to the nearest of 255 levels up to the largest of its block.

    Example:
        >>> pack(jnp.array([1.0, -0.5, 0.0])).codes
        Array([127, -63,   0], dtype=int8)
    """
    rows = _rows(x)
    step, factor = rounding.exact_step(sums.max_abs(rows), 127, jnp.float32)
    # In fixed point, as every rounding here: halves go up, on every platform.
    points = rounding.points(rows, factor).astype(jnp.int32) + (1 << (FRACTION - 1))
    codes = (points >> FRACTION).astype(jnp.int8)
    return Blocks8(codes.reshape(-1)[: x.size].reshape(x.shape), step[:, 0])


def unpack(held: Blocks8) -> Float32[Array, "..."]:
    """The array; what is not finite was kept as a whole block of NaN."""
    rows = _rows(held.codes.astype(jnp.float32)) * held.steps[:, None]
    return rows.reshape(-1)[: held.codes.size].reshape(held.codes.shape)


def _rows(x: Array) -> Array:
    """`[blocks, BLOCK]`, filled up with zeros."""
    count = math.ceil(x.size / BLOCK)
    flat = x.reshape(-1)
    missing = count * BLOCK - x.size
    flat = lax.pad(flat, jnp.zeros((), x.dtype), ((0, missing, 0),)) if missing else flat
    return flat.reshape(count, BLOCK)

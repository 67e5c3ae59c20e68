"""Levels that follow a law: where elements are dense, so are the values."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import checks
from jaxcomp.protocols import Array
from jaxcomp.quantize.levels import FRACTION
from jaxcomp.theory import limits

_PRECISION = 10
"""Bits of the largest value: a value off by 2⁻¹¹ of it adds less than 1e-6 to the error."""


@dataclasses.dataclass(frozen=True)
class LloydMax:
    """The `2^width` values of least squared error for elements of a law, as integers below 2¹⁰.

    A code is a sign bit and the number of the value; an element takes the nearest one, and dither
    changes nothing.

    Args:
        width: bits of a code, 1 to 8.
        law: "gaussian" or "laplace".

    Example:
        >>> LloydMax(width=2).half
        (307, 1023)

    References:
        Lloyd, Least squares quantization in PCM, 1982; Max, Quantizing for minimum distortion,
        1960.
    """

    width: int
    law: str = "gaussian"
    dithers = False

    def __post_init__(self):
        checks.integer("width", self.width, 1, 8)
        checks.choice("law", self.law, ("gaussian", "laplace"))

    @property
    def bits(self) -> int:
        return self.width

    @property
    def magnitude(self) -> int:
        return self.half[-1]

    @property
    def precision(self) -> int:
        return 0 if self.width == 1 else _PRECISION

    @property
    def half(self) -> tuple[int, ...]:
        """The positive values."""
        return _positive(self.width, self.law)[0]

    @property
    def reach(self) -> float:
        """The largest value in units of the law's standard deviation."""
        return _positive(self.width, self.law)[1]

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        del dither
        word = lax.bitcast_convert_type(points, jnp.int32)
        size = lax.bitcast_convert_type(word & 0x7FFFFFFF, jnp.float32)
        number = jnp.zeros_like(word)
        for lower, upper in zip(self.half, self.half[1:], strict=False):
            middle = float((lower + upper) << (FRACTION - 1))
            number = number + (size >= middle).astype(jnp.int32)
        sign = lax.shift_right_logical(word, jnp.full_like(word, 31))
        return ((sign << (self.width - 1)) | number).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        number = (codes & (2 ** (self.width - 1) - 1)).astype(jnp.int32)
        size = _selected(number, self.half)
        negative = (codes >> (self.width - 1)) & 1
        return jnp.where(negative == 1, -size, size).astype(jnp.float32)


def _selected(number: Array, table: tuple[int, ...]) -> Array:
    """`table[number]` by halves, since not every kernel can look up."""
    if len(table) == 1:
        return jnp.full_like(number, table[0])
    half = len(table) // 2
    upper = number & half
    low, high = (_selected(number, part) for part in (table[:half], table[half:]))
    return jnp.where(upper != 0, high, low)


@functools.lru_cache
def _positive(width: int, law: str) -> tuple[tuple[int, ...], float]:
    _, centroids, _ = limits.lloyd_max(2**width, law)
    upper = np.asarray(centroids[2 ** (width - 1) :])
    top = 1 if width == 1 else 2**_PRECISION - 1
    return tuple(int(v) for v in np.round(upper / upper[-1] * top)), float(upper[-1])

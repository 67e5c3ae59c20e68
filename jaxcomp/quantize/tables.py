"""Levels for a given distribution, denser where elements are denser."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import checks
from jaxcomp.quantize.levels import FRACTION, Levels
from jaxcomp.theory import limits
from jaxcomp.types import Array

_PRECISION = 10
"""Bits of the largest value: a value off by 2⁻¹¹ of it adds less than 1e-6 to the error."""

_ENDS = {"gaussian": 7.0, "laplace": 14.0}
"""Standard deviations that at most one element in 10⁸ exceeds."""


@dataclasses.dataclass(frozen=True)
class LloydMax(Levels, public=("half", "reach")):
    """The `2^width` values of least squared error for a distribution, as integers below 2¹⁰.

    A code is a sign bit and the index of the value; an element is rounded to the nearest value, and
    dither has no effect.

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
        """The largest value in standard deviations of the distribution."""
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
        size = _select(number, self.half)
        negative = (codes >> (self.width - 1)) & 1
        return jnp.where(negative == 1, -size, size).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class UniformThreshold(Levels, public=("half", "reach", "dead")):
    """The values of least squared error at a given entropy, for use with an entropy coder.

    Thresholds are evenly spaced except for a wider zero cell, and values are the centroids of the
    cells, as integers below 2¹⁰. A code is a sign bit and the index of the value; dither has no
    effect.

    Args:
        entropy: bits per element that an ideal coder takes, above 0, at most 5.
        law: "gaussian" or "laplace".

    Raises:
        ValueError: for other entropies or another law.

    Example:
        >>> UniformThreshold(entropy=1.0).half
        (0, 252, 624, 1023)

    References:
        Gish and Pierce, Asymptotically efficient quantizing, 1968; Sullivan, Efficient scalar
        quantization of exponential and Laplacian random variables, 1996.
    """

    entropy: int | float
    law: str = "gaussian"
    dithers = False
    precision = _PRECISION

    def __post_init__(self):
        checks.positive("entropy", self.entropy)
        checks.number("entropy", self.entropy, 0.0, 5.0)
        checks.choice("law", self.law, tuple(_ENDS))

    @property
    def bits(self) -> int:
        return (len(self.half) - 1).bit_length() + 1

    @property
    def magnitude(self) -> int:
        return self.half[-1]

    @property
    def half(self) -> tuple[int, ...]:
        """The values from zero on."""
        return _evenly(self.entropy, self.law).half

    @property
    def reach(self) -> float:
        """The largest value in standard deviations of the distribution."""
        return _evenly(self.entropy, self.law).reach

    @property
    def dead(self) -> float:
        """The magnitude, in standard deviations, below which an element becomes zero."""
        return self.reach * _evenly(self.entropy, self.law).begin / self.magnitude

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        del dither
        begin, spacing = _evenly(self.entropy, self.law)[2:]
        word = lax.bitcast_convert_type(points, jnp.int32)
        size = lax.bitcast_convert_type(word & 0x7FFFFFFF, jnp.float32).astype(jnp.int32)
        # The difference in integers, so that no product is fused with it.
        above = (size - round(begin * 2**FRACTION)).astype(jnp.float32)
        number = (above * jnp.float32(1 / (spacing * 2**FRACTION))).astype(jnp.int32) + 1
        number = jnp.where(above >= 0, jnp.minimum(number, len(self.half) - 1), 0)
        sign = lax.shift_right_logical(word, jnp.full_like(word, 31))
        return ((sign << (self.bits - 1)) | number).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        number = (codes & (2 ** (self.bits - 1) - 1)).astype(jnp.int32)
        missing = 2 ** (self.bits - 1) - len(self.half)
        size = _select(number, self.half + (self.magnitude,) * missing)
        negative = (codes >> (self.bits - 1)) & 1
        return jnp.where(negative == 1, -size, size).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Geometric(Levels):
    """`±b^-i` for `i` from 0 to `positive − 1`, with `b = 2^(1 / per_octave)`; no zero.

    A code is a sign bit and the exponent `i`. An element is rounded to the value with the nearest
    logarithm, which is within a factor `√b` of an element above `b^(½ − positive)`. Values have
    eight significant bits. Dither has no effect.

    Args:
        positive: values per side, 1 to 128.
        per_octave: the number of values in a factor of two: 1, 2, 4 or 8.

    Example:
        >>> Geometric(positive=16).bits
        5
    """

    positive: int
    per_octave: int = 2
    magnitude = 256
    precision = 8
    dithers = False

    def __post_init__(self):
        checks.integer("positive", self.positive, 1, 128)
        checks.choice("per_octave", self.per_octave, (1, 2, 4, 8))

    @property
    def bits(self) -> int:
        return 1 + (self.positive - 1).bit_length()

    @property
    def span(self) -> float:
        """The largest ratio of the largest value to an element that has a close value."""
        return 2 ** ((self.positive - 0.5) / self.per_octave)

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        del dither
        word = lax.bitcast_convert_type(points, jnp.int32)
        # The logarithm relative to the largest value's power of two, in steps of b; the mantissa is
        # compared with the geometric means of neighbouring values.
        steps = (((word >> 23) & 0xFF) - (127 + FRACTION + 8)) * self.per_octave
        for step in range(self.per_octave):
            middle = np.exp2((2 * step + 1) / (2 * self.per_octave))
            steps = steps + ((word & 0x7FFFFF) >= round((middle - 1) * 2**23)).astype(jnp.int32)
        number = jnp.clip(-steps, 0, self.positive - 1)
        sign = lax.shift_right_logical(word, jnp.full_like(word, 31))
        return ((sign << (self.bits - 1)) | number).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        number = (codes & (2 ** (self.bits - 1) - 1)).astype(jnp.int32)
        octave = number // self.per_octave
        table = tuple(round(256 * 2 ** (-i / self.per_octave)) for i in range(self.per_octave))
        size = _select(number - octave * self.per_octave, table).astype(jnp.float32)
        # A power of two, so the product is exact.
        size = size * lax.bitcast_convert_type((127 - octave) << 23, jnp.float32)
        return jnp.where((codes >> (self.bits - 1)) & 1 == 1, -size, size)


def _select(number: Array, table: tuple[int, ...]) -> Array:
    """`table[number]` by binary selection, since not every kernel can look up values."""
    if len(table) == 1:
        return jnp.full_like(number, table[0])
    half = len(table) // 2
    upper = number & half
    low, high = (_select(number, part) for part in (table[:half], table[half:]))
    return jnp.where(upper != 0, high, low)


class _Evenly(NamedTuple):
    """The values from zero on, and the largest of them in standard deviations; the first threshold
    and the distance of the next ones, in units of a value.
    """

    half: tuple[int, ...]
    reach: float
    begin: float
    spacing: float


@functools.lru_cache
def _evenly(entropy: float, law: str) -> _Evenly:
    thresholds, values = limits.uniform_threshold(entropy, law)
    number = max(int(np.searchsorted(values, _ENDS[law])), 1)
    unit = (2**_PRECISION - 1) / values[number - 1]
    half = (0, *(int(v) for v in np.round(values[:number] * unit)))
    spacing = (thresholds[1] - thresholds[0]) * unit
    return _Evenly(half, _round(values[number - 1]), _round(thresholds[0] * unit), _round(spacing))


@functools.lru_cache
def _positive(width: int, law: str) -> tuple[tuple[int, ...], float]:
    _, centroids, _ = limits.lloyd_max(2**width, law)
    upper = np.asarray(centroids[2 ** (width - 1) :])
    top = 1 if width == 1 else 2**_PRECISION - 1
    return tuple(int(v) for v in np.round(upper / upper[-1] * top)), _round(upper[-1])


def _round(x: float) -> float:
    """Drops the digits in which solvers on two machines differ: settings must be alike on all."""
    return round(float(x), 6)

"""Level sets: the values of codes, in units of the bucket's step.

A level set maps scaled elements to codes and codes to values. All values are small integers, so
code × step is exact in float32 and decoding does not round.
"""

import abc
import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, UInt32

from jaxcomp import checks
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array

FRACTION = 20
"""Bits behind the point in which an element is rounded: dither is an integer below 2²⁰."""

TRIT = 1.6
"""Width of a code below 3: five of them share a byte."""


class Levels(Interface, abstract=True):
    """A frozen dataclass that maps elements, measured in steps, to codes and back.

    Attributes:
        bits: width of a code: a whole number, or `TRIT`.
        magnitude: the largest value; a bucket's step is its scale divided by this.
        precision: significant bits that a product with a value needs beyond those of the step.
        dithers: whether dither moves an element to either neighbour, so that rounding can be
            unbiased.
        span: the largest ratio of the largest value to an element that still has a close value; 0.0
            if small elements have none.
    """

    bits: int | float
    magnitude: int
    precision: int
    dithers: bool
    span = 0.0

    @abc.abstractmethod
    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        """The code of each element.

        Elements are in units of 2⁻²⁰ of a step, within the levels; `dither` is in `[0, 2²⁰)`.
        """

    @abc.abstractmethod
    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        """The value of each code in steps."""


@dataclasses.dataclass(frozen=True)
class Uniform(Levels):
    """`2 * steps + 1` evenly spaced values from `-steps` to `steps`: a mid-tread grid.

    Example:
        >>> Uniform(steps=7).bits
        4
    """

    steps: int
    dithers = True

    def __post_init__(self):
        checks.integer("steps", self.steps, 1, 127)

    @property
    def bits(self) -> int | float:
        return TRIT if self.steps == 1 else (2 * self.steps).bit_length()

    @property
    def magnitude(self) -> int:
        return self.steps

    @property
    def precision(self) -> int:
        return 0 if self.steps == 1 else self.steps.bit_length()

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        # In fixed point: a float addition after a float product may or may not be fused with it.
        above = points.astype(jnp.int32) + (self.steps << FRACTION)
        return ((above + dither) >> FRACTION).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        return (codes.astype(jnp.int32) - self.steps).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MidRise(Levels):
    """`2^width` evenly spaced values with no zero among them: `±1, ±3, …, ±(2^width − 1)`.

    Args:
        width: bits of a code, 1 to 8.
        cells: True if the scale is the end of the last value's cell, `2^width`, for rounding to
            nearest; False if it is the last value, as unbiased rounding needs.

    Example:
        >>> MidRise(width=2).magnitude, MidRise(width=2, cells=True).magnitude
        (3, 4)
    """

    width: int
    cells: bool = False

    def __post_init__(self):
        checks.integer("width", self.width, 1, 8)

    @property
    def dithers(self) -> bool:
        return not self.cells

    @property
    def bits(self) -> int:
        return self.width

    @property
    def magnitude(self) -> int:
        return 2**self.width - (0 if self.cells else 1)

    @property
    def precision(self) -> int:
        return 0 if self.width == 1 else self.width

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        # Neighbours are two units apart, so the dither is twice as long.
        above = points.astype(jnp.int32) + (self.magnitude << FRACTION)
        above = above if self.cells else above + 2 * dither
        return (above >> (FRACTION + 1)).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        return (2 * codes.astype(jnp.int32) - (2**self.width - 1)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Float(Levels):
    """Zero and `positive` values per side, spaced as floats with `mantissa` bits behind the point.

    The first `2^mantissa` are `0, 1, 2, …` units, and each further `2^mantissa` lie twice as far
    apart: `Float(7, 0)` has 0, 1, 2, 4, …, 64 (the levels of NUQSGD and natural dithering),
    `Float(7, 1)` has 0, 1, 2, 3, 4, 6, 8, 12 (FP4 E2M1, in halves). A code is a sign bit and the
    number of the value.

    Args:
        positive: values above zero, 1 to 127.
        mantissa: bits behind the point, 0 to 3.
        ties: the rounding of the middle of two values: "away" from zero, or to the "even" code. Use
            "away" for stochastic rounding.

    Example:
        >>> Float(positive=7, mantissa=1).magnitude
        12
    """

    positive: int
    mantissa: int = 0
    ties: str = "away"
    dithers = True

    def __post_init__(self):
        checks.integer("positive", self.positive, 1, 127)
        checks.integer("mantissa", self.mantissa, 0, 3)
        checks.choice("ties", self.ties, ("away", "even"))

    @property
    def bits(self) -> int:
        return self.positive.bit_length() + 1

    @property
    def magnitude(self) -> int:
        whole, part = divmod(self.positive, 2**self.mantissa)
        return (2**self.mantissa + part) << (whole - 1) if whole else part

    @property
    def precision(self) -> int:
        return self.mantissa + 1 if self.mantissa else 0

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        word = lax.bitcast_convert_type(points, jnp.int32)
        # The bits of a NaN depend on the compiler, and would overlap the next code.
        word = jnp.where((word & 0x7FFFFFFF) > 0x7F800000, 0, word)
        spare = 23 - self.mantissa
        # Clears the bits below the dither: the sum below then has no product as a term, which the
        # compiler might fuse with it.
        kept = max(spare - FRACTION, 1)
        size = word & (0x7FFFFFFF >> kept << kept)
        # `max(p + 2^m, 2p)`: added to `2^m`, small values are as evenly spaced as their numbers,
        # and larger values continue them. Dither that overflows the mantissa carries into the
        # exponent, which gives the next value.
        small = lax.bitcast_convert_type(size, jnp.float32) + 2.0 ** (FRACTION + self.mantissa)
        joined = jnp.maximum(lax.bitcast_convert_type(small, jnp.int32), size + (1 << 23))
        offset = self._offset(FRACTION + 1)
        if self.ties == "even":  # Half minus one, plus the last bit.
            dither = dither - 1 + (((joined >> spare) - offset) & 1)
        number = ((joined + (dither << (spare - FRACTION))) >> spare) - offset
        sign = lax.shift_right_logical(word, jnp.full_like(word, 31))
        return ((sign << (self.bits - 1)) | number).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        number = (codes & (2 ** (self.bits - 1) - 1)).astype(jnp.int32)
        normal = (number + self._offset(0)) << (23 - self.mantissa)
        small = lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32)
        word = jnp.where(number < 2**self.mantissa, small, normal)
        sign = (codes >> (self.bits - 1)).astype(jnp.int32) << 31
        return lax.bitcast_convert_type(word | sign, jnp.float32)

    def _offset(self, fraction: int) -> int:
        """The offset of the upper bits of a float in `2^-fraction` units from its number."""
        return (126 + fraction + self.mantissa) << self.mantissa


@dataclasses.dataclass(frozen=True)
class Sign(Levels):
    """The two values ±1; elements within 2⁻²⁰ of a step of zero count as positive."""

    bits = 1
    magnitude = 1
    precision = 0
    dithers = False

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        del dither
        # Not `>= 0`: a denormal is negative on a GPU and zero on a CPU.
        return (points > -1).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        return (2 * codes.astype(jnp.int32) - 1).astype(jnp.float32)

"""Rounding: the dither that is added to an element, and the step by which it is divided."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32

from jaxcomp.backend import xla
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import exact, noise
from jaxcomp.quantize import totals
from jaxcomp.quantize.levels import FRACTION
from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array

_TINY = float(np.finfo(np.float32).tiny)
LOW = 2.0**-106
"""The step below which 2²⁰ / step is no float32."""
LIFTED = 24
"""Exponent by which elements of such buckets are first scaled up; their factor is negative."""


class Rounding(Interface, abstract=True):
    """A frozen dataclass that generates the dither to add before rounding down.

    Attributes:
        unbiased: whether the expectation of the rounded value is the value.
        shared: whether all workers draw the same dither.
    """

    unbiased: bool
    shared: bool

    @abc.abstractmethod
    def dither(self, high: Array, low: Array, position: Array) -> Array:
        """Integers in `[0, 2²⁰)` for elements at these positions, of buckets with these seeds.

        `noise.seeds` returns the seeds.
        """


@dataclasses.dataclass(frozen=True)
class Nearest(Rounding):
    """Rounds to the nearest level; halves go up."""

    unbiased = False
    shared = False

    def dither(self, high: Array, low: Array, position: Array) -> Array:
        del high, low
        return jnp.full_like(position, 1 << (FRACTION - 1), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Stochastic(Rounding):
    """Stochastic rounding, whose expectation is exact to 2⁻²⁰ of a step.

    Args:
        shared: True draws the same dither on all workers, from their shared key; False draws
            separate dither on each, so that errors average out.
    """

    shared: bool = False
    unbiased = True

    def dither(self, high: Array, low: Array, position: Array) -> Array:
        return noise.below(FRACTION, high, low, position)


@dataclasses.dataclass(frozen=True)
class Subtractive(Rounding, public=("offset",)):
    """Subtractive dither: the decoder draws the same dither and subtracts it.

    `x̂ = q − u + ½` steps with `q = ⌊p + u⌋` and `u` uniform. It is unbiased, and its error is
    uniform for every input, with variance 1/12 of a squared step; stochastic rounding has up to 1/4
    (and zero if `p` is an integer). The decoder subtracts the upper `SUBTRACTED` bits of the
    dither; the lower bits only make it unbiased.

    Args:
        shared: draw the same dither on all workers.

    References:
        Schuchman, Dither signals and their effect on quantization noise, 1964.
    """

    shared: bool = False
    unbiased = True

    def dither(self, high: Array, low: Array, position: Array) -> Array:
        return noise.below(FRACTION, high, low, position)

    def offset(self, high: Array, low: Array, position: Array) -> Float32[Array, "..."]:
        """The decoder's addend for each value, in steps: within ½, in multiples of 2⁻⁹."""
        upper = self.dither(high, low, position) >> (FRACTION - SUBTRACTED)
        whole = (1 << SUBTRACTED) - 1 - 2 * upper
        return whole.astype(jnp.float32) * jnp.float32(0.5**SUBTRACTED / 2)


SUBTRACTED = 8
"""Upper bits of dither that a decoder subtracts."""


def exact_step(
    scale: Float32[Array, "..."],
    magnitude: int,
    dtype: Any,
    rows: Rows = totals.IN_XLA,
    precision: int | None = None,
) -> tuple[Float32[Array, "..."], Float32[Array, "..."]]:
    """The step of each bucket such that code × step is exact in `dtype`, and its factor.

    The step is `scale / magnitude`, rounded up to so few significant bits that a product with a
    code is exact; so a sum of decoded values rounds only in its additions. An element times
    `2²⁰ / step` is its position among the levels in fixed point, and no element within the scale
    is outside the levels; `points` computes that product from the factor. A scale that would need
    a step below the smallest normal number counts as zero, with step and factor zero. A non-finite
    scale gives a NaN step, so that the whole bucket decodes to NaN.
    """
    dtype = jnp.dtype(dtype)
    bits = significant(magnitude, dtype, precision)
    if rows.digits:
        return _step_of(scale, magnitude, dtype, rows, bits)
    # Compute it once per bucket: fused into the loop, it would be computed for each element.
    return _separate_step(magnitude, dtype, rows, bits)(scale)


@functools.lru_cache(maxsize=256)
def _separate_step(
    magnitude: int, dtype: Any, rows: Rows, bits: int
) -> Callable[[Array], tuple[Array, Array]]:
    return xla.in_few_shapes(lambda scale: _step_of(scale, magnitude, dtype, rows, bits))


def _step_of(
    scale: Array, magnitude: int, dtype: Any, rows: Rows, bits: int
) -> tuple[Array, Array]:
    mask = (1 << (24 - bits)) - 1
    raw = lax.bitcast_convert_type(scale * jnp.float32(1 / magnitude), jnp.int32)
    step = lax.bitcast_convert_type((raw + mask) & ~mask, jnp.float32)
    if dtype == jnp.float16:  # Its subnormal numbers are multiples of 2^-24.
        step = jnp.ceil(step * 2.0**24) * jnp.float32(2.0**-24)
    step = jnp.clip(step, _TINY, largest_step(magnitude, dtype, bits))
    finite = totals.is_finite(scale)
    usable = finite & (scale >= _TINY)
    low = step < LOW
    inverse = unit(low) * exact.reciprocal(step, rows.digits)
    factor = jnp.minimum(inverse, most(scale, magnitude, rows, low))
    factor = jnp.where(usable, mark_lift(factor, low), 0)
    return jnp.where(usable, step, jnp.where(finite, 0, jnp.nan)), factor


def points(x: Array, factor: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Elements in 2⁻²⁰ of a step, by the factor of their bucket."""
    lift = jnp.where(factor < 0, jnp.float32(2.0**LIFTED), jnp.float32(1))
    return (x.astype(jnp.float32) * lift) * jnp.abs(factor)


def unit(low: Array) -> Float32[Array, "..."]:
    """The points in a step: 2²⁰, or `2²⁰ / 2^LIFTED` where `low`."""
    return jnp.where(low, jnp.float32(2.0 ** (FRACTION - LIFTED)), jnp.float32(2.0**FRACTION))


def mark_lift(factor: Float32[Array, "..."], low: Array) -> Float32[Array, "..."]:
    """The factor for `points`: negative where `low`, which marks a factor without the lift."""
    return jnp.where(low, -factor, factor)


def most(
    scale: Float32[Array, "..."], magnitude: int, rows: Rows = totals.IN_XLA, low: Any = False
) -> Float32[Array, "..."]:
    """The factor that brings the scale to a little less than the last level, in points.

    So no rounding on the way leads beyond it: a clip of every element would cost a tenth of the
    whole encoding. Where `low`, without the lift.
    """
    down = jnp.where(scale > 1, jnp.float32(2.0**-4), jnp.float32(1))  # 1/2^127 would vanish.
    end = jnp.float32(magnitude * (1 - 2.0**-22)) * unit(low) * down
    return end * exact.reciprocal(scale * down, rows.digits)


def significant(magnitude: int, dtype: Any, precision: int | None = None) -> int:
    """Significant bits of a step whose product with every value is exact in `dtype`."""
    room = {"float16": 11, "bfloat16": 8}.get(jnp.dtype(dtype).name, 24)
    if precision is None:
        precision = magnitude.bit_length() if magnitude > 1 else 0
    return max(room - precision, 1)


def weighted_step(
    step: Float32[Array, "workers n ..."], weight: Float32[Array, " workers"], precision: int
) -> Float32[Array, "workers n ..."]:
    """`weight · step`, rounded so that code × step is exact again; zero for weight zero.

    Weighting each decoded value instead could round differently, because the compiler may or may
    not fuse that product with the sum. The relative error is at most 2⁻¹⁷ for 8 bits.
    """
    half, mask = (1 << precision) >> 1, (1 << precision) - 1
    weight = weight.reshape(-1, *(1,) * (step.ndim - 1))
    bits = lax.bitcast_convert_type(step * weight, jnp.int32)
    rounded = lax.bitcast_convert_type((bits + half) & ~mask, jnp.float32)
    return jnp.where(weight == 0, 0, rounded)


def largest_step(magnitude: int | float, dtype: Any, bits: int = 24) -> np.float32:
    """The largest step of `bits` significant bits whose product with every code is finite."""
    dtype = jnp.dtype(dtype)
    top = float(jnp.finfo(dtype).max if dtype.itemsize < 4 else np.finfo(np.float32).max)
    # The reciprocal of a larger step than 2^126 flushes to zero; elements beyond saturate.
    mantissa, exponent = np.frexp(min(top / magnitude, 2.0**126))
    return np.float32(np.floor(mantissa * 2**bits) * 2.0 ** (int(exponent) - bits))

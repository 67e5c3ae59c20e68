"""Scales: the size of a bucket, by which its elements are divided before rounding.

Each scale maps `x: [n, size]` with `count: [n, 1]` real elements (the rest are zeros) to one
float32 per bucket, `[n, 1]`; `rows` selects the method of reduction, and changes no bit of the
result. Scales avoid overflow and underflow, an empty or zero bucket has scale zero, and a
non-finite element makes its bucket's scale non-finite.
"""

import abc
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxcomp import checks
from jaxcomp.backend import blocking
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import exact
from jaxcomp.quantize import power, totals
from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array

_LARGEST = float(np.finfo(np.float32).max)


class Scale(Interface, abstract=True):
    """A frozen dataclass that maps buckets and their counts to one float32 per bucket.

    Attributes:
        covers: whether no element is ever larger than the scale.
    """

    covers: bool

    @abc.abstractmethod
    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        """The scale of each bucket."""


def _passes(scale: Callable[..., Array]) -> Callable[..., Array]:
    """Runs a scale that reads its rows several times in parts that fit a CPU's cache."""

    @functools.wraps(scale)
    def call(self: Any, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Array:
        if not rows.staged or rows.segments is not None:
            return scale(self, x, count, rows)
        return blocking.in_turn(lambda x, count: scale(self, x, count, rows), x, count)

    return call


@dataclasses.dataclass(frozen=True)
class MaxAbs(Scale):
    """The largest absolute value of each bucket."""

    covers = True

    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        return totals.max_abs(x, rows)


@dataclasses.dataclass(frozen=True)
class Fixed(Scale):
    """The same scale for every bucket that has an element other than zero.

    All who encode with it have the same steps without agreeing on them first. Larger elements are
    clipped; with a `Residual` the rest of them is sent later.

    Args:
        size: the scale, in units of the elements.

    Raises:
        ValueError: for a size that is not positive, or no float32.
    """

    size: float
    covers = False

    def __post_init__(self):
        checks.positive("size", self.size)
        if not 2.0**-126 <= self.size <= _LARGEST:
            raise ValueError(f"`size` must be a normal float32, got {self.size}")

    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        return jnp.where(totals.is_finite(top) & (top > 0), jnp.float32(self.size), top)


@dataclasses.dataclass(frozen=True)
class WideMax(Scale):
    """The largest absolute value of each bucket multiplied by a factor, at most the largest float.

    With unbiased rounding to few levels it makes codes sparse: of ternary ones, at most one in
    `times` is not zero.

    Args:
        times: the factor, at least 1.
    """

    times: int | float
    covers = True

    def __post_init__(self):
        checks.number("times", self.times, 1.0)

    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        wide = jnp.minimum(top * jnp.float32(self.times), _LARGEST)
        return jnp.where(totals.is_finite(top), wide, top)


@dataclasses.dataclass(frozen=True)
class L2(Scale):
    """The Euclidean norm of each bucket, at most the largest float32."""

    covers = True

    @_passes
    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        ratio = totals.unit(
            x, top, rows
        )  # Squares of tiny values underflow, of large ones overflow.
        # The total is rounded, and a norm below the largest element would make it saturate.
        length = jnp.maximum(exact.sqrt(totals.total(ratio * ratio, rows), rows.digits), 1)
        return jnp.where(totals.is_finite(top), jnp.minimum(top * length, _LARGEST), top)


@dataclasses.dataclass(frozen=True)
class RootMeanSquare(Scale):
    """The root mean square of the real elements of each bucket, multiplied by a factor.

    Args:
        times: a factor, such as the largest level in units of the standard deviation.
    """

    times: int | float = 1.0
    covers = False

    def __post_init__(self):
        checks.positive("times", self.times)

    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        norm = L2()(x, count, rows)
        share = jnp.float32(self.times) * exact.sqrt(_share(count, rows), rows.digits)
        return jnp.where(totals.is_finite(norm), jnp.minimum(norm * share, _LARGEST), norm)


def clipping(clipped: float) -> RootMeanSquare:
    """The scale that a given fraction of Gaussian elements exceeds.

    Args:
        clipped: the fraction, above 0 and below 1.

    Raises:
        ValueError: for another fraction.

    Example:
        >>> clipping(1 / 32)
        RootMeanSquare(times=2.153875)
    """
    checks.number("clipped", clipped, 0.0, 1.0)
    if clipped in (0, 1):
        raise ValueError(f"`clipped` must be a number in (0, 1), got {clipped}")
    end = statistics.NormalDist().inv_cdf(1 - clipped / 2)
    return RootMeanSquare(times=round(end, 6))  # Alike on all machines.


def for_steps(steps: int, alpha: int | float) -> RootMeanSquare:
    """The scale of `steps` steps, each of `√2 / alpha` root mean squares.

    Raises:
        ValueError: for an `alpha` that is not positive.

    Example:
        >>> round(for_steps(steps=31, alpha=1.0).times, 3)
        43.841
    """
    checks.positive("alpha", alpha)
    return RootMeanSquare(times=steps * math.sqrt(2) / alpha)


@dataclasses.dataclass(frozen=True)
class PNorm(Scale):
    """The p-norm `(Σ|xᵢ|ᵖ)^(1/p)` of each bucket, for any `p ≥ 1`.

    Args:
        p: the exponent; for 2 and infinity, `L2()` and `MaxAbs()` are faster.
    """

    p: int | float = 1.0
    covers = True

    def __post_init__(self):
        checks.number("p", self.p, 1.0)

    @_passes
    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        ratio = jnp.abs(totals.unit(x, top, rows))
        total = totals.total(
            ratio if self.p == 1 else power.power(ratio, self.p, rows.digits), rows
        )
        total = total if self.p == 1 else power.power(total, 1 / self.p, rows.digits)
        length = jnp.maximum(total, 1)
        return jnp.where(totals.is_finite(top), jnp.minimum(top * length, _LARGEST), top)


@dataclasses.dataclass(frozen=True)
class MeanAbs(Scale):
    """The mean absolute value of the real elements of each bucket, multiplied by a factor.

    Args:
        times: a factor.
    """

    times: int | float = 1.0
    covers = False

    def __post_init__(self):
        checks.positive("times", self.times)

    @_passes
    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        mean = totals.total(jnp.abs(totals.unit(x, top, rows)), rows) * _share(count, rows)
        mean = mean if self.times == 1 else jnp.minimum(mean * jnp.float32(self.times), 1)
        return jnp.where(totals.is_finite(top), top * mean, top)


@dataclasses.dataclass(frozen=True)
class ClippedMax(Scale):
    """The largest absolute value after clipping at `sigmas` standard deviations.

    The deviation is the population's, about the mean, over the real elements of each bucket. The
    clip is never below the mean, because a constant bucket, whose deviation is zero, would
    otherwise become zero.

    Args:
        sigmas: the clip, in standard deviations.
        at_most_max: True returns the largest element if it is below the clip; False always returns
            the clip.
    """

    sigmas: float = 2.5
    at_most_max: bool = True
    covers = False

    def __post_init__(self):
        checks.positive("sigmas", self.sigmas)

    @_passes
    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        ratio = totals.unit(x, top, rows)
        share = _share(count, rows)
        mean = totals.total(ratio, rows) * share
        # Centred first, since the difference of two means of squares would cancel; in integers,
        # since a float difference of a product may be fused with it.
        one = jnp.float32(2**totals.FRACTION)
        middle = (mean * one).astype(jnp.int32)
        off = ((ratio * one).astype(jnp.int32) - middle).astype(jnp.float32)
        centred = jnp.where(
            totals.real(x, count, rows), off * jnp.float32(0.5 / 2**totals.FRACTION), 0
        )
        deviation = 2 * exact.sqrt(totals.total(centred * centred, rows) * share, rows.digits)
        clip = jnp.maximum(jnp.float32(self.sigmas) * deviation, jnp.abs(mean))
        clip = jnp.minimum(clip, 1) if self.at_most_max else clip
        return jnp.where(totals.is_finite(top), jnp.minimum(top * clip, _LARGEST), top)


def _share(count: Array, rows: Rows) -> Float32[Array, "n 1"]:
    """`1 / count`, to multiply by."""
    return exact.reciprocal(jnp.maximum(count, 1).astype(jnp.float32), rows.digits)

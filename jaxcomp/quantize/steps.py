"""Wire formats of the step of a bucket, or of a block within it: 32 bits, or eight.

Each format maps scales to the steps that the decoder will see, and to the factors that convert
elements to points (2⁻²⁰ of a step), for any shape of scales; the last axis has the blocks of one
bucket.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32

from jaxcomp import checks
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import exact, noise
from jaxcomp.quantize import rounding, totals
from jaxcomp.quantize.levels import FRACTION, Float, Levels
from jaxcomp.types import Array

_TINY = float(np.finfo(np.float32).tiny)
_NOISE = 1 << 31
"""Position of the noise of block 0's step, which no element of a bucket reaches."""


class Derived(NamedTuple):
    """Steps as the decoder will see them, factors for `rounding.points`, and the sent arrays."""

    step: Float32[Array, "n blocks"]
    factor: Float32[Array, "n blocks"]
    sent: tuple[Array, ...]


class Steps(Interface, abstract=True):
    """A frozen dataclass that defines how steps are rounded and sent.

    Attributes:
        covers: whether the largest level is never below the scale.
        unbiased: whether elements stay unbiased if their rounding is, and nothing is clipped.
    """

    covers: bool
    unbiased: bool

    @abc.abstractmethod
    def bits(self, blocks: int) -> float:
        """Bits of the steps of a bucket of this many blocks."""

    @abc.abstractmethod
    def derive(
        self, scale: Float32[Array, "n blocks"], levels: Levels, dtype: Any, high: Array, low: Array
    ) -> Derived:
        """Steps, factors and the sent arrays; `high, low: [n, 1]` are the seeds of the noise."""

    @abc.abstractmethod
    def received(self, sent: tuple[Array, ...]) -> Float32[Array, "... n blocks"]:
        """The steps, from the sent arrays."""


@dataclasses.dataclass(frozen=True)
class Exact(Steps):
    """32 bits, rounded up to so few significant bits that products with codes are exact."""

    covers = True
    unbiased = True

    def bits(self, blocks: int) -> float:
        return 32.0 * blocks

    def derive(
        self, scale: Float32[Array, "n blocks"], levels: Levels, dtype: Any, high: Array, low: Array
    ) -> Derived:
        del high, low
        most, precision = levels.magnitude, levels.precision
        step, factor = rounding.exact_step(scale, most, dtype, precision=precision)
        return Derived(step, factor, (step,))

    def received(self, sent: tuple[Array, ...]) -> Float32[Array, "... n blocks"]:
        return sent[0]


@dataclasses.dataclass(frozen=True)
class PowerOfTwo(Steps):
    """A power of two `2ᵏ` in eight bits (E8M0).

    `k` is the difference of `⌊log₂⌋` of the scale and of the largest level, or with "ceil" the
    smallest `k` that covers the scale.

    Args:
        rule: "floor" keeps the exponent of the scale, so that an element whose mantissa exceeds
            that of the largest level is clipped; "even" rounds the mantissa to that of the levels
            first; "ceil" never clips; "stochastic" rounds the step up or down at random so that
            its expectation is exact (natural compression), and divides elements by the exact step.

    References:
        Rouhani et al., `Microscaling data formats for deep learning
        <https://arxiv.org/abs/2310.10537>`_, 2023 ("floor"); Horváth et al., `Natural compression
        for distributed deep learning <https://arxiv.org/abs/1905.10988>`_, 2019 ("stochastic").

    Note:
        The byte 0 is a step of zero, for a block of zeros; 255 is NaN. Steps are at least 2⁻¹²⁶,
        the smallest float32 that a CPU does not flush to zero.
    """

    rule: str = "floor"

    def __post_init__(self):
        checks.choice("rule", self.rule, ("floor", "even", "ceil", "stochastic"))

    @property
    def covers(self) -> bool:
        return self.rule in ("ceil", "stochastic")

    @property
    def unbiased(self) -> bool:
        return self.covers

    def bits(self, blocks: int) -> float:
        return 8.0 * blocks

    def derive(
        self, scale: Float32[Array, "n blocks"], levels: Levels, dtype: Any, high: Array, low: Array
    ) -> Derived:
        size = lax.bitcast_convert_type(scale, jnp.int32)
        most = int(np.float32(levels.magnitude).view(np.int32))
        if self.rule == "ceil":
            power = (size - most + (2**23 - 1)) >> 23
        elif self.rule == "stochastic":
            exactly, factor = rounding.exact_step(scale, levels.magnitude, jnp.float32, precision=0)
            number = jnp.arange(scale.shape[1], dtype=jnp.uint32)[None] + jnp.uint32(_NOISE)
            chance = (noise.at(high, low, number) >> 9).astype(jnp.int32)
            power = ((lax.bitcast_convert_type(exactly, jnp.int32) + chance) >> 23) - 127
        else:
            half = 1 << (22 - max(levels.precision - 1, 0)) if self.rule == "even" else 0
            power = ((size + half) >> 23) - (most >> 23)
        power = jnp.clip(power, *_powers(levels.magnitude, dtype))
        if self.rule != "stochastic":
            low = power < FRACTION - 126
            exponent = FRACTION - power - jnp.where(low, rounding.LIFTED, 0)
            factor = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
            if self.covers:  # Also where the largest float limits it.
                factor = jnp.minimum(factor, rounding.most(scale, levels.magnitude, low=low))
            factor = rounding.mark_lift(factor, low)
        finite = totals.is_finite(scale)
        usable = finite & (scale >= _TINY)
        byte = jnp.where(usable, power + 127, jnp.where(finite, 0, 255)).astype(jnp.uint8)
        step = self.received((byte,))
        return Derived(step, jnp.where(usable, factor, 0), (byte,))

    def received(self, sent: tuple[Array, ...]) -> Float32[Array, "... n blocks"]:
        byte = sent[0].astype(jnp.int32)
        step = lax.bitcast_convert_type(byte << 23, jnp.float32)
        return jnp.where(byte == 255, jnp.nan, step)


@dataclasses.dataclass(frozen=True)
class TwoLevel(Steps):
    """Eight bits per block (FP8 E4M3) as multiples of one float32 per bucket.

    References:
        NVIDIA, Pretraining large language models with NVFP4, 2025.

    Note:
        The float32 belongs to the bucket, where NVFP4 has one per tensor; a block's step is rounded
        to nearest, so that its largest element may be clipped.
    """

    covers = False
    unbiased = False

    def bits(self, blocks: int) -> float:
        return 8.0 * blocks + 32

    def derive(
        self, scale: Float32[Array, "n blocks"], levels: Levels, dtype: Any, high: Array, low: Array
    ) -> Derived:
        del high, low
        top, most = totals.max_abs(scale), levels.magnitude * _E4M3.magnitude
        precision = levels.precision + _E4M3.precision
        unit, factor = rounding.exact_step(top, most, dtype, precision=precision)
        points = rounding.points(scale, factor * jnp.float32(1 / levels.magnitude))
        codes = _E4M3.codes(points, jnp.int32(1 << (FRACTION - 1)))
        sent = (codes.astype(jnp.uint8), unit[..., 0])
        step = self.received(sent)
        usable = step >= _TINY
        low = step < rounding.LOW
        inverse = exact.reciprocal(jnp.where(usable, step, 1)) * rounding.unit(low)
        factor = rounding.mark_lift(inverse, low)
        return Derived(step, jnp.where(usable, factor, 0), sent)

    def received(self, sent: tuple[Array, ...]) -> Float32[Array, "... n blocks"]:
        codes, unit = sent
        return _E4M3.values(codes.astype(jnp.uint32)) * unit[..., None]


_E4M3 = Float(positive=126, mantissa=3)


def _powers(magnitude: int, dtype: Any) -> tuple[int, int]:
    """Exponents of the smallest step, and of the largest that no level brings beyond the dtype."""
    dtype = jnp.dtype(dtype)
    largest = float(min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max)))
    smallest = -24 if dtype == jnp.float16 else -126
    return smallest, min(int(np.floor(np.log2(largest / magnitude))), 126)

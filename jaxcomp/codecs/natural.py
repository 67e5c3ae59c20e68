"""Natural compression: each element as a sign and a power of two."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32, UInt8, UInt32

from jaxcomp import bits, checks
from jaxcomp.base import Codec, Facts
from jaxcomp.numerics import noise
from jaxcomp.quantize import totals
from jaxcomp.theory import worst_case
from jaxcomp.types import Array, ArrayLike, Key

_MANTISSA = 23
_NORMAL = 1 << _MANTISSA


class NaturalPayload(NamedTuple):
    """Signs and exponents, packed."""

    words: UInt32[Array, "n words"]


class TopPayload(NamedTuple):
    """Packed signs and exponents relative to the bucket's top exponent, and that exponent."""

    words: UInt32[Array, "n words"]
    tops: UInt8[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Natural(Codec):
    """Rounds each element to one of the two nearest `±2ᵏ`; below 2⁻¹²⁶ to zero.

    Args:
        bits: 9 for a sign and a full exponent; 8 for a sign and one of the 127 exponents up to the
            bucket's largest, which is sent once a bucket. Smaller elements become zero.
        unbiased: True rounds up or down at random so that the expectation is the element; False
            rounds to the nearer power.
        bucket_size: elements in a bucket; it matters only for `bits=8`.
    """

    bits: int = 9
    unbiased: bool = True
    bucket_size: int | None = 512

    def __post_init__(self):
        checks.choice("bits", self.bits, (9, 8))
        checks.bucket_size(self.bucket_size)

    @functools.cached_property
    def facts(self) -> Facts:
        claim = float(self.bits)
        if self.bucket_size is not None:
            words = 32 * bits.words(self.bucket_size, self.bits)
            claim = (words + (8 if self.bits == 8 else 0)) / self.bucket_size
        return Facts(bits_per_element=claim)

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """`ω` with `E‖x̂ − x‖² ≤ ω‖x‖²`: 1/8, attained by elements of 4/3 of a power of two."""
        del size, peak
        return worst_case.NATURAL_COMPRESSION if self.unbiased and self.bits == 9 else None

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[Any, tuple]:
        del count
        words = noise.rows(key.own, key.first, x.shape)
        chance = noise.at(*words) >> 9 if self.unbiased else _NORMAL >> 1
        _, largest = np.frexp(float(jnp.finfo(x.dtype).max))
        field = exponents(x.astype(jnp.float32), chance, min(int(largest) + 126, 254))
        negative = (x < 0).astype(jnp.uint32) << (self.bits - 1)
        if self.bits == 9:
            return NaturalPayload(bits.pack(negative | field.astype(jnp.uint32), bits=9)), state
        top = jnp.max(field, axis=1, keepdims=True)
        below = jnp.where(field > 0, jnp.maximum(field - top + 127, 0), 0)
        words = bits.pack(negative | below.astype(jnp.uint32), bits=8)
        return TopPayload(words, top[:, 0].astype(jnp.uint8)), state

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        del key, side
        codes = bits.unpack(payload.words, bits=self.bits, size=like.shape[1])
        field = (codes & (2 ** (self.bits - 1) - 1)).astype(jnp.int32)
        if self.bits == 8:
            top = payload.tops.astype(jnp.int32)[:, None]
            field = jnp.where(field > 0, jnp.maximum(field + top - 127, 0), 0)
            field = jnp.where(top == 255, 255, field)
        sign = (codes >> (self.bits - 1)).astype(jnp.int32) << 31
        value = lax.bitcast_convert_type(sign | (field << _MANTISSA), jnp.float32)
        return jnp.where(field == 255, jnp.nan, value).astype(like.dtype)


def exponents(x: Float32[Array, "..."], chance: Any, largest: int = 254) -> Int32[Array, "..."]:
    """The biased exponent of the power of two that each `|x|` becomes; 0 for zero, 255 for NaN.

    The mantissa is the probability of the upper power: adding a random mantissa carries into the
    exponent with that probability.

    Args:
        x: float32 of any shape.
        chance: integers below 2²³, random for unbiased rounding.
        largest: the largest exponent for finite elements.
    """
    size = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    carried = (size + jnp.asarray(chance).astype(jnp.int32)) >> _MANTISSA
    field = jnp.where(size < _NORMAL, 0, jnp.minimum(carried, largest))
    return jnp.where(totals.is_finite(x), field, 255)

"""The cast: each element in a narrower float, scaled if the narrow range is too small."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp import checks
from jaxcomp.base import Codec, Facts
from jaxcomp.numerics import addition
from jaxcomp.quantize import totals
from jaxcomp.types import Array, ArrayLike, Key

_WIDE = ("float32", "bfloat16")
_NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")


class CastPayload(NamedTuple):
    """Values in the narrow dtype."""

    values: Array


class ScaledCastPayload(NamedTuple):
    """Values in the narrow dtype, and each bucket's divisor, a power of two."""

    values: Array
    scales: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Rounds each element to the nearest value of a narrower dtype.

    bfloat16 has the range of float32. The other narrow dtypes do not, so each bucket is first
    divided by a power of two that brings its largest element just below the largest value of the
    dtype: neither 1e30 nor 1e-30 overflows or vanishes. Scales are float32: elements of a float64
    gradient above 3.4e38 become 3.4e38 with "float32" and "bfloat16", and infinite otherwise.

    Args:
        dtype: "float32", "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2".
        bucket_size: the number of elements that share a power of two; None for one power a leaf.
    """

    dtype: str
    bucket_size: int | None = 512

    def __post_init__(self):
        checks.choice("dtype", self.dtype, _WIDE + _NARROW)
        checks.bucket_size(self.bucket_size)

    @property
    def unbiased(self) -> bool:
        """True for "float32", which holds all supported dtypes except float64 exactly."""
        return self.dtype == "float32"

    @functools.cached_property
    def facts(self) -> Facts:
        width = float(8 * jnp.dtype(self.dtype).itemsize)
        if self.dtype in _NARROW and self.bucket_size is not None:
            width += 32 / self.bucket_size  # The scale.
        return Facts(bits_per_element=width)

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[Any, tuple]:
        del key, count
        if self.dtype in _WIDE:
            return CastPayload(addition.saturate(x, self.dtype)), state
        scale = _power_of_two(totals.max_abs(x), self.dtype)
        values = (x.astype(jnp.float32) * (1 / scale)).astype(self.dtype)
        return ScaledCastPayload(values, scale[:, 0]), state

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        del key, side
        values = addition.widen(payload.values)
        if isinstance(payload, ScaledCastPayload):
            # Rounding up the largest floats would leave the range; non-finite values are kept.
            largest = jnp.finfo(jnp.float32).max
            scaled = jnp.clip(values * payload.scales[:, None], -largest, largest)
            values = jnp.where(jnp.isfinite(values), scaled, values)
        return addition.saturate(values, like.dtype)


def _power_of_two(top: Array, dtype: str) -> Array:
    """The power of two that brings `top` into the highest binade inside the dtype's range."""
    _, exponent = np.frexp(float(jnp.finfo(dtype).max))
    field = (lax.bitcast_convert_type(top, jnp.int32) >> 23) - (int(exponent) - 2)
    # The scale and its reciprocal stay normal numbers; NaN and Inf are kept in the values.
    return lax.bitcast_convert_type(jnp.clip(field, 1, 253) << 23, jnp.float32)

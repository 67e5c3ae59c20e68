"""Logarithms and powers of two that round the same way on every machine.

A library's `log` and `exp` differ from one machine to the next, and what is sent must not. These
are made of products, of which none is next to a sum, and of integers.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32

from jaxcomp.backend import xla
from jaxcomp.types import Array

FRACTION = 12
"""Bits behind the point of `log2_fixed`."""

_DIGITS = 20


def log2_fixed(x: Float32[Array, "..."]) -> Int32[Array, "..."]:
    """`log₂ x` of positive normal numbers in 2⁻¹², off by at most 0.0008.

    Example:
        >>> log2_fixed(jnp.float32(8.0))
        Array(12288, dtype=int32)
    """
    word = lax.bitcast_convert_type(x, jnp.int32)
    part = (word & 0x7FFFFF) >> 11  # In 2^-12.
    rest = part * (4096 - part) >> 12
    # log2(1 + t) = t + t (1 - t) (a - b t + c t²), least squares over a uniform t.
    bend = 1794 - ((969 - (329 * part >> 12)) * part >> 12)
    return (((word >> 23) - 127) << FRACTION) + part + (rest * bend >> 12)


@xla.compile_separately
def log2(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`log₂ x` of positive normal numbers, to about 2⁻¹⁸, digit by digit: for few numbers.

    Example:
        >>> log2(jnp.float32(0.125))
        Array(-3., dtype=float32)
    """
    word = lax.bitcast_convert_type(x, jnp.int32)
    mantissa = lax.bitcast_convert_type((word & 0x7FFFFF) | 0x3F800000, jnp.float32)
    digits = jnp.zeros_like(word)
    for _ in range(_DIGITS):
        mantissa = mantissa * mantissa
        one = mantissa >= 2
        mantissa = jnp.where(one, mantissa * 0.5, mantissa)
        digits = (digits << 1) | one.astype(jnp.int32)
    whole = ((word >> 23) - 127).astype(jnp.float32)
    return whole + digits.astype(jnp.float32) * jnp.float32(2.0**-_DIGITS)


@xla.compile_separately
def exp2(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`2ˣ` for `x` from -126 to 127, to about 1e-5: for few numbers.

    Example:
        >>> exp2(jnp.float32(-2.0))
        Array(0.25, dtype=float32)
    """
    fixed = (jnp.clip(x, -126, 127) * jnp.float32(2**16)).astype(jnp.int32)
    result = lax.bitcast_convert_type(((fixed >> 16) + 127) << 23, jnp.float32)
    for digit in range(16):
        factor = jnp.float32(np.exp2(2.0 ** (digit - 16)))
        result = jnp.where((fixed >> digit) & 1 == 1, result * factor, result)
    return result

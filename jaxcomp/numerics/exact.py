"""Division and square root that round the same way on every machine.

A CPU rounds `1 / x` and `sqrt(x)` correctly; a GPU or TPU may be off by a few units in the last
place, and then one model would be quantised differently by different workers. These are built digit
by digit from integer operations, which have no such freedom; on a CPU its own instructions, which
give the same bits, take their place. A kernel on a GPU takes the instructions
that PTX defines as rounded to nearest, which Triton has no operation for.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32

from jaxcomp.backend import triton, xla
from jaxcomp.types import Array

Digits = bool | Literal["interpreted", "instruction"]
"""Whether to work by digits on every platform, as a kernel on a TPU does. "interpreted" is for an
interpreted kernel, whose result the compiler must keep out of loops over elements; "instruction"
takes a GPU's own, in a kernel.
"""

_HIDDEN = 1 << 23
_MANTISSA = _HIDDEN - 1
_DIGITS = 25
"""Digits of a quotient or root: those of a float32, and one to round by; a tie cannot occur."""


def reciprocal(x: Float32[Array, "..."], digits: Digits = False) -> Float32[Array, "..."]:
    """`1 / x` rounded to nearest, for normal `x > 0`; zero where that is below the normal numbers.

    Args:
        x: positive and normal; for other numbers the result means nothing.
        digits: whether to build it by digits on every platform.

    Example:
        >>> reciprocal(jnp.float32(3.0))
        Array(0.33333334, dtype=float32)
    """
    return _choose(lambda x: 1 / x, reciprocal_by_digits, reciprocal_on_gpu, x, digits)


def sqrt(x: Float32[Array, "..."], digits: Digits = False) -> Float32[Array, "..."]:
    """`√x` rounded to nearest, for `x` that is zero, or positive and normal.

    Example:
        >>> sqrt(jnp.float32(9.0))
        Array(3., dtype=float32)
    """
    return _choose(jnp.sqrt, sqrt_by_digits, sqrt_on_gpu, x, digits)


def reciprocal_by_digits(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`reciprocal` by long division."""
    exponent, mantissa = _parts(x)
    power = mantissa == _HIDDEN
    rest, quotient = jnp.full_like(mantissa, _HIDDEN), jnp.zeros_like(mantissa)
    for _ in range(_DIGITS):
        rest = rest << 1
        one = rest >= mantissa
        rest = jnp.where(one, rest - mantissa, rest)
        quotient = (quotient << 1) | one.astype(jnp.int32)
    field = jnp.where(power, 254, 253) - exponent
    fraction = jnp.where(power, 0, ((quotient + 1) >> 1) - _HIDDEN)
    bits = jnp.where(field > 0, (field << 23) + fraction, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def sqrt_by_digits(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`sqrt` one binary digit after another, as on paper."""
    exponent, mantissa = _parts(x)
    odd = exponent & 1  # The biased exponent: if it is odd, the number below is one bit shorter.
    head = jnp.where(odd == 1, mantissa >> 1, mantissa)
    next_pair = jnp.where(odd == 1, (mantissa & 1) << 1, 0)
    rest, root = jnp.zeros_like(mantissa), jnp.zeros_like(mantissa)
    for digit in range(_DIGITS):
        pair = (head >> (22 - 2 * digit)) & 3 if digit < 12 else next_pair if digit == 12 else 0
        rest, trial = (rest << 2) | pair, (root << 2) | 1
        one = rest >= trial
        rest = jnp.where(one, rest - trial, rest)
        root = (root << 1) | one.astype(jnp.int32)
    field = 150 + ((exponent - 174 + odd) >> 1)
    bits = jnp.where(exponent > 0, (field << 23) + ((root + 1) >> 1) - _HIDDEN, 0)
    return lax.bitcast_convert_type(bits, jnp.float32)


def reciprocal_on_gpu(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`reciprocal` by the instruction of a GPU that rounds to nearest, in a kernel."""
    return triton.instruction("rcp.rn.ftz.f32", x)


def sqrt_on_gpu(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`sqrt` by the instruction of a GPU that rounds to nearest, in a kernel."""
    return triton.instruction("sqrt.rn.ftz.f32", x)


def _parts(x: Array) -> tuple[Array, Array]:
    """The biased exponent, and the mantissa with its hidden bit."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23) & 0xFF, (bits & _MANTISSA) | _HIDDEN


def _choose(
    native: Callable[[Array], Array],
    by_digits: Callable[[Array], Array],
    on_gpu: Callable[[Array], Array],
    x: Array,
    digits: Digits,
) -> Array:
    if digits == "instruction":
        return on_gpu(x)
    if not digits:
        return lax.platform_dependent(x, cpu=native, default=by_digits)
    return xla.compile_separately(by_digits)(x) if digits == "interpreted" else by_digits(x)

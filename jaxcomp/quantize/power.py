"""Powers that round the same way on every machine: by products and square roots alone."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from jaxcomp.numerics import exact
from jaxcomp.types import Array

_BITS = 20
"""Binary digits of the exponent's fraction, a square root each."""


def power(
    x: Float32[Array, "..."], exponent: int | float, digits: exact.Digits = False
) -> Float32[Array, "..."]:
    """`x^exponent` for `x ≥ 0`, the exponent positive and rounded to a multiple of 2⁻²⁰.

    A library's `pow` differs from one machine to the next. With `digits` roots are taken by digits
    on every platform, as inside of a kernel.

    Example:
        >>> power(jnp.float32(4.0), 1.5)
        Array(8., dtype=float32)
    """
    whole, fraction = divmod(round(exponent * 2**_BITS), 2**_BITS)
    result, square = jnp.ones_like(x), x
    while whole:
        result = result * square if whole & 1 else result
        square, whole = square * square, whole >> 1
    root = jnp.where(x < np.finfo(np.float32).tiny, 0, x)
    while fraction:
        root, fraction = exact.sqrt(root, digits), 2 * fraction
        if fraction >= 2**_BITS:
            result, fraction = result * root, fraction - 2**_BITS
    return result

"""The step that fits given codes best.

A quantizer chooses codes with one step and may send another step, which makes the decoded bucket
unbiased, closest to the input, or of equal length.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32

from jaxcomp.backend import xla
from jaxcomp.numerics import exact
from jaxcomp.quantize import rounding, totals
from jaxcomp.quantize.levels import Levels
from jaxcomp.types import Array

FITS = (None, "unbiased", "least_squares", "norm")


def fit_step(
    fit: str, levels: Levels, values: Float32[Array, "n size"], x: Array, count: Array, dtype: Any
) -> Float32[Array, "n 1"]:
    """The step that fits the values `c` of the codes to the elements `x` of each bucket.

    "unbiased": `‖x‖² / ⟨c, x⟩`, with which a bucket that was rotated at random is unbiased;
    "least_squares": `⟨c, x⟩ / ‖c‖²`, the smallest error; "norm": `‖x‖ / ‖c‖`.

    Args:
        fit: one of these names.
        levels: the levels of the values.
        values: `[n, size]`, in steps.
        x: `[n, size]`.
        count: `[n, 1]`, the number of real elements of each bucket.
        dtype: the dtype in which code × step must be exact.

    References:
        Vargaftik et al., `EDEN: communication-efficient and robust distributed mean estimation for
        federated learning <https://arxiv.org/abs/2108.08842>`_, 2022.
    """
    real = lax.broadcasted_iota(jnp.int32, x.shape, 1) < count
    values = jnp.where(real, values * jnp.float32(1 / levels.magnitude), 0)
    top = totals.max_abs(x)
    unit = totals.unit(x, top)
    if fit == "unbiased":
        # Compile it separately: fused with the sum, a CPU's compiler vectorises neither.
        product = xla.compile_separately(lambda a, b: a * b)(unit, values)
        ratio = _divide(totals.total(unit * unit), totals.total(product))
    elif fit == "least_squares":
        ratio = _divide(totals.total(unit * values), totals.total(values * values))
    else:
        ratio = _divide(totals.total(unit * unit), totals.total(values * values))
        ratio = exact.sqrt(jnp.where(ratio >= jnp.finfo(jnp.float32).tiny, ratio, 0))
    step = ratio * jnp.float32(1 / levels.magnitude) * top
    # Round to nearest, so that there is no bias; elements beyond the levels do not matter here.
    spare = 24 - rounding.significant(levels.magnitude, dtype, levels.precision)
    word = lax.bitcast_convert_type(step, jnp.int32)
    step = lax.bitcast_convert_type((word + ((1 << spare) >> 1)) & ~((1 << spare) - 1), jnp.float32)
    step = jnp.minimum(step, rounding.largest_step(levels.magnitude, dtype))
    return jnp.where(totals.is_finite(top), step, jnp.nan)


def _divide(numerator: Array, denominator: Any) -> Array:
    """`numerator / denominator` of positive numbers; zero where the denominator vanishes."""
    usable = denominator >= 2.0**-60
    return jnp.where(usable, numerator * exact.reciprocal(jnp.where(usable, denominator, 1)), 0)

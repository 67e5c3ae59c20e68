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
from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array

FITS = (None, "unbiased", "least_squares", "norm")


def fit_step(
    fit: str | None,
    levels: Levels,
    values: Float32[Array, "n size"],
    x: Array,
    count: Array,
    dtype: Any,
    rows: Rows = totals.IN_XLA,
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
        rows: how to reduce them.

    References:
        Vargaftik et al., `EDEN: communication-efficient and robust distributed mean estimation for
        federated learning <https://arxiv.org/abs/2108.08842>`_, 2022.
    """
    real = lax.broadcasted_iota(jnp.int32, x.shape, 1) < count
    values = jnp.where(real, values * jnp.float32(1 / levels.magnitude), 0)
    top = totals.max_abs(x, rows)
    unit = totals.unit(x, top, rows)

    def ratio_of(numerator: Array, denominator: Array) -> Array:
        return _divide(totals.total(numerator, rows), totals.total(denominator, rows), rows)

    if fit == "unbiased":
        # Compile it separately: fused with the sum, a CPU's compiler vectorises neither.
        times = xla.compile_separately(lambda a, b: a * b) if rows.staged else jnp.multiply
        ratio = ratio_of(unit * unit, times(unit, values))
    elif fit == "least_squares":
        ratio = ratio_of(unit * values, values * values)
    else:
        ratio = ratio_of(unit * unit, values * values)
        usable = ratio >= jnp.finfo(jnp.float32).tiny
        ratio = exact.sqrt(jnp.where(usable, ratio, 0), rows.digits)
    step = ratio * jnp.float32(1 / levels.magnitude) * top
    # Round to nearest, so that there is no bias; elements beyond the levels do not matter here.
    spare = 24 - rounding.significant(levels.magnitude, dtype, levels.precision)
    word = lax.bitcast_convert_type(step, jnp.int32)
    step = lax.bitcast_convert_type((word + ((1 << spare) >> 1)) & ~((1 << spare) - 1), jnp.float32)
    step = jnp.minimum(step, rounding.largest_step(levels.magnitude, dtype))
    return jnp.where(totals.is_finite(top), step, jnp.nan)


def _divide(numerator: Array, denominator: Array, rows: Rows) -> Array:
    """`numerator / denominator` of positive numbers; zero where the denominator vanishes."""
    usable = denominator >= 2.0**-60
    inverse = exact.reciprocal(jnp.where(usable, denominator, 1), rows.digits)
    return jnp.where(usable, numerator * inverse, 0)

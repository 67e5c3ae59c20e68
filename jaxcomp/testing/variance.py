"""The variance of stochastic rounding, without sampling it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32

from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise
from jaxcomp.quantize.levels import FRACTION
from jaxcomp.quantize.rounding import Subtractive
from jaxcomp.types import Array


def exact_variance(codec: Quantizer, x: Array) -> Float32[Array, ""]:
    """The expected squared error of stochastic rounding, without sampling it.

    `Σ step² · (p − l)(u − p)` over the elements, `l ≤ p ≤ u` an element and the levels around
    it in steps (for subtracted dither, a twelfth of a squared spacing each); what clipping
    costs is added. Steps that are rounded at random are taken as drawn.

    Args:
        codec: a quantizer with stochastic rounding.
        x: an array of any shape; it is cut into buckets as `jaxcomp.encode` does.

    Raises:
        ValueError: if the rounding is not stochastic.
    """
    if not (codec.rounding.unbiased and codec.levels.dithers):
        raise ValueError(
            f"`rounding` must be stochastic, on `levels` that take dither, for a variance, got "
            f"{codec.rounding!r} and {codec.levels!r}; measure the error of a deterministic "
            "codec with `jaxcomp.roundtrip`"
        )
    return _variance(codec, x)


@functools.partial(jax.jit, static_argnums=0)
def _variance(codec: Quantizer, x: Array) -> Array:
    total = jnp.zeros((), jnp.float32)
    for number, batch in enumerate(trees.layout(codec, x).batches):
        rows = trees.stack(batch, jax.tree.leaves(x)).astype(jnp.float32)
        key = batches_.batch_key(noise.raw(0), number, 0)
        count = batch.counts()
        blocks, derived, *_ = codec._derive(key.own, key.first, rows, count, None)
        step = derived.step[..., None]
        real = (
            codec._in_blocks(lax.broadcasted_iota(jnp.int32, rows.shape, 1)) < count[:, None, None]
        )
        points = codec._points(blocks, derived.factor[..., None])
        lower, upper = (
            codec.levels.values(codec.levels.codes(points, jnp.full(points.shape, end)))
            for end in (jnp.int32(0), jnp.int32((1 << FRACTION) - 1))
        )
        inside = points * 2.0**-FRACTION
        variance = jnp.abs((inside - lower) * (upper - inside))
        if isinstance(codec.rounding, Subtractive):
            variance = jnp.full_like(variance, codec._spacing**2 / 12)
        variance = variance * step * step + (blocks - inside * step) ** 2
        total += jnp.sum(jnp.where(real, variance, 0))
    return total

"""Scales that depend on all elements of a bucket jointly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32

from jaxcomp import checks
from jaxcomp.numerics import exact
from jaxcomp.quantize import totals
from jaxcomp.quantize.scales import Scale
from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array


@dataclasses.dataclass(frozen=True)
class OptimalTernary(Scale):
    """The `α` of the ternary bucket `α · {−1, 0, 1}` closest to the elements.

    With magnitudes in falling order and `Sₖ` the sum of the first `k`, `k* = argmax Sₖ² / k` and
    `α = Sₖ* / k*`; elements above `α/2` are those `k*`. The error is `‖x‖² − Sₖ*² / k*`, at most
    `(1 − 1/Hₙ)‖x‖²` with the harmonic number of the size. Each bucket is sorted.
    """

    covers = False

    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        del count  # Zeros at the end of a bucket change no sum.
        n, size = x.shape
        if size == 0:
            return jnp.zeros((n, 1), jnp.float32)
        top = totals.max_abs(x, rows)
        one = jnp.float32(2**totals.FRACTION)
        falling = -jnp.sort(-(jnp.abs(totals.unit(x, top, rows)) * one).astype(jnp.int32), axis=1)
        added = _running_sums(falling) * jnp.float32(1 / 2**totals.FRACTION)
        share = jnp.asarray(1 / np.arange(1, size + 1), jnp.float32)[None]
        best = jnp.argmax(added * (added * share), axis=1)[:, None]
        mean = jnp.take_along_axis(added * share, best, axis=1)
        return jnp.where(totals.is_finite(top), top * mean, top)


@dataclasses.dataclass(frozen=True)
class Lattice(Scale):
    """A scale such that every element is a multiple of `scale / steps`, if there is one.

    The mean over `N` workers of ternary gradients with a shared scaler has elements `k · s/N` with
    `|k| ≤ N`; with `Lattice(N)` and `Uniform(N)` it is sent without loss. The scale is found from
    the smallest `j ≤ steps` for which all `x · j / max|x|` are integers; if there is none, it is
    the largest element.

    Args:
        steps: the largest number of steps for the largest element, 1 to 127.
    """

    steps: int
    covers = True

    def __post_init__(self):
        checks.integer("steps", self.steps, 1, 127)

    def __call__(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Float32[Array, "n 1"]:
        top = totals.max_abs(x, rows)
        ratio = jnp.abs(totals.unit(x, top, rows))
        found = jnp.full_like(top, self.steps)
        one = 1 << totals.FRACTION
        points = (ratio * jnp.float32(one)).astype(jnp.int32)
        # Outside a kernel, the program has the function once for all numbers.
        worst_of = _shared_farthest if rows.staged else _farthest
        for number in reversed(range(1, self.steps + 1)):
            worst = worst_of(points, jnp.int32(number), rows)
            found = jnp.where(worst < one * _ALIKE, jnp.float32(number), found)
        scale = top * (exact.reciprocal(found, rows.digits) * jnp.float32(self.steps))
        return jnp.where(totals.is_finite(top), jnp.minimum(scale, _LARGEST), top)


def _farthest(points: Int32[Array, "n size"], number: Array, rows: Rows) -> Float32[Array, "n 1"]:
    """The largest distance of `points · number` from an integer, in units of `2⁻ᶠ`."""
    one = 1 << totals.FRACTION
    off = (points * number + (one >> 1)) & (one - 1)
    return totals.max_abs((off - (one >> 1)).astype(jnp.float32), rows)


_shared_farthest = jax.jit(_farthest, static_argnums=2)

_LARGEST = float(np.finfo(np.float32).max)

_ALIKE = 0.003
"""The tolerance for an integer: other fractions of 127 parts are further off."""


def _running_sums(x: Int32[Array, "n size"]) -> Float32[Array, "n size"]:
    """Running sums of non-negative integers below 2²², in limbs that do not overflow."""
    width = max(31 - x.shape[1].bit_length(), 1)
    total = jnp.zeros(x.shape, jnp.float32)
    for place in reversed(range(-(-22 // width))):  # Powers of two: each product is exact.
        limb = (x >> (width * place)) & ((1 << width) - 1)
        added = lax.cumsum(limb, axis=1).astype(jnp.float32)
        total = total + added * jnp.float32(2.0 ** (width * place))
    return total

"""Distributions of magnitudes, and the threshold that a given fraction exceeds.

Each distribution is fitted in closed form, by moments, to the magnitudes above a level, and gives
the distance from the level to the threshold for a fraction `δ = exp(−nats)`. Moments are sums of
integers, and the formulas avoid a library's logarithm and products next to sums, so that every
platform finds the same threshold.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

from jaxcomp.backend.xla import block_fma
from jaxcomp.lazy import Lazy
from jaxcomp.numerics import exact
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize import totals
from jaxcomp.sparsify import selection
from jaxcomp.sparsify.logarithm import FRACTION, exp2, log2, log2_fixed
from jaxcomp.types import Array

special = Lazy("scipy.special")

_LOG2E = math.log2(math.e)
_LN2 = math.log(2)
_TINY = float(np.finfo(np.float32).tiny)
_SHAPES = (-4.0, 8.0, 256)
"""Bounds and number of the grid of log₂ of a gamma distribution's shape."""
_NATS = (0.0, 24.0, 192)
"""Bounds and number of the grid of `nats`."""


class Moments(NamedTuple):
    """The moments of the positive numbers of each leaf, or bucket.

    Attributes:
        unit: `[n, leaves]`, the largest number, the unit of the other moments.
        number: their count.
        mean: their mean.
        square: the mean of their squares.
        log: the mean of their natural logarithm, or zero if it is not needed.
    """

    unit: Array
    number: Array
    mean: Array
    square: Array
    log: Array


class Pieces(NamedTuple):
    """Combines reductions over pieces of leaves to one number per leaf.

    Attributes:
        leaves: the pieces of each leaf, as segments of width one; None for one leaf a row.
    """

    leaves: Segments | None

    def total(self, terms: Float32[Array, "n m"]) -> Float32[Array, "n leaves"]:
        """The sum of the terms of each leaf."""
        return self._over(totals.total, terms)

    def largest(self, terms: Float32[Array, "n m"]) -> Float32[Array, "n leaves"]:
        """The largest term of each leaf."""
        return self._over(totals.max_abs, terms)

    def count(self, numbers: Int32[Array, "n m"]) -> Int32[Array, "n leaves"]:
        """The sum of integers."""
        if self.leaves is None:
            return jnp.sum(numbers, axis=1, keepdims=True, dtype=jnp.int32)
        return self.leaves.total(numbers)

    def spread(self, values: Array) -> Array:
        """The value of each piece's leaf."""
        return values if self.leaves is None else self.leaves.per_row(values)

    def _over(self, reduce: Callable[..., Array], terms: Array) -> Array:
        if self.leaves is None:
            return reduce(terms)
        found = reduce(terms.reshape(-1, 1), totals.IN_XLA._replace(segments=self.leaves))
        return found.reshape(terms.shape)[:, jnp.asarray(self.leaves.begins)]


def moments(
    y: Float32[Array, "n m size"], pieces: Pieces = Pieces(None), *, log: bool = False
) -> Moments:
    """The moments of the positive numbers of each leaf, added up in `m` pieces.

    Each piece is measured by its own largest: of numbers far below the largest of a whole leaf,
    nothing would be left in fixed point.
    """
    n, m, size = y.shape
    parts = jnp.maximum(y, 0).reshape(n * m, size)
    top = totals.max_abs(parts)
    ratio = totals.unit(parts, top)
    unit = pieces.largest(top.reshape(n, m))
    found = selection.count((y > 0).reshape(n * m, size)).reshape(n, m)
    share = exact.reciprocal(jnp.maximum(pieces.count(found).astype(jnp.float32), 1))
    # One piece a row, as `totals.unit` divides each row by its own number.
    tops = jnp.broadcast_to(pieces.spread(unit), (n, m)).reshape(-1, 1)
    weight = totals.unit(top, tops).reshape(n, m)

    def mean(ratio: Array, weight: Array) -> Array:
        each = totals.total(ratio).reshape(n, m) * jnp.float32(1 / size)
        return pieces.total(each * weight) * (share * jnp.float32(size))

    return Moments(
        unit,
        pieces.count(found).astype(jnp.float32),
        mean(ratio, weight),
        mean(ratio * ratio, weight * weight),
        _mean_log(y, unit, pieces, share) if log else jnp.zeros_like(unit),
    )


def _mean_log(y: Array, unit: Array, pieces: Pieces, share: Array) -> Float32[Array, "n leaves"]:
    """The mean natural logarithm of the positive numbers, in units of the largest."""
    n, m, size = y.shape
    one = pieces.spread(log2_fixed(jnp.maximum(unit, _TINY)))[..., None]
    below = one - log2_fixed(jnp.maximum(y, _TINY))
    below = jnp.where(y > 0, jnp.maximum(below, 0), 0)
    room = jnp.float32(2.0**-20)  # Terms below 1: logarithms span 254, in 2^-12.
    terms = (below.astype(jnp.float32) * room).reshape(n * m, size)
    each = totals.total(terms).reshape(n, m) * jnp.float32(1 / size)
    total = pieces.total(each) * (share * jnp.float32(size))
    return -total * jnp.float32(2.0**20 / 2**FRACTION * _LN2)


def exponential(found: Moments, nats: Float32[Array, "n leaves"]) -> Float32[Array, "n leaves"]:
    """`β · nats` with `β` the mean, in units."""
    return found.mean * nats


def pareto(found: Moments, nats: Float32[Array, "n leaves"]) -> Float32[Array, "n leaves"]:
    """`β/α · (exp(α nats) − 1)` of the generalised Pareto distribution with `α = ½ (1 − μ²/σ²)` and
    `β = ½ μ (μ²/σ² + 1)`, in units.
    """
    squared = block_fma(found.mean * found.mean)
    spread = block_fma(found.square) - squared
    # Equal numbers have no variance: α is far below zero, and the distribution ends.
    ratio = block_fma(squared * exact.reciprocal(jnp.maximum(spread, squared * (1 / 16) + _TINY)))
    alpha = 0.5 * (1 - ratio)
    beta = 0.5 * block_fma(found.mean * (ratio + 1))
    grown = block_fma(alpha * nats)
    small = jnp.abs(alpha) < 1e-3
    size = jnp.where(small, 1, jnp.abs(alpha))
    curved = block_fma(exp2(grown * jnp.float32(_LOG2E))) - 1
    curved = jnp.sign(alpha) * curved * exact.reciprocal(size)
    straight = nats * block_fma(1 + 0.5 * grown)
    return beta * jnp.where(small, straight, curved)


def gamma(found: Moments, nats: Float32[Array, "n leaves"]) -> Float32[Array, "n leaves"]:
    """`β P⁻¹(α, 1 − δ)` of the gamma distribution with an approximate maximum-likelihood `α`."""
    shape, beta = _gamma_fit(found)
    return beta * _interpolate(_gamma_table(), log2(shape), nats) * nats


def gamma_approximate(
    found: Moments, nats: Float32[Array, "n leaves"]
) -> Float32[Array, "n leaves"]:
    """`β (nats − ln Γ(α))`, which holds for `α ≤ 1` and small `δ`."""
    shape, beta = _gamma_fit(found)
    table = special.gammaln(np.exp2(np.linspace(*_SHAPES)))[:, None]
    table = np.broadcast_to(table, (len(table), _NATS[2]))
    log_gamma = _interpolate(table, log2(shape), jnp.zeros_like(nats))
    return jnp.maximum(beta * (nats - block_fma(log_gamma)), 0)


LAWS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
    "exponential": (exponential, exponential),
    "pareto": (pareto, pareto),
    "gamma": (gamma, pareto),
    "gamma_approximate": (gamma_approximate, pareto),
}
"""The threshold functions of the first stage, and of further stages."""


def _gamma_fit(found: Moments) -> tuple[Array, Array]:
    """Shape and scale; `s = ln mean − mean ln`, `α = (3 − s + √((s − 3)² + 24 s)) / 12 s`."""
    mean = jnp.maximum(found.mean, _TINY)
    s = jnp.clip(block_fma(log2(mean) * jnp.float32(_LN2)) - block_fma(found.log), 2.0**-10, 16.0)
    root = exact.sqrt(block_fma((s - 3) * (s - 3)) + block_fma(24 * s))
    shape = (3 - s + root) * exact.reciprocal(12 * s)
    return shape, mean * exact.reciprocal(shape)


def _interpolate(table: np.ndarray, shape: Array, nats: Array) -> Float32[Array, "n leaves"]:
    """Between the four nearest entries of a table over the grids of shapes and nats."""
    (row, down), (column, right) = (_place(shape, _SHAPES), _place(nats, _NATS))
    entries = jnp.asarray(table, jnp.float32)

    def at(i: int, j: int) -> Array:
        return entries[row + i, column + j]

    upper = block_fma(at(0, 0) * (1 - right)) + block_fma(at(0, 1) * right)
    lower = block_fma(at(1, 0) * (1 - right)) + block_fma(at(1, 1) * right)
    return block_fma(upper * (1 - down)) + block_fma(lower * down)


def _place(x: Array, grid: tuple[float, float, int]) -> tuple[Array, Array]:
    low, high, number = grid
    place = jnp.clip((x - low) * jnp.float32((number - 1) / (high - low)), 0, number - 1)
    whole = jnp.minimum(place.astype(jnp.int32), number - 2)
    return whole, block_fma(place) - whole.astype(jnp.float32)


@functools.lru_cache
def _gamma_table() -> np.ndarray:
    """`P⁻¹(α, 1 − exp(−nats)) / nats`, which changes slowly."""
    shapes, nats = np.exp2(np.linspace(*_SHAPES))[:, None], np.maximum(np.linspace(*_NATS), 1e-3)
    return special.gammainccinv(shapes, np.exp(-nats)) / nats

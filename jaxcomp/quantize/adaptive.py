"""Adaptive levels: a histogram of the magnitudes, and the levels of least variance for it.

A magnitude is `r = |x| / scale` in `[0, 1]`. Unbiased rounding to its neighbours `l ≤ r ≤ l'` among
the levels has the variance `(r − l)(l' − r)`, so only the distribution of `r` matters. A histogram
stores it, with bins that follow the float format, 32 for each power of two; workers can add their
histograms. Inside a bin the density is uniform around the bin's mean, over the widest interval that
fits into the bin.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32

from jaxcomp import checks
from jaxcomp.types import Array

BINS = 512
"""Bins of a histogram: 32 in each of the 16 powers of two below 1; the first reaches down to 0."""

SAMPLES = 2**16
"""The most magnitudes that a histogram is built from; more are sampled at equal distances."""

SPACING = 2.0**-13
"""The smallest distance of two levels: they stay apart when rounded to multiples of 2⁻¹⁴."""

_SHIFT = 18  # Bits of a float32 that do not determine its bin.
_ROW = 32
_FIRST = int(np.float32(2.0**-16).view(np.int32)) >> _SHIFT
_EDGES = (np.arange(_FIRST, _FIRST + BINS + 1, dtype=np.int32) << _SHIFT).view(np.float32)
_EDGES[0] = 0
_MOST = round(1 / SPACING) - 1
_GRID = 64


class Histogram(NamedTuple):
    """The weight of each bin of the magnitudes; histograms of several workers can be added.

    Attributes:
        weight: `float32[BINS]`, the total weight of the magnitudes in each bin.
        moment: `float32[BINS]`, the sum of weight × magnitude, which says where in the bin it lies.
    """

    weight: Array
    moment: Array


def histogram(r: Array, weight: Array | None = None) -> Histogram:
    """Counts magnitudes into bins.

    ```
    weight[b] = Σ wᵢ [rᵢ in bin b]        moment[b] = Σ wᵢ rᵢ [rᵢ in bin b]
    ```

    Exact zeros are left out: every level set has a zero, so they are never rounded. So are
    magnitudes and weights that are not finite. A magnitude above 1 counts as 1.

    Args:
        r: `[n, size]`, magnitudes of the elements of each bucket, divided by the bucket's scale.
            If there are more than `SAMPLES`, they are read at equal distances.
        weight: `[n]`, the weight of each bucket, of any common scale that keeps the sums within
            float32: squared norms for the levels of least total variance (ALQ), None or ones for
            buckets that count alike (ALQ-N).

    Returns:
        A histogram of unnormalised weights.

    Raises:
        ValueError: if `r` is not a matrix, or `weight` has not one entry per bucket.

    Example:
        >>> made = histogram(jnp.array([[0.5, 0.0], [1.0, 0.5]]), jnp.array([2.0, 1.0]))
        >>> float(made.weight.sum()), float(made.moment.sum())
        (4.0, 2.5)
    """
    if r.ndim != 2:
        raise ValueError(f"`r` must have the shape [n, size], got {r.shape}")
    if weight is None:
        weight = jnp.ones(r.shape[:1], jnp.float32)
    if weight.shape != r.shape[:1]:
        raise ValueError(f"`weight` must have the shape {r.shape[:1]}, got {weight.shape}")
    stride = _stride(*r.shape)
    each = jnp.broadcast_to(weight.astype(jnp.float32)[:, None], r.shape).reshape(-1)[::stride]
    r = r.reshape(-1)[::stride].astype(jnp.float32)
    counts = (r > 0) & jnp.isfinite(r) & jnp.isfinite(each)
    each, r = jnp.where(counts, each, 0), jnp.where(counts, jnp.minimum(r, 1), 0)
    each, r = _short(each), _short(r)
    bins = (lax.bitcast_convert_type(r, jnp.int32) >> _SHIFT) - _FIRST
    bins = jnp.clip(bins, 0, BINS - 1)
    # An accelerator scatters floats in no stated order, or one by one; a CPU does it fastest.
    sums = lax.platform_dependent(bins, each, each * r, cpu=_scatter, default=_multiply)
    return Histogram(*sums)


def half_normal(size: int) -> Histogram:
    """The distribution of `|g| / ‖g‖₂` for a long Gaussian bucket, for the initial levels.

    `weight[b] = erf(v / (σ√2)) − erf(u / (σ√2))` for a bin `[u, v]`, with `σ = 1 / √size`.

    Args:
        size: elements of a bucket.

    Returns:
        A histogram of total weight 1, a constant for the compiler.

    Raises:
        ValueError: if `size` is not a positive integer.

    Example:
        >>> made = half_normal(512)
        >>> print(f"{float(made.weight.sum()):.4f}, {float(made.moment.sum()):.4f}")
        1.0000, 0.0353

    Note:
        The norm is taken as constant, and what a short bucket would have above 1 is left out.
    """
    checks.integer("size", size, 1)
    x = _EDGES.astype(np.float64) * math.sqrt(size / 2)
    below = np.array([math.erf(edge) for edge in x])
    weight = np.diff(below) / below[-1]
    moment = -np.diff(np.exp(-x * x)) * math.sqrt(2 / (math.pi * size)) / below[-1]
    return Histogram(jnp.asarray(weight, jnp.float32), jnp.asarray(moment, jnp.float32))


def variance(histogram: Histogram, levels: Float32[Array, " levels"]) -> Float32[Array, ""]:
    """The variance that unbiased rounding to these levels adds to a magnitude.

    `Ψ(l) = Σⱼ ∫_{lⱼ}^{lⱼ₊₁} (r − lⱼ)(lⱼ₊₁ − r) dF(r)`

    Args:
        histogram: the distribution `F`, of any total weight.
        levels: increasing, from 0 to 1.

    Returns:
        `Ψ`, in units of the scale squared; times the bucket size it is the error over `‖x‖²` where
        the scale is the Euclidean norm. Zero for an empty histogram.

    Raises:
        ValueError: if `levels` is not a vector of at least two.

    Example:
        >>> print(f"{512 * float(variance(half_normal(512), jnp.linspace(0, 1, 8))):.2f}")
        1.58
    """
    if levels.ndim != 1 or levels.shape[0] < 2:
        raise ValueError(f"`levels` must have the shape [2 or more], got {levels.shape}")
    low, high, share = (x[None, :] for x in _pieces(histogram))
    left, right = levels[:-1, None], levels[1:, None]
    a, b = jnp.clip(low, left, right), jnp.clip(high, left, right)
    inside = jnp.where(high > low, (b - a) / jnp.where(high > low, high - low, 1), 1)
    middle, half = (a + b) / 2, (b - a) / 2
    spread = (middle - left) * (right - middle) - half * half / 3
    return jnp.sum(share * inside * spread)


def alq(histogram: Histogram, interior: int, sweeps: int = 10) -> Float32[Array, " levels"]:
    """The levels of least variance, by coordinate descent (ALQ).

    A level between the neighbours `c` and `d` has its optimum in closed form,
    `l ← F⁻¹(F(d) − ∫_c^d (r − c) dF(r) / (d − c))`. A sweep moves every other level, then the
    rest. Of the results from several starts the best is taken.

    Args:
        histogram: the distribution `F`, of any total weight.
        interior: how many levels there are strictly between 0 and 1.
        sweeps: how often each level is moved.

    Returns:
        `[interior + 2]`, from 0 to 1, each at least `SPACING` above the one before. The powers of
        two for an empty histogram.

    Raises:
        ValueError: if `interior` is not a positive integer that leaves room for `SPACING`, or
            `sweeps` is not an integer of at least 0.

    Example:
        >>> [f"{level:.4f}" for level in alq(half_normal(512), interior=2)]
        ['0.0000', '0.0462', '0.1190', '1.0000']

    Note:
        Deviations: the histogram takes the place of the paper's truncated normal, whose mean and
        deviation are fitted to the data, so that heavy tails and many near-zeros are seen too;
        levels of one parity move together, which no level notices, since it depends on its
        neighbours only; levels stay `SPACING` apart; to the paper's starts (uniform, exponential,
        quantiles) one is added whose levels are as dense as the cube root of the density, the
        best for many levels: with 126 the others are still 6 to 55 times off after ten sweeps.

    References:
        Faghri et al., `Adaptive gradient quantization for data-parallel SGD
        <https://arxiv.org/abs/2010.12460>`_, 2020.
    """
    checks.integer("interior", interior, 1, _MOST)
    checks.integer("sweeps", sweeps, 0)
    tail = _tail(histogram)

    def half_sweep(turn: Array, levels: Array) -> Array:
        moves = (jnp.arange(interior) + turn) % 2 == 0
        return levels.at[1:-1].set(jnp.where(moves, _optimum(tail, levels), levels[1:-1]))

    starts = _starts(histogram, tail, interior)
    found = lax.fori_loop(0, 2 * sweeps, jax.vmap(half_sweep, (None, 0)), starts)
    return found[jnp.argmin(jax.vmap(variance, (None, 0))(histogram, found))]


def amq(histogram: Histogram, interior: int) -> Float32[Array, " levels"]:
    """The levels of least variance among `0, p^interior, …, p², p, 1` (AMQ).

    Args:
        histogram: the distribution `F`, of any total weight.
        interior: how many levels there are strictly between 0 and 1.

    Returns:
        `[interior + 2]`, from 0 to 1, each at least `SPACING` above the one before. Powers of two
        for an empty histogram, as far as `SPACING` allows.

    Raises:
        ValueError: if `interior` is not a positive integer that leaves room for `SPACING`.

    Example:
        >>> [f"{level:.3f}" for level in amq(half_normal(512), interior=2)]
        ['0.000', '0.060', '0.245', '1.000']

    Note:
        Deviations: the histogram takes the place of the truncated normal, as in `alq`; `p` is
        found on a grid, then on a finer one, where the paper descends the gradient from seven
        starts; the smallest power is at least `SPACING`, and levels that `p` would bring closer
        to each other than that are moved up.

    References:
        Faghri et al., `Adaptive gradient quantization for data-parallel SGD
        <https://arxiv.org/abs/2010.12460>`_, 2020.
    """
    checks.integer("interior", interior, 1, _MOST)
    place = np.arange(interior + 1, -1, -1)
    octaves = jnp.asarray(place / interior * math.log2(SPACING), jnp.float32)

    def powers(share: Array) -> Array:
        """The levels whose smallest is `SPACING ** share`."""
        return _apart(jnp.exp2(share * octaves).at[0].set(0))

    def best(shares: Array) -> Array:
        """The first of the level sets with the least variance."""
        cost = jax.vmap(lambda share: variance(histogram, powers(share)))(shares)
        return shares[jnp.argmin(cost)]

    # An empty histogram makes all variances equal; then the first stays: powers of two.
    half = jnp.full(1, min(interior / -math.log2(SPACING), 1), jnp.float32)
    grid = jnp.asarray(np.linspace(0, 1, _GRID + 1), jnp.float32)
    rough = best(jnp.concatenate([half, grid]))[None]
    return powers(best(jnp.concatenate([rough, jnp.clip(rough + (2 * grid - 1) / _GRID, 0, 1)])))


class _Tail(NamedTuple):
    """The tail of the distribution: the mass beyond each of the `points`, and its distance.

    Attributes:
        points: `[2 * BINS + 2]`, where the mass of a bin begins or ends; the first 0, the last 1.
        share: `P(r > point)`, linear in between.
        excess: `E max(r − point, 0)`, whose slope is `−share`.
    """

    points: Array
    share: Array
    excess: Array


def _tail(histogram: Histogram) -> _Tail:
    """Sums from above, so that the few large magnitudes keep their digits."""
    low, high, share = _pieces(histogram)
    end = jnp.zeros(1, jnp.float32)
    points = jnp.concatenate([end, jnp.stack([low, high], axis=1).reshape(-1), end + 1])
    beyond = jnp.repeat(_from_above(share), 2)
    return _Tail(points, beyond, _from_above((beyond[1:] + beyond[:-1]) / 2 * jnp.diff(points)))


def _from_above(x: Float32[Array, " n"]) -> Float32[Array, " ends"]:
    """The sum of all elements after each position, including both ends."""
    return jnp.append(lax.cumsum(x, reverse=True), jnp.float32(0))


def _optimum(tail: _Tail, levels: Float32[Array, " levels"]) -> Float32[Array, " interior"]:
    """The best position of each interior level; unchanged if all positions are equally good."""
    above = jnp.clip(_beyond(tail.points, levels), 1, tail.points.shape[0] - 1)
    left = tail.points[above] - levels
    part = left * _inverse(tail.points[above] - tail.points[above - 1])
    share = tail.share[above] + (tail.share[above - 1] - tail.share[above]) * part
    excess = tail.excess[above] + left * (tail.share[above] + share) / 2
    c, d = levels[:-2], levels[2:]
    # By parts, F(d) − ∫(r − c)dF / (d − c) is 1 less the mean share beyond r in [c, d].
    best = _quantile(tail.points, tail.share, (excess[:-2] - excess[2:]) / (d - c))
    best = jnp.clip(best, c + SPACING, d - SPACING)
    return jnp.where(share[:-2] > share[2:], best, levels[1:-1])


def _quantile(
    points: Float32[Array, " points"], beyond: Float32[Array, " points"], share: Array
) -> Float32[Array, " n"]:
    """The points beyond which these fractions of the mass lie, from the mass beyond each point."""
    below = jnp.clip(_beyond(-beyond, -share), 1, points.shape[0] - 1)
    part = (share - beyond[below]) * _inverse(beyond[below - 1] - beyond[below])
    return points[below] - part * (points[below] - points[below - 1])


def _starts(histogram: Histogram, tail: _Tail, interior: int) -> Float32[Array, "starts levels"]:
    """The starts of `alq`: exponential, uniform, quantiles, and companded."""
    even = np.linspace(0, 1, interior + 2, dtype=np.float32)
    halves = np.exp2(np.arange(-interior - 1, 1, dtype=np.float32))
    quantiles = _quantile(tail.points, tail.share, tail.share[0] * (1 - even))
    # For dense levels the variance is ∫ gap² dF / 6, least if gap ∝ density^(−1/3).
    width = np.diff(_EDGES)
    roots = _from_above(jnp.cbrt(_pieces(histogram)[2] / width) * width)
    companded = _quantile(jnp.asarray(_EDGES), roots, roots[0] * (1 - even))
    starts = jnp.stack([jnp.asarray(halves), jnp.asarray(even), quantiles, companded])
    return jax.vmap(_apart)(starts.at[:, 0].set(0).at[:, -1].set(1))


def _apart(levels: Float32[Array, " levels"]) -> Float32[Array, " levels"]:
    """Levels from 0 to 1 in order, each moved up, or below 1, until `SPACING` lies between."""
    least = jnp.arange(levels.shape[0], dtype=jnp.float32) * SPACING
    return jnp.minimum(lax.cummax(levels - least) + least, 1 - least[::-1])


def _beyond(points: Float32[Array, " points"], x: Float32[Array, " n"]) -> Array:
    """The first of the increasing points that is larger."""
    return jnp.searchsorted(points, x, side="right")


def _short(x: Float32[Array, " n"]) -> Float32[Array, " n"]:
    """Rounds to twelve bits, so that a product of two values is exact, fused with a sum or not."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + (1 << 11)) & ~((1 << 12) - 1), jnp.float32)


def _inverse(x: Array) -> Array:
    """`1 / x`, or 0 for an interval of length zero, which contains no mass."""
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


def _stride(n: int, size: int) -> int:
    """The stride that leaves at most `SAMPLES` elements and visits all positions of a bucket
    equally.
    """
    stride = -(-n * size // SAMPLES)
    while stride > 1 and math.gcd(stride, size) > 1:
        stride += 1
    return max(stride, 1)


def _scatter(bins: Array, *columns: Array) -> list[Array]:
    """Sums each column over the members of each bin, sequentially."""
    return [jnp.zeros(BINS, jnp.float32).at[bins].add(column) for column in columns]


def _multiply(bins: Array, *columns: Array) -> list[Array]:
    """`_scatter` as a matrix product: a bin is a row and a column."""
    rows = (bins // _ROW)[:, None] == jnp.arange(BINS // _ROW)[None, :]
    places = (bins % _ROW)[:, None] == jnp.arange(_ROW)[None, :]
    return [
        jnp.einsum(
            "nr,np->rp",
            jnp.where(rows, column[:, None], 0),
            places.astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        ).reshape(BINS)
        for column in columns
    ]


def _pieces(histogram: Histogram) -> tuple[Array, Array, Array]:
    """The interval of each bin's mass, and its fraction of the whole."""
    lower, upper = jnp.asarray(_EDGES[:-1]), jnp.asarray(_EDGES[1:])
    top = jnp.max(histogram.weight)
    filled = (histogram.weight > 0) & jnp.isfinite(top)  # Bins that overflowed count as empty.
    weight = jnp.where(filled, histogram.weight, 1)
    scaled = jnp.where(filled, weight / jnp.where(filled, top, 1), 0)
    total = jnp.sum(scaled)
    share = scaled / jnp.where(total > 0, total, 1)
    mean = jnp.where(filled, histogram.moment / weight, (lower + upper) / 2)
    mean = jnp.clip(mean, lower, upper)
    half = jnp.minimum(mean - lower, upper - mean)
    return jnp.maximum(mean - half, lower), jnp.minimum(mean + half, upper), share

"""Limits on the error at a given number of bits: curves, bounds and worst cases.

Distortions are relative, mean squared error over mean square; rates are bits per element without
scales and headers. `ω` is the relative variance that an unbiased codec promises for every input,
`E‖C(x) − x‖² ≤ ω‖x‖²`. The distributions "gaussian" and "laplace" have mean 0 and variance 1.
"""

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcomp import checks
from jaxcomp.lazy import Lazy

interpolate, linalg = Lazy("scipy.interpolate"), Lazy("scipy.linalg")
optimize, special = Lazy("scipy.optimize"), Lazy("scipy.special")

# The relative excess of a Laplace source's curve over its Shannon bound. Each point is a Gaussian
# mixture fitted to the distribution by an interior-point method; the duality gap is at most 2e-5
# bits.
_RATES = (0, 0.0007342, 0.0042465, 0.0131111, 0.0286744, 0.0504700, 0.1083729)
_RATES += (0.2468244, 0.4460481, 0.9066009, 1.3981778, 1.8962705, 2.3957783, 10)
_EXCESS = (math.pi / math.e - 1, 0.153634, 0.146916, 0.135011, 0.119992, 0.104487, 0.077095)
_EXCESS += (0.042893, 0.020962, 0.004920, 0.001214, 0.000323, 0.000091, 1e-12)

_REACH = {"gaussian": 12.0, "laplace": 45.0}  # The tail beyond has no weight in float64.
_FAR = 1e3  # Stands for infinity, without 0 · ∞.


def rate_distortion(bits: npt.ArrayLike, law: str = "gaussian") -> Any:
    """The smallest relative distortion that any code reaches at a rate.

    `D(R) = 4^−R` for a Gaussian source, exactly. A Laplace source has no closed form: its curve is
    interpolated between 12 numerical solutions, with a relative error of 1e-4. Both hold for random
    input of that distribution and codes of growing length; they do not bound other input.

    Args:
        bits: bits per element, at least 0; a number or an array.
        law: "gaussian" or "laplace".

    Raises:
        ValueError: for negative rates or another law.

    Example:
        >>> print(rate_distortion(1), rate_distortion(1, "laplace").round(4))
        0.25 0.2171

    References:
        Shannon, Coding theorems for a discrete source with a fidelity criterion, 1959; Blahut,
        Computation of channel capacity and rate-distortion functions, 1972.
    """
    bound = np.asarray(shannon_lower_bound(bits, law))
    if law == "laplace":
        rates = np.minimum(checks.numbers("bits", bits, "[0, inf)"), _RATES[-1])
        log_excess = interpolate.PchipInterpolator(_RATES, np.log(_EXCESS))
        bound = bound * (1 + np.exp(log_excess(rates)))
    return bound[()]


def shannon_lower_bound(bits: npt.ArrayLike, law: str = "gaussian") -> Any:
    """The bound in closed form that is below the rate–distortion curve.

    `2^(2h) 4^−R / 2πe` with `h` the differential entropy in bits. For a Gaussian source it equals
    the curve, `4^−R`; for a Laplace source it is `(e/π) 4^−R`, and the curve is higher by 16% at 0
    bits, 4% at ¼ and 0.4% at 1.

    Args:
        bits: bits per element, at least 0; a number or an array.
        law: "gaussian" or "laplace".

    Raises:
        ValueError: for negative rates or another law.

    Example:
        >>> print(shannon_lower_bound(1, "laplace").round(4))
        0.2163

    References:
        Shannon, Coding theorems for a discrete source with a fidelity criterion, 1959.
    """
    rates = checks.numbers("bits", bits, "[0, inf)")
    checks.choice("law", law, tuple(_REACH))
    return ((1.0 if law == "gaussian" else math.e / math.pi) * 4.0**-rates)[()]


def lloyd_max(levels: int, law: str = "gaussian") -> tuple[np.ndarray, np.ndarray, float]:
    """The levels of least mean squared error, and the thresholds between them.

    Each threshold is half way between its levels and each level is the mean of its cell. The
    solution is unique because the distributions are log-concave, and Newton's method finds it to
    about 12 digits. It is optimal for codes of fixed width; for an entropy coder, see
    `entropy_coded_scalar`.

    Args:
        levels: the number of levels, 2 to 256.
        law: "gaussian" or "laplace".

    Returns:
        `levels − 1` thresholds and `levels` centroids, symmetric and read-only; the squared error.

    Raises:
        ValueError: for other numbers of levels or another law.

    Example:
        >>> thresholds, centroids, mse = lloyd_max(4)
        >>> print(thresholds.round(4), centroids.round(4), round(mse, 6))
        [-0.9816 0. 0.9816] [-1.5104 -0.4528 0.4528 1.5104] 0.117482

    References:
        Max, Quantizing for minimum distortion, 1960; Lloyd, Least squares quantization in PCM,
        1982; Trushkin, Sufficient conditions for uniqueness of a locally optimal quantizer, 1982.
    """
    checks.integer("levels", levels, 2, 256)
    checks.choice("law", law, tuple(_REACH))
    return _lloyd_max(levels, law)


def entropy_coded_scalar(bits: npt.ArrayLike, law: str = "gaussian") -> Any:
    """The error of a uniform quantizer whose codes have a given entropy.

    Thresholds are evenly spaced except for a central cell, which decodes to zero; values are
    centroids. The step and the width of the central cell are optimal for the entropy. For a Laplace
    source no other thresholds are better, and for a Gaussian source hardly any. At high rates the
    error tends to `πe/6 = 1.4233` times the Shannon bound: 1.53 dB, or a quarter of a bit. The
    coder is ideal and knows the distribution.

    Args:
        bits: entropy in bits per element, 0 to 10; a number or an array.
        law: "gaussian" or "laplace".

    Raises:
        ValueError: for other rates or another law.

    Example:
        >>> print(entropy_coded_scalar([0.5, 1, 2]).round(4))
        [0.6173 0.3483 0.0889]

    References:
        Gish and Pierce, Asymptotically efficient quantizing, 1968; Sullivan, Efficient scalar
        quantization of exponential and Laplacian random variables, 1996.
    """
    rates = checks.numbers("bits", bits, "[0, 10]")
    checks.choice("law", law, tuple(_REACH))
    solve = np.vectorize(lambda rate: _entropy_coded(rate, law)[0] if rate else 1.0, otypes=[float])
    return solve(rates)[()]


def uniform_threshold(bits: float, law: str = "gaussian") -> tuple[np.ndarray, np.ndarray]:
    """The positive thresholds and the values of the quantizer of `entropy_coded_scalar`.

    Args:
        bits: entropy in bits per element, above 0, at most 10.
        law: "gaussian" or "laplace", of variance 1.

    Returns:
        Evenly spaced thresholds, and the values above each of them; below the first it is zero.

    Raises:
        ValueError: for other rates or another law.

    Example:
        >>> thresholds, values = uniform_threshold(2)
        >>> print(thresholds[:3].round(3), values[:3].round(3))
        [0.537 1.626 2.716] [0.981 1.981 2.998]
    """
    rate = float(checks.numbers("bits", bits, "(0, 10]"))
    checks.choice("law", law, tuple(_REACH))
    _, step, ratio = _entropy_coded(rate, law)
    inner = step * (ratio + np.arange(math.ceil(_REACH[law] / step)))
    return inner, _cells(np.append(inner, _FAR), law)[2]


def unbiased_bound(bits: npt.ArrayLike) -> Any:
    """The smallest ω that any unbiased codec can promise at a rate.

    `ω ≥ 1/(4^b − 1)`: scaled by `1/(1 + ω)` the codec has distortion `ω/(1 + ω)`, at least `4^−b`.
    This holds for the worst input and growing dimension. Codecs with an entropy coder can be below
    it for sparse or heavy-tailed input, so compare it only with codecs that treat all directions
    alike.

    Args:
        bits: bits per element, above 0; a number or an array.

    Raises:
        ValueError: for rates that are not positive.

    Example:
        >>> print(unbiased_bound([0.5, 1, 2]).round(4))
        [1. 0.3333 0.0667]

    References:
        Safaryan, Shulgin and Richtárik, `Uncertainty principle for communication compression in
        distributed and federated learning and the search for an optimal compressor
        <https://arxiv.org/abs/2002.08958>`_, 2022.
    """
    rates = checks.numbers("bits", bits, "(0, inf)")
    return (4.0**-rates / -np.expm1(-math.log(4) * rates))[()]


def from_deterministic(distortion: npt.ArrayLike) -> Any:
    """The ω of a deterministic quantizer behind a random rotation, rescaled to be unbiased.

    `ω = D/(1 − D)` for long blocks, whose rotated elements are nearly Gaussian, and for uniform
    rotations: a single Hadamard rotation leaves a bias on sparse input.

    Args:
        distortion: relative distortion `D` of the quantizer, whose levels are centroids, from 0 to
            below 1; a number or an array.

    Raises:
        ValueError: for other distortions.

    Example:
        >>> print(from_deterministic([0, 0.5]))
        [0. 1.]

    References:
        Vargaftik et al., `EDEN: communication-efficient and robust distributed mean estimation for
        federated learning <https://arxiv.org/abs/2108.08842>`_, 2022.
    """
    share = checks.numbers("distortion", distortion, "[0, 1)")
    return (share / (1 - share))[()]


def eden(bits: int) -> float:
    """The ω of Gaussian Lloyd–Max levels behind a random rotation, the same for every input.

    `ω = D/(1 − D)` with `D` the error of `lloyd_max(2**bits)`, where `from_deterministic` holds.

    Args:
        bits: width of a code, 1 to 8.

    Raises:
        ValueError: for other widths.

    Example:
        >>> [round(eden(bits), 4) for bits in (1, 2, 3, 4)]
        [0.5708, 0.1331, 0.0358, 0.0096]

    References:
        Vargaftik et al., `EDEN <https://arxiv.org/abs/2108.08842>`_, 2022.
    """
    checks.integer("bits", bits, 1, 8)
    return float(from_deterministic(lloyd_max(2**bits)[2]))


def index_bits(n: int, k: int) -> float:
    """The bits that say which k of n elements were sent, if all choices are equally likely.

    `log₂ C(n, k)`, about `n h(k/n)` with `h` the binary entropy. Indices that cluster, or come
    again in the next step, can cost less.

    Args:
        n: elements, at least 1.
        k: how many of them were sent, 0 to n.

    Raises:
        ValueError: for numbers out of range.

    Example:
        >>> round(index_bits(1_000_000, 1_000), 1)
        11401.4

    References:
        Cover, Enumerative source encoding, 1973, whose code attains it.
    """
    checks.integer("n", n, 1)
    checks.integer("k", k, 0, n)
    # A log-beta: the difference of three log-gammas loses half of its digits at n = 10⁹.
    return float(-special.betaln(n - k + 1, k + 1) - math.log1p(n)) / math.log(2)


def gap_entropy(density: npt.ArrayLike) -> Any:
    """Bits an index, if each element is sent with the same chance and independently.

    `h(p)/p` with `h` the binary entropy: gaps are geometric. It is the limit of
    `index_bits(n, p n)/(p n)`.

    Args:
        density: share `p` of the elements sent, above 0 and at most 1; a number or an array.

    Raises:
        ValueError: for other densities.

    Example:
        >>> print(gap_entropy([0.1, 0.01, 0.001]).round(3))
        [ 4.69 8.079 11.408]

    References:
        Golomb, Run-length encodings, 1966.
    """
    share = checks.numbers("density", density, "(0, 1]")
    rest = special.xlog1py(share - 1, -share)  # `log(1 − p)` would lose a small p.
    return ((special.entr(share) + rest) / share / math.log(2))[()]


def _cells(edges: np.ndarray, law: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The density at each edge, none below 0; the mass and the mean between two of them."""
    if law == "gaussian":
        density = np.exp(-edges * edges / 2) / math.sqrt(2 * math.pi)
        beyond, moment = special.ndtr(-edges), density
    else:
        decay = np.exp(-math.sqrt(2) * edges)
        density, beyond = decay / math.sqrt(2), decay / 2
        moment = (edges + math.sqrt(0.5)) * beyond
    mass = beyond[:-1] - beyond[1:]
    return density, mass, (moment[:-1] - moment[1:]) / np.maximum(mass, 1e-300)


@functools.cache
def _lloyd_max(levels: int, law: str) -> tuple[np.ndarray, np.ndarray, float]:
    half, odd = divmod(levels, 2)  # Solves for the positive levels only.
    # The start: quantiles of density^⅓, the same distribution √3 or 3 times as wide.
    tail = (half - np.arange(half) - 0.5) / levels
    wide = {
        "gaussian": -math.sqrt(3) * special.ndtri(tail),
        "laplace": -np.log(2 * tail) * 4.5**0.5,
    }
    y = wide[law]
    for _ in range(10):  # Five are enough at 256 levels.
        edges = np.concatenate([[odd * y[0] / 2], (y[1:] + y[:-1]) / 2, [_FAR]])
        density, mass, mean = _cells(edges, law)
        low = density[:-1] * (mean - edges[:-1]) / mass / 2  # Derivative of a mean.
        high = density[1:] * (edges[1:] - mean) / mass / 2
        own = low * np.where(np.arange(half) > 0, 1, odd) + high
        bands = [np.append(0, -high[:-1]), 1 - own, np.append(-low[1:], 0)]
        y = y + linalg.solve_banded((1, 1), np.stack(bands), mean - y)
    centroids = np.concatenate([-y[::-1], np.zeros(odd), y])
    thresholds = (centroids[1:] + centroids[:-1]) / 2
    centroids.setflags(write=False)
    thresholds.setflags(write=False)
    return thresholds, centroids, float(1 - 2 * np.sum(mass * mean**2))


@functools.cache
def _entropy_coded(bits: float, law: str) -> tuple[float, float, float]:
    """The error, the step, and where the central cell ends in steps, of a positive rate."""

    def measured(step: float, ratio: float) -> tuple[float, float]:
        """The entropy and the error, if the central cell ends at `ratio` steps."""
        inner = step * (ratio + np.arange(math.ceil(_REACH[law] / step)))
        _, mass, mean = _cells(np.concatenate([[0.0], inner, [_FAR]]), law)
        chances = special.entr(2 * mass[0]) + 2 * np.sum(special.entr(mass[1:]))
        return chances / math.log(2), 1 - 2 * np.sum(mass[1:] * mean[1:] ** 2)

    def step_at(ratio: float) -> float:
        high = 1.0
        while measured(high, ratio)[0] > bits:
            high *= 2
        low = high / 2
        while measured(low, ratio)[0] < bits:
            low /= 2
        step: Any = optimize.brentq(lambda step: measured(step, ratio)[0] - bits, low, high)
        return step

    best: Any = optimize.minimize_scalar(
        lambda ratio: measured(step_at(ratio), ratio)[1], bounds=(0.25, 1), method="bounded"
    )
    return float(best.fun), step_at(best.x), float(best.x)

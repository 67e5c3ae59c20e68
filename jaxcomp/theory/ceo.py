"""The least bits for one signal that several workers see through noise: the Gaussian CEO problem.

An element of the signal is `X ~ N(0, σ_X²)`, the gradient that the workers estimate; worker `l` has
`Y_l = X + N_l` with `N_l ~ N(0, σ_l²)`, and all are independent. Workers encode alone and a server
decodes all messages together. Rates are bits per element, summed over the workers unless a name
says otherwise; `D` is the mean squared error `E (X̂ − X)²` of an element, not relative.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from jaxcomp import checks


def ceo_range(signal: float, noise: Sequence[float]) -> tuple[float, float]:
    """The distortion that no rate reaches, and the distortion without any message.

    `(1/σ_X² + Σ 1/σ_l²)^−1` and `σ_X²`.

    Args:
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.

    Raises:
        ValueError: for variances that are not positive, or no worker.

    Example:
        >>> ceo_range(1.0, [0.5, 0.5])
        (0.2, 1.0)

    References:
        Berger, Zhang and Viswanathan, The CEO problem, 1996.
    """
    checks.positive("signal", signal)
    return float(1 / (1 / signal + precisions_of(noise).sum())), float(signal)


def ceo_rate(distortion: npt.ArrayLike, signal: float, noise: Sequence[float]) -> Any:
    """The least bits per element of all workers together that reach a distortion.

    `½ log₂(σ_X²/D) + min Σ r_l` with `Σ (1 − 4^−r_l)/σ_l² = 1/D − 1/σ_X²`. The minimum is water
    filling, `r_l = ½ [log₂(w/σ_l²)]₊`: workers with more noise than the water level `w` are silent.

    Args:
        distortion: `D`, a number or an array.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.

    Raises:
        ValueError: for distortions out of `ceo_range`, variances that are not positive, or no
            worker.

    Example:
        >>> noise = [0.1] * 32
        >>> least, _ = ceo_range(1.0, noise)
        >>> print(ceo_rate(2 * least, 1.0, noise).round(2))
        19.59

    References:
        Oohama, The rate-distortion function for the quadratic Gaussian CEO problem, 1998;
        Prabhakaran, Tse and Ramchandran, Rate region of the quadratic Gaussian CEO problem, 2004;
        Zhang, Tao, Wang and Xu, `Fundamental limits of communication efficiency for model
        aggregation in distributed learning: a rate-distortion approach
        <https://arxiv.org/abs/2206.13984>`_, 2022, who apply it to gradients.

    Note:
        The bound holds for Gaussian elements, long blocks, and a server that wants the signal. The
        mean of what the workers have is `σ²/L` away from the signal for equal noise, which is more
        than the lower end of `ceo_range`. The formulas are those of the problem's literature, since
        only the abstract of the last paper was available.
    """
    precisions, need = _needed(distortion, signal, noise)
    private = _private(precisions, need)
    rate = 0.5 * np.log2(1 + signal * need) + private.sum(axis=-1)
    return rate[()]


def ceo_symmetric_rate(distortion: npt.ArrayLike, signal: float, noise: float, workers: int) -> Any:
    """`ceo_rate` of workers with equal noise, in closed form.

    `½ log₂(σ_X²/D) − (L/2) log₂(1 − (σ²/L)(1/D − 1/σ_X²))`.

    Args:
        distortion: `D`, a number or an array.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ²`, the variance of each worker's noise.
        workers: `L`.

    Raises:
        ValueError: for distortions out of `ceo_range`, variances that are not positive, or no
            worker.

    Example:
        >>> print(ceo_symmetric_rate(0.01, 1.0, 0.1, 32).round(3))
        11.866

    References:
        As `ceo_rate`.
    """
    checks.integer("workers", workers, 1)
    checks.positive("noise", noise)
    _, need = _needed(distortion, signal, [noise] * workers)
    filled = -np.log1p(-need * noise / workers) / math.log(2)
    return (0.5 * np.log2(1 + signal * need) + workers / 2 * filled)[()]


def ceo_unbinned_rate(distortion: npt.ArrayLike, signal: float, noise: Sequence[float]) -> Any:
    """The bits per element if every message is long enough to be decoded without the others.

    `Σ ½ log₂(1 + (σ_X² + σ_l²)(4^r_l − 1)/σ_l²)` at the allocation `r_l` of `ceo_rate`: each worker
    describes its own copy as well as Shannon allows, and the server combines the copies. What
    `ceo_rate` saves against this is the gain from the correlation of the workers' gradients.

    Args:
        distortion: `D`, a number or an array.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.

    Raises:
        ValueError: for distortions out of `ceo_range`, variances that are not positive, or no
            worker.

    Example:
        >>> noise = [0.1] * 32
        >>> least, _ = ceo_range(1.0, noise)
        >>> print(ceo_unbinned_rate(2 * least, 1.0, noise).round(1))
        57.2

    References:
        As `ceo_rate`.

    Note:
        Not the least rate without binning: where the signal is stronger than the noise, it can be
        less if some workers stay silent. With 24 of the 32 workers of the example it is 54.1.
    """
    precisions, need = _needed(distortion, signal, noise)
    return _alone(precisions, _private(precisions, need), signal).sum(axis=-1)[()]


@final
@dataclasses.dataclass(frozen=True)
class CeoAllocation:
    """Bits an element of each worker that reach a distortion with the least sum.

    Attributes:
        distortion: `D`.
        water: `w`; workers with at least as much noise are silent.
        private: `r_l`, the bits that a worker's message has about its own noisy copy beyond the
            signal.
        rates: `R_l`, if messages are decoded one after another, in the order of the workers, each
            with the help of those before. Their sum is `ceo_rate`; other orders have other rates.
        alone: the rates if each message is decoded without the others; their sum is
            `ceo_unbinned_rate`.
    """

    distortion: float
    water: float
    private: tuple[float, ...]
    rates: tuple[float, ...]
    alone: tuple[float, ...]

    @property
    def speaking(self) -> int:
        """The number of workers that send anything."""
        return sum(bits > 0 for bits in self.private)


def ceo_allocation(distortion: float, signal: float, noise: Sequence[float]) -> CeoAllocation:
    """The rates of the workers that reach a distortion with the least sum, by water filling.

    `r_l = ½ [log₂(w/σ_l²)]₊` with `w` from `Σ (1 − 4^−r_l)/σ_l² = 1/D − 1/σ_X²`. Decoded after the
    workers before it, worker `l` needs `R_l = r_l + ½ log₂(S_l / S_{l−1})` with
    `S_l = 1/σ_X² + Σ_{i ≤ l} c_i`.

    Args:
        distortion: `D`.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.

    Raises:
        ValueError: for a distortion out of `ceo_range`, variances that are not positive, or no
            worker.

    Example:
        >>> found = ceo_allocation(0.2, 1.0, [0.2, 0.5, 4.0])
        >>> [round(bits, 3) for bits in found.rates], found.speaking
        ([1.953, 0.284, 0.0], 2)

    References:
        As `ceo_rate`.
    """
    wanted = checks.numbers("distortion", distortion, "(0, inf)")
    if wanted.ndim:
        raise ValueError(f"`distortion` must be one number, got {distortion!r}")
    precisions, need = _needed(wanted, signal, noise)
    private = _private(precisions, need)
    gained = precisions * -np.expm1(-2 * math.log(2) * private)
    known = np.cumsum([1 / signal, *gained])
    rates = private + 0.5 * np.log2(known[1:] / known[:-1])
    level = _level(precisions, need)
    return CeoAllocation(
        distortion=float(distortion),
        water=float(1 / level),
        private=tuple(private.tolist()),
        rates=tuple(rates.tolist()),
        alone=tuple(_alone(precisions, private, signal).tolist()),
    )


def precisions_of(noise: Sequence[float]) -> np.ndarray:
    """`1/σ_l²` of at least one worker, checked."""
    variances = checks.numbers("noise", noise, "(0, inf)")
    if variances.ndim != 1 or not variances.size:
        raise ValueError(
            f"`noise` must have one variance for each worker, as in [0.1] * 8, got {noise!r}"
        )
    return 1 / variances


def _needed(
    distortion: npt.ArrayLike, signal: float, noise: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The workers' precisions, and what of them a distortion needs, `1/D − 1/σ_X²`."""
    low, high = ceo_range(signal, noise)
    wanted = checks.numbers("distortion", distortion, f"({low!r}, {high!r}]")
    return precisions_of(noise), (signal - wanted) / (wanted * signal)


def _level(precisions: np.ndarray, need: np.ndarray) -> np.ndarray:
    """`1/w`: the greatest `v` over which the precisions have the sum `Σ [1/σ_l² − v]₊ = need`."""
    clean = np.sort(precisions, axis=-1)[..., ::-1]
    speaking = np.arange(1, clean.shape[-1] + 1)
    # The sum over any set of workers is at most that over those above v, so each k bounds v.
    return ((np.cumsum(clean, axis=-1) - need[..., None]) / speaking).max(axis=-1)


def _private(precisions: np.ndarray, need: np.ndarray) -> np.ndarray:
    """`r_l` in bits, `[..., workers]`."""
    level = _level(precisions, need)
    return 0.5 * np.log2(np.maximum(precisions / level[..., None], 1.0))


def _alone(precisions: np.ndarray, private: np.ndarray, signal: float) -> np.ndarray:
    return 0.5 * np.log2(1 + (signal * precisions + 1) * np.expm1(2 * math.log(2) * private))

"""The CEO bound in use: bits over blocks of a gradient, and over all rounds of a training."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from jaxcomp import checks
from jaxcomp.lazy import Lazy
from jaxcomp.theory import ceo

optimize = Lazy("scipy.optimize")


@final
@dataclasses.dataclass(frozen=True)
class CeoBlocks:
    """The least bits for a gradient whose blocks have variances of their own.

    Attributes:
        rate: bits per element of all workers together, the mean over all elements.
        distortions: `D_k` of each block; one with `D_k = σ_X,k²` is not sent.
        rates: bits per element of each block, of all workers together.
        slope: the bits per element that a unit less of distortion costs, in every block sent.
    """

    rate: float
    distortions: tuple[float, ...]
    rates: tuple[float, ...]
    slope: float


def ceo_vector(
    distortion: float,
    signals: Sequence[float],
    noises: Sequence[Sequence[float]],
    sizes: Sequence[int] | None = None,
) -> CeoBlocks:
    """The least bits for blocks of a gradient, and the distortion of each.

    Least `Σ n_k R_k(D_k) / Σ n_k` with `Σ n_k D_k / Σ n_k ≤ D`: blocks that are sent have equal
    slopes `−R_k'(D) = 1/(2D) + w/(2D²)`, in nats, with `w` the water level of `ceo_allocation`.

    Args:
        distortion: `D`, the mean squared error of an element, over all blocks.
        signals: `σ_X,k²`, the variance of the common signal of each block; 0 for none.
        noises: `[blocks, workers]`, the variance of each worker's noise.
        sizes: `n_k`, the elements of each block; 1 by default.

    Raises:
        ValueError: for variances out of range, no block, lengths that differ, sizes below 1, or a
            distortion that is not between those of no signal lost and no message.

    Example:
        >>> found = ceo_vector(0.3, [1.0, 0.1], [[0.1] * 8, [0.1] * 8])
        >>> round(found.rate, 3), [round(d, 3) for d in found.distortions]
        (0.286, [0.5, 0.1])

    References:
        Zhang, Tao, Wang and Xu, `Fundamental limits of communication efficiency for model
        aggregation in distributed learning: a rate-distortion approach
        <https://arxiv.org/abs/2206.13984>`_, 2022, whose model is a vector.

    Note:
        Elements are independent of one another, as they are in our measurements; the paper's vector
        may be correlated, and is made independent by a rotation.
    """
    blocks = _Blocks.of(signals, noises, sizes)
    low, high = blocks.mean(blocks.least), blocks.mean(blocks.signals)
    if not low < distortion <= high:
        raise ValueError(
            f"`distortion` must be above {low:.6g}, the least with all that the workers have, and "
            f"at most {high:.6g}, that without any message, got {distortion!r}"
        )

    def excess(log_slope: float) -> float:
        return blocks.mean(blocks.at(math.exp(log_slope))) - distortion

    # The least slope of any block, in nats, is where its last bit is spent.
    some = blocks.signals > 0
    inverse, cleanest = blocks.inverse[some], blocks.noises[some].min(axis=1)
    top = math.log((inverse / 2 + cleanest * inverse**2 / 2).min())
    step = 1.0
    while excess(top + step) > 0:
        step *= 2
    log_slope: Any = top if excess(top) <= 0 else optimize.brentq(excess, top, top + step)
    slope = math.exp(log_slope)
    distortions = blocks.at(slope)
    rates = [
        float(ceo.ceo_rate(min(d, s), s, each)) if s else 0.0
        for d, s, each in zip(distortions, blocks.signals, blocks.noises, strict=True)
    ]
    return CeoBlocks(
        rate=blocks.mean(np.array(rates)),
        distortions=tuple(distortions.tolist()),
        rates=tuple(rates),
        slope=slope / math.log(2),
    )


@dataclasses.dataclass(frozen=True)
class _Blocks:
    signals: np.ndarray
    noises: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(cls, signals: Any, noises: Any, sizes: Any) -> "_Blocks":
        found = checks.numbers("signals", signals, "[0, inf)")
        if found.ndim != 1 or not found.any():
            raise ValueError(
                "`signals` must have a variance for each block, at least one of them positive, got "
                f"{signals!r}"
            )
        each = checks.numbers("noises", noises, "(0, inf)")
        if each.ndim != 2 or len(each) != found.size or not each.size:
            raise ValueError(
                f"`noises` must have shape (blocks, workers) with {found.size} blocks as `signals`,"
                f" got {each.shape}"
            )
        number = checks.numbers("sizes", [1] * found.size if sizes is None else sizes, "[1, inf)")
        if number.shape != found.shape:
            raise ValueError(f"`sizes` must have {found.size} numbers as `signals`, got {sizes!r}")
        return cls(found, each, number)

    @property
    def inverse(self) -> np.ndarray:
        """`1/σ_X²`, 1 where there is no signal."""
        return 1 / np.where(self.signals > 0, self.signals, 1.0)

    @property
    def least(self) -> np.ndarray:
        return (self.signals > 0) / (self.inverse + (1 / self.noises).sum(axis=1))

    def mean(self, values: np.ndarray) -> float:
        return float(values @ self.sizes / self.sizes.sum())

    def at(self, slope: float) -> np.ndarray:
        """The distortion of each block at a slope in nats."""
        precisions = 1 / self.noises
        high = np.log(precisions.max(axis=1))  # log(1/w) at which every worker is silent,
        low = np.minimum(-np.log(2 * slope) + 2 * np.log(self.inverse), high)  # or slopes steeper.
        for _ in range(60):
            middle = (low + high) / 2
            spared = np.maximum(precisions - np.exp(middle)[:, None], 0.0).sum(axis=1)
            found = 1 / (self.inverse + spared)
            steeper = 1 / (2 * found) + np.exp(-middle) / (2 * found**2) > slope
            low, high = np.where(steeper, middle, low), np.where(steeper, high, middle)
        spared = np.maximum(precisions - np.exp(high)[:, None], 0.0).sum(axis=1)
        return np.minimum((self.signals > 0) / (self.inverse + spared), self.signals)


@final
@dataclasses.dataclass(frozen=True)
class TotalCost:
    """The cost of all rounds of a training at a distortion of its gradients.

    Attributes:
        distortion: `D`.
        rate: `R(D)`, bits per element of all workers in a round.
        rounds: `T(D)`.
        bits: `T(D) (R(D) + overhead)`, bits per element over all rounds.
    """

    distortion: float
    rate: float
    rounds: float
    bits: float


def ceo_total_cost(
    signal: float,
    noise: Sequence[float],
    *,
    rounds: float,
    growth: float,
    overhead: float,
    distortion: float | None = None,
) -> TotalCost:
    """The bits of a whole training at the CEO bound, and the distortion with the fewest.

    `T(D) (R(D) + o)` with `T(D) = a + b D`: SGD needs more rounds with noisier gradients, and each
    costs fewer bits. The fewest bits are at a higher distortion than the fewest rounds.

    Args:
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.
        rounds: `a`, the rounds with exact gradients.
        growth: `b`, further rounds for a unit of distortion.
        overhead: `o`, what a round costs beside the bits of its gradients, in bits per element of
            all workers: the model sent back, headers, or the computation if time counts.
        distortion: `D`, to know the cost there; None for the one with the least cost.

    Raises:
        ValueError: for numbers that are not positive, a distortion out of `ceo_range`, or an
            overhead so small that the fewest bits are at no message at all.

    Example:
        >>> model = {"rounds": 100, "growth": 2000, "overhead": 2.0}
        >>> best = ceo_total_cost(1.0, [0.1] * 8, **model)
        >>> fine = ceo_total_cost(1.0, [0.1] * 8, distortion=0.013, **model)
        >>> round(best.distortion, 3), round(best.rounds), round(fine.rounds), best.bits < fine.bits
        (0.046, 192, 126, True)

    References:
        Zhang, Tao, Wang and Xu, `Fundamental limits of communication efficiency for model
        aggregation in distributed learning: a rate-distortion approach
        <https://arxiv.org/abs/2206.13984>`_, 2022, who find that a high distortion has a low total
        cost.

    Note:
        The overhead is ours. Without it the product has its minimum at `D = σ_X²`, where nothing is
        sent and `T` is finite all the same: an affine `T` does not hold there.
    """
    low, high = ceo.ceo_range(signal, noise)
    for name, value in (("rounds", rounds), ("growth", growth), ("overhead", overhead)):
        checks.positive(name, value)

    def cost(wanted: Any) -> Any:
        return (rounds + growth * wanted) * (ceo.ceo_rate(wanted, signal, noise) + overhead)

    if distortion is None:
        tried = low + (high - low) * np.append(np.geomspace(1e-9, 1, 2000)[:-1], 1.0)
        at = int(np.argmin(cost(tried)))
        if at == len(tried) - 1:
            flat = (1 / (2 * high) + min(noise) / (2 * high**2)) / math.log(2)
            raise ValueError(
                f"`overhead` must be larger, {(rounds / growth + high) * flat:.3g} bits is enough, "
                f"since with {overhead!r} the fewest bits are at no message at all"
            )
        found: Any = optimize.minimize_scalar(
            cost, bounds=(tried[max(at - 1, 0)], tried[at + 1]), method="bounded"
        )
        distortion = float(found.x)
    rate = float(ceo.ceo_rate(distortion, signal, noise))
    taken = rounds + growth * distortion
    return TotalCost(distortion, rate, taken, taken * (rate + overhead))

"""The rate region of the Gaussian CEO problem: which rates of the workers reach a distortion.

With `c_l = (1 − 4^−r_l) / σ_l²`, the precision that `r_l` bits about a worker's noisy copy give,
the rates `R_l` reach `D` if and only if some `r_l ≥ 0` have, for every set `A` of workers,

    Σ_A R_l ≥ Σ_A r_l + ½ log₂(1/D) − ½ log₂(1/σ_X² + Σ_{not A} c_l).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxcomp import checks
from jaxcomp.lazy import Lazy
from jaxcomp.theory import ceo

optimize = Lazy("scipy.optimize")


def ceo_distortion(rates: Sequence[float], signal: float, noise: Sequence[float]) -> float:
    """The least distortion that given rates of the workers reach.

    `½ log₂(1/D) = max_r min_A Σ_A (R_l − r_l) + ½ log₂(1/σ_X² + Σ_{not A} c_l)`, a concave problem.
    For given `r` the minimum over all `2^L` sets is one of `L + 1` sets in the order of
    `(R_l − r_l)/c_l`, so sets are added to the problem until none is violated. That takes
    milliseconds for eight workers, and some seconds for 32.

    Args:
        rates: `R_l`, bits per element of each worker.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.

    Returns:
        A distortion that the rates reach; no rates reach one that is smaller by more than a
        millionth.

    Raises:
        ValueError: for negative rates, another number of rates than of workers, variances that are
            not positive, or no worker.

    Example:
        >>> round(ceo_distortion([2.0, 2.0], 1.0, [0.5, 0.5]), 4)
        0.2236

    References:
        Prabhakaran, Tse and Ramchandran, Rate region of the quadratic Gaussian CEO problem, 2004.
    """
    checks.positive("signal", signal)
    precisions = ceo.precisions_of(noise)
    nats = checks.numbers("rates", rates, "[0, inf)") * math.log(2)
    if nats.shape != precisions.shape:
        raise ValueError(
            f"`rates` must have one number for each of the {precisions.size} workers of `noise`, "
            f"got {rates!r}"
        )
    return _Region(nats, precisions, signal).distortion()


def ceo_achievable(
    rates: Sequence[float], distortion: float, signal: float, noise: Sequence[float]
) -> bool:
    """Whether rates of the workers are in the rate region of a distortion.

    Args:
        rates: `R_l`, bits per element of each worker.
        distortion: `D`.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ_l²`, the variance of each worker's noise.

    Returns:
        Whether `ceo_distortion(rates, signal, noise)` is at most `D`, up to a millionth of `D`.

    Raises:
        ValueError: for negative rates or a distortion that is not positive, another number of rates
            than of workers, variances that are not positive, or no worker.

    Example:
        >>> ceo_achievable([2.0, 2.0], 0.23, 1.0, [0.5, 0.5])
        True
        >>> ceo_achievable([3.0, 1.0], 0.23, 1.0, [0.5, 0.5])
        False

    References:
        Prabhakaran, Tse and Ramchandran, Rate region of the quadratic Gaussian CEO problem, 2004.
    """
    checks.positive("distortion", distortion)
    return ceo_distortion(rates, signal, noise) <= distortion * (1 + 1e-6)


@dataclasses.dataclass(frozen=True)
class _Region:
    """The rate region around given rates, in nats."""

    rates: np.ndarray
    precisions: np.ndarray
    signal: float

    def precision(self, private: np.ndarray, sets: np.ndarray) -> np.ndarray:
        """`½ ln(1/D)` as far as the sums over `sets: [sets, workers]` allow."""
        return sets @ (self.rates - private) + 0.5 * np.log(self._rest(private, sets))

    def slopes(self, private: np.ndarray, sets: np.ndarray) -> np.ndarray:
        """The derivatives of `precision`, `[sets, workers]`."""
        each = self.precisions * np.exp(-2 * private) / self._rest(private, sets)[:, None]
        return np.where(sets, -1.0, each)

    def _rest(self, private: np.ndarray, sets: np.ndarray) -> np.ndarray:
        return 1 / self.signal + ~sets @ (self.precisions * -np.expm1(-2 * private))

    def chain(self, private: np.ndarray) -> np.ndarray:
        """Sets of which one has the least `precision` of all sets."""
        gained = self.precisions * -np.expm1(-2 * private)
        order = np.argsort((self.rates - private) / np.maximum(gained, 1e-300), kind="stable")
        return np.argsort(order) < np.arange(order.size + 1)[:, None]

    def distortion(self) -> float:
        """`e^−2t` for the greatest `t` of the concave problem."""
        point, best = self.rates / 2, -math.inf
        sets = chain = self.chain(point)
        for _ in range(_REPEATS):
            reached, point = self._best_for(sets, point, float(self.precision(point, chain).min()))
            chain = self.chain(point)
            best = max(best, float(self.precision(point, chain).min()))
            if reached <= best + 1e-8:
                break
            sets = np.unique(np.concatenate([sets, chain]), axis=0)
        return math.exp(-2 * best)

    def _best_for(
        self, sets: np.ndarray, start: np.ndarray, value: float
    ) -> tuple[float, np.ndarray]:
        """The greatest precision that these sets allow, and its `r`, in `[0, R]`."""
        last = np.append(np.zeros(start.size), -1.0)
        column = -np.ones((len(sets), 1))
        found = optimize.minimize(
            lambda x: -x[-1],
            np.append(start, value),
            jac=lambda x: last,
            method="SLSQP",
            bounds=[*((0.0, rate) for rate in self.rates), (None, None)],
            constraints={
                "type": "ineq",
                "fun": lambda x: self.precision(x[:-1], sets) - x[-1],
                "jac": lambda x: np.hstack([self.slopes(x[:-1], sets), column]),
            },
            options={"maxiter": 500, "ftol": 1e-12},
        )
        return float(found.x[-1]), np.clip(found.x[:-1], 0.0, self.rates)


_REPEATS = 200

"""The correlation of the workers' gradients, and the bits that it can save."""

import dataclasses
import math
from typing import Any, final

import jax
import numpy as np

from jaxcomp import checks, tables
from jaxcomp.lazy import Lazy
from jaxcomp.tables import Column

special = Lazy("scipy.special")


@final
@dataclasses.dataclass(frozen=True)
class Spread:
    """The common signal and the noise of the workers' gradients, for some elements.

    Attributes:
        elements: the number of elements of one worker's gradient.
        signal: `σ_X²`, the mean square of the common signal, an element; 0 if none is seen.
        noise: `σ_l²`, the mean square of each worker's deviation from it, an element. With two
            workers both have the same, since the two deviations are equal.
    """

    elements: int
    signal: float
    noise: tuple[float, ...]

    @property
    def mean_noise(self) -> float:
        """The mean of the workers' noise."""
        return sum(self.noise) / len(self.noise)

    @property
    def ratio(self) -> float:
        """Mean noise over signal; infinite if no signal is seen."""
        return self.mean_noise / self.signal if self.signal else math.inf

    @property
    def correlation(self) -> float:
        """`σ_X² / (σ_X² + σ²)`: how far the elements of two workers agree, from 0 to 1."""
        total = self.signal + self.mean_noise
        return self.signal / total if total else 0.0


@final
@dataclasses.dataclass(frozen=True)
class GradientStatistics:
    """The common signal and the noise of the workers' gradients; `print` it for a table.

    Attributes:
        whole: all elements together.
        leaves: those of each leaf, by its path in the tree.
    """

    whole: Spread
    leaves: dict[str, Spread]

    def __str__(self) -> str:
        columns = (
            Column("", lambda row: row[0]),
            Column("elements", lambda row: row[1].elements, ",", right=True),
            Column("signal", lambda row: row[1].signal, ".3g", right=True),
            Column("noise", lambda row: row[1].mean_noise, ".3g", right=True),
            Column("noise/signal", lambda row: row[1].ratio, ".3g", right=True),
            Column("correlation", lambda row: row[1].correlation, ".3f", right=True),
        )
        return tables.text(columns, [*self.leaves.items(), ("all", self.whole)])


def gradient_statistics(gradients: Any) -> GradientStatistics:
    """The variance of the common signal and of each worker's noise, from stacked gradients.

    An element of worker `l` is `g_l = x + n_l`. With `ḡ` the mean over `L` workers and averages
    over elements, `s² = Σ_l |g_l − ḡ|²/(L − 1)` estimates the mean noise and `[|ḡ|² − s²/L]₊` the
    signal. One worker's noise is `(|g_l − ḡ|² − s²/L) / (1 − 2/L)`, at least 0.

    Args:
        gradients: an array, or a tree of arrays, `[workers, ...]`, before they are averaged. The
            same parameters and another minibatch for each worker.

    Returns:
        Numbers for `ceo_rate` and `ceo_vector`, for each leaf and for all elements. They are sums
        in float64 on the host.

    Raises:
        ValueError: for no array, arrays without elements, fewer than two workers, unequal numbers
            of workers, or values that are not finite.

    Example:
        >>> draw = np.random.default_rng(0)
        >>> common = draw.standard_normal(10_000)
        >>> found = gradient_statistics({"w": common + draw.standard_normal((8, 10_000)) / 2})
        >>> round(found.whole.signal, 2), round(found.whole.mean_noise, 2)
        (0.99, 0.25)

    References:
        Zhang, Tao, Wang and Xu, `Fundamental limits of communication efficiency for model
        aggregation in distributed learning: a rate-distortion approach
        <https://arxiv.org/abs/2206.13984>`_, 2022, who measure gradients this way.

    Note:
        The estimators are ours, since only the abstract was available. They take the elements of a
        leaf as centred and of one variance.
    """
    found = jax.tree_util.tree_flatten_with_path(gradients)[0]
    if not found:
        raise ValueError(f"`gradients` must have at least one array, got {gradients!r}")
    sums = {
        jax.tree_util.keystr(path, simple=True, separator="/") or "gradient": _Sums.of(path, leaf)
        for path, leaf in found
    }
    numbers = sorted({each.workers for each in sums.values()})
    if len(numbers) > 1:
        raise ValueError(
            f"`gradients` must have the same number of workers in all arrays, got {numbers}"
        )
    total = _Sums(
        elements=sum(each.elements for each in sums.values()),
        mean=sum(each.mean for each in sums.values()),
        apart=np.sum([each.apart for each in sums.values()], axis=0),
    )
    return GradientStatistics(
        whole=total.spread(), leaves={name: each.spread() for name, each in sums.items()}
    )


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Sums of squares: of the mean over workers, and of each worker's deviation from it."""

    elements: int
    mean: float
    apart: np.ndarray

    @property
    def workers(self) -> int:
        return self.apart.size

    @classmethod
    def of(cls, path: Any, leaf: Any) -> "_Sums":
        place = f"`gradients`{jax.tree_util.keystr(path)}"
        shape = np.shape(leaf)
        if len(shape) < 1 or shape[0] < 2 or math.prod(shape) == 0:
            raise ValueError(
                f"{place} must have shape (workers, ...) with at least two workers and one element,"
                f" got {shape}"
            )
        rows = np.asarray(leaf).reshape(shape[0], -1).astype(np.float64)
        mean = rows.mean(axis=0)
        apart = np.array([np.sum((row - mean) ** 2) for row in rows])
        if not np.isfinite(apart).all():
            raise ValueError(f"{place} must be finite, got NaN or infinity")
        return cls(rows.shape[1], float(np.sum(mean**2)), apart)

    def spread(self) -> Spread:
        n = self.workers
        noise = float(self.apart.sum()) / (n - 1) / self.elements
        own = np.full(n, noise)
        if n > 2:
            own = np.maximum((self.apart / self.elements - noise / n) / (1 - 2 / n), 0.0)
        return Spread(
            elements=self.elements,
            signal=max(self.mean / self.elements - noise / n, 0.0),
            noise=tuple(own.tolist()),
        )


def sign_entropy(workers: int, signal: float, noise: float) -> float:
    """The joint entropy of the signs of an element of all workers, in bits.

    `−Σ_m C(L, m) P_m log₂ P_m` with `P_m = E Φ(X/σ)^m Φ(−X/σ)^(L − m)` over `X ~ N(0, σ_X²)`: the
    least bits of all sign messages together. Coded one by one they need `L` bits.

    Args:
        workers: `L`.
        signal: `σ_X²`, the variance of the common signal.
        noise: `σ²`, the variance of each worker's noise.

    Raises:
        ValueError: for variances that are not positive, or no worker.

    Example:
        >>> [round(1 - sign_entropy(8, 1.0, noise) / 8, 3) for noise in (0.1, 1.0, 10.0)]
        [0.492, 0.14, 0.007]

    References:
        Zhang, Tao, Wang and Xu, `Fundamental limits of communication efficiency for model
        aggregation in distributed learning: a rate-distortion approach
        <https://arxiv.org/abs/2206.13984>`_, 2022; Bernstein et al., `signSGD
        <https://arxiv.org/abs/1802.04434>`_, 2018.

    Note:
        The paper states that the gain is significant for SignSGD; this formula is derived here.
    """
    checks.integer("workers", workers, 1)
    checks.positive("signal", signal)
    checks.positive("noise", noise)
    positive = np.arange(workers + 1)
    spread = math.sqrt(noise / signal)  # X/σ_X = spread · z.
    # Beyond z = 9 all signs agree; within it, the chance of m signs has a width of 1/√L.
    reach = min(9.0, 12.0 / spread)
    panels = np.linspace(0, reach, 2 + int(8 * math.sqrt(workers)))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(panels)[:, None] / 2
    z = (panels[:-1, None] + half * (1 + nodes)).ravel()
    mass = (half * weights).ravel() * spread * np.exp(-((spread * z) ** 2) / 2) / _ROOT
    choices = -special.betaln(workers - positive + 1, positive + 1) - math.log1p(workers)
    agree, differ = special.log_ndtr(z), special.log_ndtr(-z)
    chance = np.array([np.exp(c + m * agree + (workers - m) * differ) @ mass
                       for m, c in zip(positive, choices, strict=True)])  # fmt: skip
    chance[-1] += special.ndtr(-spread * reach)
    chance = chance + chance[::-1]  # The signs of −X.
    entropy = special.entr(chance) + chance * choices
    return float(entropy.sum()) / math.log(2)


_ROOT = math.sqrt(2 * math.pi)

"""The fit of the distributions that SIDCo assumes to the magnitudes of a gradient."""

import dataclasses
import math
from typing import Any, final

import numpy as np

from jaxcomp import checks, tables
from jaxcomp.lazy import Lazy
from jaxcomp.tables import Column

special = Lazy("scipy.special")

LAWS = ("exponential", "gamma", "pareto")
SHARES = (0.1, 0.01, 0.001)


@final
@dataclasses.dataclass(frozen=True)
class Law:
    """A law of magnitudes, fitted by moments.

    Attributes:
        name: "exponential", "gamma" or "pareto" (generalised).
        shape: `α` of the gamma or Pareto law; 1 and 0 are the exponential one.
        scale: `β`, in units of the magnitudes.
        distance: the largest distance of its distribution from that of the magnitudes, from 0 to 1
            (Kolmogorov and Smirnov).
        kept: for each of the asked shares, the share of all elements above this law's threshold, as
            a multiple of the share that was asked for: 1 is exact.
    """

    name: str
    shape: float
    scale: float
    distance: float
    kept: tuple[float, ...]

    def above(self, x: Any) -> np.ndarray:
        """The share of non-zero magnitudes above `x` under this law."""
        return _above(self.name, self.shape, self.scale, np.asarray(x, np.float64))

    def threshold(self, share: float) -> float:
        """The threshold that a share of the non-zero magnitudes exceeds under this law.

        Raises:
            ValueError: for a share that is not in (0, 1].
        """
        checks.share("share", share)
        return _threshold(self.name, self.shape, self.scale, share)


@final
@dataclasses.dataclass(frozen=True)
class LawFits:
    """The laws fitted to one gradient's magnitudes; `print` it for a table.

    Attributes:
        elements: how many there are.
        zeros: the share of them that is zero, which laws leave out.
        shares: the shares whose thresholds are compared.
        laws: the fitted laws.
    """

    elements: int
    zeros: float
    shares: tuple[float, ...]
    laws: tuple[Law, ...]

    @property
    def best(self) -> Law:
        """The law of the smallest distance."""
        return min(self.laws, key=lambda law: law.distance)

    def __str__(self) -> str:
        columns = [
            Column("law", "name"),
            Column("shape", "shape", ".3g", right=True),
            Column("scale", "scale", ".3g", right=True),
            Column("distance", "distance", ".3f", right=True),
        ]
        for number, share in enumerate(self.shares):
            kept = lambda law, number=number: law.kept[number]  # noqa: E731
            columns.append(Column(f"kept at {share:g}", kept, ".3g", right=True))
        return tables.text(columns, self.laws)


def fit_laws(gradient: Any, shares: tuple[float, ...] = SHARES) -> LawFits:
    """Fits the laws that SIDCo assumes to a gradient's magnitudes, and measures how well they fit.

    Of the non-zero magnitudes `a`, with mean `μ` and variance `σ²`: the exponential law has
    `β = μ`; the generalised Pareto law `α = ½ (1 − μ²/σ²)`, `β = ½ μ (μ²/σ² + 1)`; the gamma law
    `s = ln μ − mean ln a`, `α = (3 − s + √((s − 3)² + 24 s)) / 12 s`, `β = μ/α`. A gradient with
    such magnitudes has a Laplace, a double generalised Pareto or a double gamma law.

    Args:
        gradient: an array, such as one leaf of a gradient, in any shape and floating dtype.
        shares: fractions of all elements for which thresholds are compared, in (0, 1].

    Returns:
        The exponential, the gamma and the Pareto law, fitted in float64 on the host.

    Raises:
        ValueError: for an array without elements that are not zero, values that are not finite, a
            dtype that is not floating, or shares that are not in (0, 1].

    Example:
        >>> draw = np.random.default_rng(0)
        >>> fits = fit_laws(draw.laplace(size=100_000))
        >>> [round(law.distance, 2) for law in fits.laws]
        [0.0, 0.0, 0.0]
        >>> round(fits.laws[0].kept[1], 1)
        1.0

    References:
        Abdelmoniem et al., `An efficient statistical-based gradient compression technique for
        distributed training systems <https://arxiv.org/abs/2101.10761>`_ (SIDCo), 2021.

    Note:
        Thresholds here are those of a single stage. `jaxcomp.sidco` refines its own in further
        stages, which fit the excess over the threshold, and adapts their number, so it keeps its
        share where a single stage does not. Its `law` chooses among the same laws.
    """
    x = np.asarray(gradient)
    if x.dtype.kind != "f" and x.dtype.name not in ("bfloat16",):
        raise ValueError(f"`gradient` must have a floating dtype, got {x.dtype.name}")
    checks.sequence("shares", shares)
    for one in shares:
        checks.share("shares", one)
    a = np.abs(x.astype(np.float64)).ravel()
    if not np.isfinite(a).all():
        raise ValueError("`gradient` must be finite, got values that are not")
    some = np.sort(a[a > 0])
    if not some.size:
        raise ValueError(f"`gradient` must have an element that is not zero, got {a.size} zeros")
    unit = some[-1]  # Squares of tiny magnitudes underflow.
    scaled = some / unit
    steps = np.arange(some.size + 1) / some.size
    fitted = []
    for name in LAWS:
        shape, scale = _fit(name, scaled)
        below = 1 - _above(name, shape, scale, scaled)
        distance = max(np.max(below - steps[:-1]), np.max(steps[1:] - below))
        kept = []
        for wanted in (share * a.size for share in shares):
            level = _threshold(name, shape, scale, min(1.0, wanted / some.size))
            kept.append(float((some.size - np.searchsorted(scaled, level)) / wanted))
        fitted.append(Law(name, shape, scale * float(unit), float(distance), tuple(kept)))
    return LawFits(a.size, 1 - some.size / a.size, tuple(shares), tuple(fitted))


def _fit(name: str, a: np.ndarray) -> tuple[float, float]:
    """Shape and scale from the moments of positive magnitudes."""
    mean = float(a.mean())
    if name == "exponential":
        return 1.0, mean
    if name == "gamma":
        s = min(max(math.log(mean) - float(np.log(a).mean()), 2.0**-10), 16.0)
        shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        return shape, mean / shape
    # Equal magnitudes have no variance: the fitted distribution ends shortly above them.
    ratio = mean**2 / max(float(a.var()), mean**2 / 16)
    return 0.5 * (1 - ratio), 0.5 * mean * (ratio + 1)


def _above(name: str, shape: float, scale: float, x: np.ndarray) -> np.ndarray:
    z = np.maximum(x, 0) / scale
    if name == "gamma":
        return special.gammaincc(shape, z)
    if name == "exponential" or abs(shape) < 1e-9:
        return np.exp(-z)
    return np.maximum(1 + shape * z, 0) ** (-1 / shape)


def _threshold(name: str, shape: float, scale: float, share: float) -> float:
    nats = -math.log(share)
    if name == "gamma":
        return scale * float(special.gammainccinv(shape, share))
    if name == "exponential" or abs(shape) < 1e-9:
        return scale * nats
    return scale * math.expm1(shape * nats) / shape

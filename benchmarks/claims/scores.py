"""The scores of methods that were trained alike, compared seed by seed."""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

MARGINS = {"%": 0.5, "bits a byte": 0.03}
"""By how much a method may be worse and still counts as good as another one: half a point, and one
percent of a loss of three bits."""


class Paired(NamedTuple):
    """By how much a method's scores are better than another one's, seed by seed.

    Attributes:
        mean: of the differences; negative if the method is worse.
        low: of their 95 % interval by Student's t.
        high: of the same.
    """

    mean: float
    low: float
    high: float


def median(found: Mapping[str, Any], name: str = "score") -> float:
    return statistics.median(found[name])


def told(results: Mapping[str, Any], name: str) -> str:
    """A method's median score and its range over seeds, in words."""
    scores = results["methods"][name]["score"]
    digits = 1 if results["better"] > 0 else 3
    low, high = (f"{x:.{digits}f}" for x in (min(scores), max(scores)))
    return f"{name} {statistics.median(scores):.{digits}f} {results['unit']} ({low} to {high})"


def gain(results: Mapping[str, Any], name: str, over: str) -> float:
    """How much better a method's median score is; negative if it is worse."""
    one, other = (median(results["methods"][each]) for each in (name, over))
    return results["better"] * (one - other)


def wins(results: Mapping[str, Any], name: str, over: str) -> int:
    """The number of seeds for which a method's score is better than the other's."""
    pairs = zip(*(results["methods"][each]["score"] for each in (name, over)), strict=True)
    return sum(results["better"] * (one - other) > 0 for one, other in pairs)


def paired(results: Mapping[str, Any], name: str, over: str) -> Paired:
    """The paired differences of two methods' scores; all minus infinity after a failed run."""
    ours, theirs = (np.asarray(results["methods"][each]["score"], float) for each in (name, over))
    differences = results["better"] * (ours - theirs)
    if not np.isfinite(differences).all():
        return Paired(-math.inf, -math.inf, -math.inf)
    mean, count = float(differences.mean()), len(differences)
    half = float(stats.t.ppf(0.975, count - 1) * differences.std(ddof=1) / math.sqrt(count))
    return Paired(mean, mean - half, mean + half)


def words(difference: Paired) -> str:
    """A difference and its interval."""
    if not math.isfinite(difference.mean):
        return "failed"
    return f"{difference.mean:+.3g} ({difference.low:+.3g} to {difference.high:+.3g})"


def equal(results: Mapping[str, Any], name: str, to: str) -> bool:
    """Whether a method is as good: the interval of its paired differences is above −margin."""
    return paired(results, name, to).low >= -MARGINS[results["unit"]]


def undecided(results: Mapping[str, Any], name: str, to: str) -> bool:
    """Whether the interval contains −margin: more seeds may decide if it is as good."""
    found = paired(results, name, to)
    return found.low < -MARGINS[results["unit"]] <= found.high


def better(results: Mapping[str, Any], name: str, than: str) -> bool:
    """Whether a method is better: the interval of its paired differences is above zero."""
    return paired(results, name, than).low > 0


def as_good(results: Mapping[str, Any], name: str, to: str) -> float:
    """The margin of `equal`: what is allowed over what may be lost."""
    lost = -paired(results, name, to).low
    return math.inf if lost <= 0 else MARGINS[results["unit"]] / lost


def surely(results: Mapping[str, Any], name: str, than: str) -> float:
    """The margin of `better`: the mean difference over half its interval."""
    found = paired(results, name, than)
    half = found.mean - found.low
    if not math.isfinite(found.mean) or not half:
        return 1e3 if found.mean > 0 else 1e-3
    return max(found.mean / half, 1e-3)

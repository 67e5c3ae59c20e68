"""Unbiased codecs, one way and both ways, with stochastic gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from convergence import everywhere

import jaxcomp
from claims import descent
from claims.claim import Claim, Judged, decide
from claims.descent import Make, Oracle, Runs, between, least, plain, within
from jaxcomp import algorithms, codecs
from jaxcomp.feedback.steps import step_for
from jaxcomp.testing import problems

HALVINGS = (5, 6, 7, 8)
STEPS, EVERY, HALF = 6000, 20, 0.5
EXACT = 1e-15
"""The relative squared error below which a method has reached the solution."""


@functools.cache
def problem(name: str) -> Any:
    if name == "least squares":
        return problems.quadratics()
    features, labels = descent.datasets.load_breast_cancer(return_X_y=True)
    return problems.logistic(features, labels, workers=8, ridge=0.1)


def ways(size: int) -> dict[str, Make]:
    """Methods with two-bit QSGD of the whole gradient, and memories that move by 1/(2(1 + ω))."""
    bits = jaxcomp.qsgd(bits=2, bucket_size=size)
    qsgd, contracted = everywhere(bits), codecs.Contractive(codec=bits)
    whole, sign = everywhere(codecs.Identity()), everywhere(jaxcomp.sign(bucket_size=None))
    bare = jaxcomp.Link(qsgd)
    step = step_for(qsgd, 0.5)

    method = functools.partial(descent.method, codec=qsgd)

    return {
        "sgd": plain(jaxcomp.Dense()),
        "qsgd": plain(jaxcomp.Gather(bare)),
        "qsgd both ways": plain(jaxcomp.TwoShot(bare, bare)),
        "diana": method(algorithms.diana, step=step),
        "diana, half": method(algorithms.artemis, down=whole, p=HALF),
        "artemis": method(algorithms.artemis),
        "artemis, half": method(algorithms.artemis, p=HALF),
        "artemis PP1, half": method(algorithms.artemis, p=HALF, absent="left out"),
        "dore": method(algorithms.dore, down=sign),
        "dore, qsgd down": method(algorithms.dore, down=everywhere(contracted)),
        "mcm": method(algorithms.mcm),
        "mcm, half": method(algorithms.mcm, p=HALF),
        "rand_mcm": method(algorithms.rand_mcm),
        "rand_mcm, half": method(algorithms.rand_mcm, p=HALF),
    }


def measured(
    names: Sequence[str], title: str, *, noise: float = 1.0, halvings: Sequence[int] = HALVINGS
) -> dict[str, Runs]:
    """Descents with rates of `2^−h / L`, on batches of eight rows."""
    given = problem(title)
    rates = [2.0**-h / given.smoothness for h in halvings]
    every = ways(given.solution.size)
    return descent.run_all(
        {name: every[name] for name in names},
        given,
        f"{title}, noise {noise:g}",
        rates=rates,
        steps=STEPS,
        oracle=Oracle(batch=8, noise=noise),
        every=EVERY,
    )


def floors(runs: Runs) -> list[list[float]]:
    """At each rate, the median and the range over seeds of the error that is left."""
    return [descent.spread(row) for row in runs.floors]


def slope(found: Sequence[Sequence[float]]) -> float:
    """How the floor follows the rate over the three smallest rates: 1 for a proportion."""
    middle = np.log2([row[0] for row in found[-3:]])
    return float((middle[0] - middle[-1]) / 2)


def _noise(names: Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Floors with noise, and errors in the end without noise at the solution."""
    title = "least squares"
    noisy = measured(names, title)
    silent = measured([*names, *others], title, noise=0.0, halvings=(6,))
    return {
        "numbers": {
            "halvings": list(HALVINGS),
            "floors": {name: floors(runs) for name, runs in noisy.items()},
            "silent": {
                name: descent.spread(runs.errors[0, :, -1]) for name, runs in silent.items()
            },
        }
    }


def exactness(numbers: dict[str, Any], *names: str) -> float:
    """The margin by which all seeds reach the solution without noise there."""
    return within(EXACT, max(numbers["silent"][name][2] for name in names))


def _stalling(numbers: dict[str, Any], *names: str) -> float:
    """The margin by which all seeds stay away from it."""
    return min(numbers["silent"][name][1] for name in names) / 1e-6


def _linearity(*powers: float) -> float:
    """The margin by which floors are proportional to the rate."""
    return least(*(between(0.75, power, 1.25) for power in powers))


def _noise_judged(
    words: str, numbers: dict[str, Any], linear: float, exact: float, stalled: float
) -> Judged:
    """The verdict from the three margins; the exact solution alone is a part."""
    verdict = decide(linear >= 1 and exact > 1 and stalled > 1, exact > 1)
    return Judged(f"floor ∝ rate^{words}; {ends(numbers)}", verdict, least(linear, exact, stalled))


def ends(numbers: dict[str, Any]) -> str:
    """The errors that are left without noise at the solution, in words."""
    errors = (f"{name} {three[0]:.1e}" for name, three in numbers["silent"].items())
    return "without noise at the solution: " + ", ".join(errors)


@descent.in_float64
def _artemis() -> dict[str, Any]:
    return _noise(["artemis", "artemis, half"], ["artemis PP1, half", "qsgd both ways"])


def _artemis_judged(numbers: dict[str, Any]) -> Judged:
    slopes = {name: slope(found) for name, found in numbers["floors"].items()}
    words = ", ".join(f"{name} {power:.2f}" for name, power in slopes.items())
    exact = exactness(numbers, "artemis", "artemis, half")
    stalled = _stalling(numbers, "artemis PP1, half", "qsgd both ways")
    return _noise_judged(f"p, p: {words}", numbers, _linearity(*slopes.values()), exact, stalled)


@descent.in_float64
def _diana() -> dict[str, Any]:
    return _noise(["diana"], ["qsgd"])


def _diana_judged(numbers: dict[str, Any]) -> Judged:
    power = slope(numbers["floors"]["diana"])
    exact, stalled = exactness(numbers, "diana"), _stalling(numbers, "qsgd")
    return _noise_judged(f"{power:.2f}", numbers, _linearity(power), exact, stalled)


@descent.in_float64
def _dore() -> dict[str, Any]:
    found = _noise(["dore", "sgd"], [])
    like = {"w": descent.jax.ShapeDtypeStruct((1000, 1000), np.float32)}
    up, down = jaxcomp.qsgd(bits=2), jaxcomp.sign()
    sent = jaxcomp.wire_bytes(up, like) + jaxcomp.wire_bytes(down, like)
    found["numbers"]["saved"] = 1 - sent / (2 * 4e6)
    return found


def _dore_judged(numbers: dict[str, Any]) -> Judged:
    lost = numbers["floors"]["dore"][-1][0] / numbers["floors"]["sgd"][-1][0]
    exact, saved = exactness(numbers, "dore"), numbers["saved"]
    words = (
        f"{saved:.1%} of the bytes of 32-bit gradients saved; {ends(numbers)}; with noise, the "
        f"floor is {lost:.1f} times that of SGD at 2⁻⁸/L"
    )
    part = saved > 0.95 and exact > 1
    margin = least(within(0.05, 1 - saved), exact, within(1.5, lost))
    return Judged(words, decide(part and lost < 1.5, part), margin)


@descent.in_float64
def _averages() -> dict[str, Any]:
    runs = measured(["diana", "artemis", "mcm"], "least squares", halvings=(6, 7))
    last = len(next(iter(runs.values())).averaged[0, 0]) - 1
    at = [last // 8, last // 4, last // 2, last]
    return {
        "numbers": {
            "steps": [(t + 1) * EVERY for t in at],
            "floors": {name: floors(each)[-1] for name, each in runs.items()},
            "averaged": {
                name: [descent.spread(each.averaged[-1, :, t]) for t in at]
                for name, each in runs.items()
            },
            "tail": {name: descent.spread(each.tail[-1]) for name, each in runs.items()},
        }
    }


def _averages_judged(numbers: dict[str, Any]) -> Judged:
    begin, end = numbers["steps"][0], numbers["steps"][-1]
    powers, gains = {}, {}
    for name, rows in numbers["averaged"].items():
        powers[name] = float(np.log(rows[-1][0] / rows[0][0]) / np.log(end / begin))
        gains[name] = numbers["floors"][name][0] / numbers["tail"][name][0]
    words = ", ".join(
        f"{name} {gains[name]:.0f} times below its floor, ∝ K^{powers[name]:.2f}" for name in gains
    )
    down = numbers["tail"]["artemis"][0] / numbers["tail"]["diana"][0]
    kept = numbers["tail"]["mcm"][0] / numbers["tail"]["diana"][0]
    words += f"; against DIANA's average, Artemis {down:.1f} and MCM {kept:.1f}"
    falls = all(-1.35 <= power <= -0.65 for power in powers.values())
    smallest = min(gains.values())
    margins = [between(0.65, -power, 1.35) for power in powers.values()]
    return Judged(
        words, decide(falls and smallest > 3, smallest > 1), least(*margins, smallest / 3)
    )


_ARTEMIS = (
    "Philippenko and Dieuleveut, Bidirectional compression in heterogeneous settings for "
    "distributed or federated learning with partial participation, 2020, "
)
MCM = (
    "Philippenko and Dieuleveut, Preserved central model for faster bidirectional compression in "
    "distributed settings, 2021, "
)
SQUARES = (
    "Least squares of 8 workers that disagree, two-bit QSGD, batches of 8 of 100 rows, "
    f"{STEPS:,} steps, rates 2⁻⁵ to 2⁻⁸/L, {descent.SEEDS} seeds"
)

CLAIMS = (
    Claim(
        name="artemis-noise-floor",
        methods=("artemis", "Artemis"),
        source=_ARTEMIS + "Theorem 1 and the figures of synthetic data",
        claim="With memory, convergence is linear up to a threshold that is proportional to the "
        "step and to the gradients' noise at the solution only: workers that disagree, or that "
        "are absent, add nothing. Without memory, or with the first variant (PP1), it saturates.",
        setting=SQUARES + "; the noise at the solution is left in, and taken out.",
        judge=_artemis_judged,
        criterion="floor ∝ rate^p, p in 0.75 to 1.25; without noise, each seed < 1e-15, and "
        "> 1e-6 for PP1 and for QSGD",
        run=_artemis,
        minutes=1,
    ),
    Claim(
        name="diana-noise-floor",
        methods=("diana",),
        source="Mishchenko et al., Distributed learning with compressed gradient differences, "
        "2019, the theorem of strongly convex losses",
        claim="Linear convergence to a neighbourhood that is proportional to the step and to the "
        "gradients' noise, for workers that disagree too, where quantised gradients (QSGD, "
        "TernGrad) stall.",
        setting=SQUARES + "; the noise at the solution is left in, and taken out.",
        judge=_diana_judged,
        criterion="floor ∝ rate^p, p in 0.75 to 1.25; without noise, each seed < 1e-15, and "
        "> 1e-6 for QSGD",
        run=_diana,
        minutes=0.6,
    ),
    Claim(
        name="dore-savings",
        methods=("dore",),
        source="Liu et al., A double residual compression algorithm for efficient distributed "
        "learning, 2020, abstract",
        claim="DORE saves more than 95 % of the communication of uncompressed SGD, and keeps its "
        "linear convergence and its speed.",
        setting=SQUARES + "; two-bit QSGD up and scaled signs down; bytes of a million float32.",
        judge=_dore_judged,
        criterion="over 95 % of bytes saved; each seed < 1e-15 without noise; with it, floor "
        "< 1.5 times SGD's at 2⁻⁸/L",
        why="false",
        run=_dore,
        minutes=0.6,
    ),
    Claim(
        name="polyak-ruppert-averages",
        methods=("artemis", "mcm", "diana"),
        source=_ARTEMIS + "Theorem 2; " + MCM + "Theorem 3",
        claim="The mean of all iterates goes below the floor of the last one, and its error falls "
        "with the number of steps at a constant step.",
        setting=SQUARES.replace("rates 2⁻⁵ to 2⁻⁸/L", "rate 2⁻⁷/L")
        + "; the mean of all iterates over time, and of the second half.",
        judge=_averages_judged,
        criterion="all three: the mean's error ∝ K^p, p in −1.35 to −0.65; that of the second "
        "half's mean < a third of the floor",
        run=_averages,
        minutes=0.5,
    ),
)

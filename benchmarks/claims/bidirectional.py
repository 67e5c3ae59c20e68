"""Unbiased codecs, one way and both ways, with stochastic gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from convergence import everywhere

import jaxcomp
from claims import descent
from claims.claim import Claim, decide
from claims.descent import Make, Oracle, Runs, plain
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


def _exact(numbers: dict[str, Any], *names: str) -> bool:
    return all(numbers["silent"][name][2] < EXACT for name in names)


def _stalled(numbers: dict[str, Any], *names: str) -> bool:
    return all(numbers["silent"][name][1] > 1e-6 for name in names)


def _ends(numbers: dict[str, Any]) -> str:
    ends = (f"{name} {three[0]:.1e}" for name, three in numbers["silent"].items())
    return "without noise at the solution: " + ", ".join(ends)


@descent.in_float64
def _artemis() -> dict[str, Any]:
    return _noise(["artemis", "artemis, half"], ["artemis PP1, half", "qsgd both ways"])


def _artemis_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    slopes = {name: slope(found) for name, found in numbers["floors"].items()}
    words = ", ".join(f"{name} {power:.2f}" for name, power in slopes.items())
    linear = all(0.75 <= power <= 1.25 for power in slopes.values())
    exact = _exact(numbers, "artemis", "artemis, half")
    stalled = _stalled(numbers, "artemis PP1, half", "qsgd both ways")
    return f"floor ∝ rate^p, p: {words}; {_ends(numbers)}", decide(
        linear and exact and stalled, exact
    )


@descent.in_float64
def _diana() -> dict[str, Any]:
    return _noise(["diana"], ["qsgd"])


def _diana_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    power = slope(numbers["floors"]["diana"])
    exact, stalled = _exact(numbers, "diana"), _stalled(numbers, "qsgd")
    words = f"floor ∝ rate^{power:.2f}; {_ends(numbers)}"
    return words, decide(0.75 <= power <= 1.25 and exact and stalled, exact)


@descent.in_float64
def _dore() -> dict[str, Any]:
    found = _noise(["dore", "sgd"], [])
    like = {"w": descent.jax.ShapeDtypeStruct((1000, 1000), np.float32)}
    up, down = jaxcomp.qsgd(bits=2), jaxcomp.sign()
    sent = jaxcomp.wire_bytes(up, like) + jaxcomp.wire_bytes(down, like)
    found["numbers"]["saved"] = 1 - sent / (2 * 4e6)
    return found


def _dore_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    lost = numbers["floors"]["dore"][-1][0] / numbers["floors"]["sgd"][-1][0]
    exact, saved = _exact(numbers, "dore"), numbers["saved"]
    words = (
        f"{saved:.1%} of the bytes of 32-bit gradients saved; {_ends(numbers)}; with noise, the "
        f"floor is {lost:.1f} times that of SGD at 2⁻⁸/L"
    )
    return words, decide(saved > 0.95 and exact and lost < 1.5, saved > 0.95 and exact)


def _against(
    base: str, names: Sequence[str], titles: Sequence[str], halvings: Sequence[int] = HALVINGS
) -> dict[str, Any]:
    found = {}
    for title in titles:
        runs = measured([base, *names], title, halvings=halvings)
        found[title] = {name: floors(each) for name, each in runs.items()}
    return {"numbers": {"halvings": list(halvings), "base": base, "floors": found}}


def _power(halvings: int) -> str:
    return "2⁻" + str(halvings).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _ratio(numbers: dict[str, Any], title: str, name: str, at: int) -> float:
    found = numbers["floors"][title]
    return found[name][at][0] / found[numbers["base"]][at][0]


DEAR = ("artemis", "dore", "dore, qsgd down")
"""Methods whose workers descend by what they receive."""


@descent.in_float64
def _mcm() -> dict[str, Any]:
    return _against("diana", ["mcm", *DEAR], ["least squares", "breast cancer"])


def _mcm_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    """At DIANA's best rate: at a smaller one the runs are too short to reach the floor."""
    words, free, dear = [], [], []
    for title, found in numbers["floors"].items():
        at = int(np.argmin([row[0] for row in found["diana"]]))
        excess = [_ratio(numbers, title, "mcm", rate) for rate in range(at + 1)]
        ratio = {name: _ratio(numbers, title, name, at) for name in ("mcm", *DEAR)}
        listed = ", ".join(f"{name} {each:.2f}" for name, each in ratio.items())
        falls = ", ".join(f"{each:.2f}" for each in excess)
        words.append(
            f"{title} at {_power(numbers['halvings'][at])}/L: {listed}; mcm from 2⁻⁵/L on: {falls}"
        )
        free.append(ratio["mcm"] <= 1.1 and excess[0] >= excess[-1])
        dear.append({name: ratio[name] >= 1.5 for name in DEAR})
    lost = all(all(each.values()) for each in dear)
    text = f"floors in units of DIANA's, {'; '.join(words)}"
    return text, decide(all(free) and lost, all(free) and all(each["artemis"] for each in dear))


@descent.in_float64
def _rand_mcm() -> dict[str, Any]:
    return _against("diana", ["mcm", "rand_mcm"], ["least squares"], (4, 5, 6))


def _rand_mcm_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    """The excess over DIANA at the largest rate at which MCM comes down."""
    words, gains = [], []
    for title, found in numbers["floors"].items():
        at = next(i for i, row in enumerate(found["mcm"]) if row[0] < 10 * found["diana"][i][0])
        one, own = (_ratio(numbers, title, name, at) - 1 for name in ("mcm", "rand_mcm"))
        words.append(
            f"{title} at {_power(numbers['halvings'][at])}/L: MCM {one:+.0%}, Rand-MCM {own:+.0%}"
        )
        gains.append(own / one if one > 0 else np.inf)
    return (
        "floor above DIANA's, " + "; ".join(words),
        decide(max(gains) <= 0.5, max(gains) < 1),
    )


@descent.in_float64
def _mcm_half() -> dict[str, Any]:
    names = ["mcm, half", "rand_mcm, half", "artemis, half"]
    found = _against("diana, half", names, ["least squares"])
    silent = measured(names[:2], "least squares", noise=0.0, halvings=(6,))
    found["numbers"]["silent"] = {
        name: descent.spread(runs.errors[0, :, -1]) for name, runs in silent.items()
    }
    return found


def _mcm_half_judged(numbers: dict[str, Any]) -> tuple[str, str]:
    names = ("mcm, half", "rand_mcm, half", "artemis, half")
    last = {name: _ratio(numbers, "least squares", name, -1) for name in names}
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in last.items())
    exact = _exact(numbers, *names[:2])
    free = max(last[name] for name in names[:2]) <= 1.15
    return (
        f"floors in units of one-way compression, at 2⁻⁸/L: {words}; {_ends(numbers)}",
        decide(exact and free, exact),
    )


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


def _averages_judged(numbers: dict[str, Any]) -> tuple[str, str]:
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
    return words, decide(falls and min(gains.values()) > 3, min(gains.values()) > 1)


_ARTEMIS = (
    "Philippenko and Dieuleveut, Bidirectional compression in heterogeneous settings for "
    "distributed or federated learning with partial participation, 2020, "
)
_MCM = (
    "Philippenko and Dieuleveut, Preserved central model for faster bidirectional compression in "
    "distributed settings, 2021, "
)
_SQUARES = (
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
        setting=_SQUARES + "; the noise at the solution is left in, and taken out.",
        judge=_artemis_judged,
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
        setting=_SQUARES + "; the noise at the solution is left in, and taken out.",
        judge=_diana_judged,
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
        setting=_SQUARES + "; two-bit QSGD up and scaled signs down; bytes of a million float32.",
        judge=_dore_judged,
        run=_dore,
        minutes=0.6,
    ),
    Claim(
        name="mcm-down-compression",
        methods=("mcm", "MCM", "artemis", "dore"),
        source=_MCM + "abstract and Theorem 3",
        claim="Compression of the way down adds only terms of second order in the step: MCM has "
        "the rate of one-way compression, where methods that descend by the compressed gradient "
        "(Artemis, Dore) lose a factor.",
        setting=_SQUARES + "; and logistic regression on breast cancer with a ridge of 0.1.",
        judge=_mcm_judged,
        run=_mcm,
        minutes=1.5,
        note="DIANA is the one-way method, with the memory step of the others. Floors are compared "
        "at DIANA's best rate, below which runs are too short. It holds if MCM is within a tenth "
        "there, with an excess that falls with the rate, and the others lose half as much again; "
        "in part if Artemis alone does. DORE has error feedback on the way down.",
    ),
    Claim(
        name="rand-mcm-averages",
        methods=("rand_mcm",),
        source=_MCM + "section on Rand-MCM",
        claim="With a message of its own to each worker, the errors of the way down average out "
        "over workers, so what MCM adds is divided by their number (quadratic losses).",
        setting=_SQUARES.replace("rates 2⁻⁵ to 2⁻⁸/L", "rates 2⁻⁴ to 2⁻⁶/L")
        + "; at the largest rate at which MCM converges, where its second-order term is seen.",
        judge=_rand_mcm_judged,
        run=_rand_mcm,
        minutes=0.5,
    ),
    Claim(
        name="mcm-partial-participation",
        methods=("mcm", "rand_mcm"),
        source=_MCM + "extension to partial participation",
        claim="MCM keeps its rate if only a part of the workers takes part in a step.",
        setting=_SQUARES + "; each worker takes part with probability ½.",
        judge=_mcm_half_judged,
        run=_mcm_half,
        minutes=0.7,
        note="The extension is ours: absent workers are remembered as in Artemis (PP2), and all "
        "workers receive the model.",
    ),
    Claim(
        name="polyak-ruppert-averages",
        methods=("artemis", "mcm", "diana"),
        source=_ARTEMIS + "Theorem 2; " + _MCM + "Theorem 3",
        claim="The mean of all iterates goes below the floor of the last one, and its error falls "
        "with the number of steps at a constant step.",
        setting=_SQUARES.replace("rates 2⁻⁵ to 2⁻⁸/L", "rate 2⁻⁷/L")
        + "; the mean of all iterates over time, and of the second half.",
        judge=_averages_judged,
        run=_averages,
        minutes=0.5,
    ),
)

"""Contractive codecs and messages that are left out, with full gradients."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
from convergence import AXIS, Prices, Way, everywhere, price, stepped
from rich.progress import track

import jaxcomp
from claims import descent, nonconvex
from claims.claim import Claim, Judged, decide
from claims.descent import Oracle, Runs, least, within
from jaxcomp import algorithms, codecs

TARGETS = (1e-2, 1e-4, 1e-6)
"""Of the squared norm of the gradient, relative to that at the start."""

RATES = tuple(2.0**j for j in range(-6, 4))
STEPS, EVERY = 8000, 4
Family = Callable[[Any, Any], Way]


CENSORING = (0.1, 0.3, 1.0, 3.0)
"""`c` of a gate that lets a message pass if it has moved by more than `c ‖Δx‖²/rate²`."""


@functools.cache
def families(workers: int = 20, kept: int = 1) -> dict[str, tuple[Family, bool]]:
    """Methods, and whether their rate may be traced; bits are those of the way up.

    DIANA and MARINA send `kept` random elements.
    """
    size = nonconvex.regularized(workers).solution.size
    top = everywhere(jaxcomp.top_k(fraction=0.1))
    random = everywhere(jaxcomp.random_k(fraction=kept / size, bucket_size=size))
    sign, whole = everywhere(jaxcomp.sign(bucket_size=None)), everywhere(codecs.Identity())

    def method(make: Any, codec: Any, down: Any = None, **given: Any):
        costs = price(codec, size), price(down, size) if down else 0.0
        prices = Prices(*costs, 64.0 * size, workers)

        def way(rate: Any, key: Any) -> Way:
            return Way(stepped(make, codec, rate, key=key, **given), prices)

        return way, True

    def dense(rate: Any, key: Any) -> Way:
        tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS, key=key), optax.sgd(rate))
        return Way(tx, Prices(64.0 * size, 0.0, 64.0 * size, workers))

    def lag(rate: Any, key: Any, censoring: float) -> Way:
        tx = algorithms.lag(AXIS, learning_rate=rate, censoring=censoring, key=key)
        return Way(tx, Prices(price(whole, size), 0.0, 64.0 * size, workers))

    def clag(rate: Any, key: Any, censoring: float) -> Way:
        return method(algorithms.clag, top, threshold=censoring / rate**2)[0](rate, key)

    lazy = {"lag": lag, "clag": clag}

    p = price(random, size) / (64 * size)
    return {
        "gd": (dense, True),
        "ef_sgd": method(algorithms.ef_sgd, top),
        "ef21": method(algorithms.ef21, top),
        "ef21_bc, sign": method(algorithms.ef21_bc, sign, sign),
        "double_squeeze, sign": method(algorithms.double_squeeze, sign, sign),
        "diana": method(algorithms.diana, random),
        "marina": method(algorithms.marina, random, p=p),
        **{
            f"{name}, {censoring:g}": (functools.partial(make, censoring=censoring), False)
            for name, make in lazy.items()
            for censoring in CENSORING
        },
    }


def arena(
    *names: str,
    workers: int = 20,
    weight: float = 0.1,
    kept: int = 1,
) -> dict[str, Any]:
    """Bits of the methods until each target, at the best of the same rates."""
    problem = nonconvex.regularized(workers, weight)
    rates = [factor / problem.smoothness for factor in RATES]
    found = {}
    for name in track(names, description="methods"):
        family, free = families(workers, kept)[name]
        settings: Any = {"steps": STEPS, "oracle": Oracle(batch=0), "every": EVERY, "rates": rates}
        if free:
            seeds = descent.SEEDS if name in ("diana", "marina") else 1
            runs = descent.run(family, problem, seeds=seeds, **settings)
        else:
            make = _of_rate(family)
            runs = nonconvex.run_each(make, problem, seeds=1, **settings)
        found[name] = _row(runs)
    return {"numbers": {"targets": list(TARGETS), "factors": list(RATES), "methods": found}}


def _of_rate(family: Family) -> Callable[[float], Way]:
    return lambda rate: family(rate, 0)


def _row(runs: Runs) -> dict[str, Any]:
    costs = [nonconvex.cost(runs, target) for target in TARGETS]
    ends = np.median(runs.errors[..., -1], axis=1)
    return {
        "bits": [three if there else None for three, _, there in costs],
        "factor": [RATES[at] if there else None for _, at, there in costs],
        "end": float(f"{np.nanmin(np.where(np.isfinite(ends), ends, np.inf)):.4g}"),
    }


def _bits(numbers: dict[str, Any], name: str, target: int) -> float:
    found = numbers["methods"][name]["bits"][target]
    return found[0] if found else np.inf


def _listed(numbers: dict[str, Any], target: int) -> str:
    words = []
    for name in numbers["methods"]:
        bits = _bits(numbers, name, target)
        words.append(f"{name} {bits / 8e3:.2f} kB" if np.isfinite(bits) else f"{name} never")
    return f"to {numbers['targets'][target]:.0e}: " + ", ".join(words)


@descent.in_float64
def _ef21() -> dict[str, Any]:
    return arena("gd", "ef_sgd", "ef21")


def _ef21_judged(numbers: dict[str, Any]) -> Judged:
    ef, ef21 = ([_bits(numbers, name, at) for at in (0, 2)] for name in ("ef_sgd", "ef21"))
    verdict = decide(ef21[0] <= ef[0] and ef21[1] < ef[1], ef21[1] < ef[1])
    words = f"{_listed(numbers, 0)}; {_listed(numbers, 2)}"
    return Judged(words, verdict, least(*map(within, ef, ef21)))


@descent.in_float64
def _both_ways() -> dict[str, Any]:
    return arena("gd", "ef21_bc, sign", "double_squeeze, sign")


def _ef21_bc_judged(numbers: dict[str, Any]) -> Judged:
    ours, dense = (_bits(numbers, name, 2) for name in ("ef21_bc, sign", "gd"))
    other = _bits(numbers, "double_squeeze, sign", 2)
    verdict = decide(ours <= dense / 4 and ours < other, ours < dense)
    words = f"{_listed(numbers, 0)}; {_listed(numbers, 2)}"
    return Judged(words, verdict, least(within(min(dense / 4, other), ours)))


WEIGHTS, FEW, KEPT = (0.1, 0.001), 5, (1, 5, 10)


@descent.in_float64
def _marina() -> dict[str, Any]:
    found = {}
    for weight in WEIGHTS:
        for kept in KEPT:
            rows = arena("diana", "marina", workers=FEW, weight=weight, kept=kept)
            title = f"λ = {weight:g}, {kept} of 31"
            theory = {kind: _at(steps, weight, kept) for kind, steps in THEORY.items()}
            found[title] = rows["numbers"] | theory
    return {"numbers": {"problems": found}}


def _authors(problem: Any, omega: float) -> dict[str, float]:
    """As in the code of MARINA's authors, which has the largest constant of the workers."""
    largest, n = np.max(problem.smoothnesses), problem.workers
    return {
        "diana": 1 / (10 * largest * np.sqrt(1 + omega / n) * (2 + omega)),
        "marina": 1 / (largest * (1 + omega / np.sqrt(n))),
    }


def _longest(problem: Any, omega: float) -> dict[str, float]:
    """MARINA's by its theorem, and one for DIANA that is at least ten times the authors'."""
    smooth, n = problem.smoothness, problem.workers
    left = np.sqrt(np.mean(problem.smoothnesses**2))
    return {
        "diana": 1 / (smooth * (1 + (1 + omega) * np.sqrt(omega / n))),
        "marina": 1 / (smooth + left * omega / np.sqrt(n)),
    }


THEORY = {"authors": _authors, "theory": _longest}
"""Steps of the two methods, from the variance ω of the codec, with p = 1/(1 + ω)."""


def _at(steps: Callable[[Any, float], dict[str, float]], weight: float, kept: int) -> dict:
    """Bits until each target with these steps."""
    problem = nonconvex.regularized(FEW, weight)
    rates, smooth = steps(problem, problem.solution.size / kept - 1), problem.smoothness
    found = {}
    for name, rate in rates.items():
        settings: Any = {"steps": STEPS, "oracle": Oracle(batch=0), "every": EVERY}
        runs = descent.run(families(FEW, kept)[name][0], problem, rates=[rate], **settings)
        costs = [nonconvex.cost(runs, target) for target in TARGETS]
        found[name] = {
            "factor": float(f"{rate * smooth:.3g}"),
            "bits": [three if there else None for three, _, there in costs],
        }
    return found


def _marina_judged(numbers: dict[str, Any]) -> Judged:
    """In all cases in which one of the two gets to a target."""
    words, margins, wins = [], [], {kind: [] for kind in (*THEORY, "tuned")}
    for title, rows in numbers["problems"].items():
        fixed = {kind: {"methods": rows[kind], "targets": rows["targets"]} for kind in THEORY}
        for kind, found in (*fixed.items(), ("tuned", rows)):
            for at in range(len(rows["targets"])):
                ours, other = (_bits(found, name, at) for name in ("marina", "diana"))
                if min(ours, other) < np.inf:
                    wins[kind].append(ours < other)
                    margins.append(within(other, ours))
            if kind == "theory":
                words.append(f"{title}, {_listed(found, 1)}")
    text = "; ".join(
        f"{kind}: fewer bits in {sum(won)} of {len(won)} cases" for kind, won in wins.items()
    )
    verdict = decide(all(all(won) for won in wins.values()), all(wins["authors"]))
    return Judged(f"steps of {text}; by theory, {'; '.join(words)}", verdict, least(*margins))


@descent.in_float64
def _clag() -> dict[str, Any]:
    lazy = [f"{name}, {censoring:g}" for name in ("lag", "clag") for censoring in CENSORING]
    return arena("gd", "ef21", *lazy)


def _clag_judged(numbers: dict[str, Any]) -> Judged:
    wins, margins = [], []
    for at in range(len(numbers["targets"])):
        clag, lag = (
            min(_bits(numbers, name, at) for name in numbers["methods"] if name.startswith(kind))
            for kind in ("clag", "lag")
        )
        other = min(lag, _bits(numbers, "ef21", at))
        wins.append(clag < other)
        margins.append(within(np.nextafter(other, 0), clag))  # As many are not fewer.
    words = "; ".join(_listed(numbers, at) for at in range(len(wins)))
    return Judged(words, decide(all(wins), any(wins)), least(*margins))


_SETTING = (
    "Logistic regression on breast cancer with the bounded regularizer 0.1 Σ x²/(1 + x²), which is "
    "not convex, 20 workers with sorted rows, full gradients, {}; bits that a worker sends until "
    "the squared norm of the gradient has fallen by a factor, each method at its best of ten rates "
    "from 2⁻⁶/L to 2³/L"
)

CLAIMS = (
    Claim(
        name="ef21-against-ef",
        methods=("ef21", "ef_sgd"),
        source="Richtárik, Sokolov and Fatkhullin, EF21: a new, simpler, theoretically better, and "
        "practically faster error feedback, 2021, the figures of logistic regression",
        claim="EF21 has a rate of O(1/T), where that of error feedback is O(1/T^(2/3)), and is "
        "faster in practice.",
        setting=_SETTING.format("top 10 %") + ".",
        judge=_ef21_judged,
        criterion="fewer bits than error feedback until the squared gradient falls to 1e-6, and "
        "at most as many until 1e-2",
        run=_ef21,
        minutes=1.5,
    ),
    Claim(
        name="ef21-both-ways",
        methods=("ef21_bc", "double_squeeze"),
        source="Fatkhullin et al., EF21 with bells & whistles, 2021, the theorem and figure of "
        "EF21-BC; Tang et al., DoubleSqueeze, 2019, abstract",
        claim="Compression in both directions keeps the rate of EF21; error feedback both ways "
        "(DoubleSqueeze), whose rate needs workers that agree, is beside it.",
        setting=_SETTING.format("scaled signs both ways") + "; bits of both ways.",
        judge=_ef21_bc_judged,
        criterion="until 1e-6 of the squared gradient: at most a quarter of gradient descent's "
        "bits, and fewer than DoubleSqueeze's",
        run=_both_ways,
        minutes=1.5,
    ),
    Claim(
        name="marina-against-diana",
        methods=("marina", "diana"),
        source="Gorbunov et al., MARINA: faster non-convex distributed learning with compression, "
        "2021, abstract and Figure 1",
        claim="On losses that are not convex, MARINA's estimator gives it a theoretical and "
        "practical performance that is superior to DIANA's: it needs fewer bits.",
        setting=_SETTING.replace("20 workers", f"{FEW} workers").format(
            "1, 5 and 10 random elements of 31"
        )
        + f", and at the steps of theory; also with 0.001 for 0.1; targets of 1e-2, 1e-4 and "
        f"1e-6; {descent.SEEDS} seeds.",
        judge=_marina_judged,
        criterion="to each target that one of the two reaches, fewer bits than DIANA, with all "
        "three kinds of steps",
        why="false",
        run=_marina,
        minutes=1,
        note="Steps of *authors* are those of the code that belongs to the paper, with the largest "
        "constant of the workers, 1/(L(1 + ω/√n)) and, for DIANA, 1/(10 L(2 + ω)√(1 + ω/n)); steps "
        "of *theory* are 1/(L + L̃ω/√n) and, for DIANA, 1/(L(1 + (1 + ω)√(ω/n))), without the "
        "factor of ten. DIANA bears far longer steps than its theory allows, and so it gains more "
        "from tuning. It holds if MARINA is ahead in all cases with all steps, and in part if it "
        "is with those of the authors.",
    ),
    Claim(
        name="clag-against-ef21-and-lag",
        methods=("clag", "lag", "ef21"),
        source="Richtárik et al., 3PC: three point compressors for communication-efficient "
        "distributed training and a better theory for lazy aggregation, 2022, the heat maps of "
        "CLAG",
        claim="Lazy aggregation of compressed differences (CLAG) needs fewer bits than EF21 and "
        "than LAG.",
        setting=_SETTING.format("top 10 %")
        + "; for both the best of four censorings c from 0.1 to 3, of c ‖Δx‖²/rate².",
        judge=_clag_judged,
        criterion="fewer bits than EF21 and than LAG until each of the three targets",
        fixed="88e61ce7",
        run=_clag,
        minutes=14,
        note="The gate of the paper compares with the change of the worker's gradient. Bits are "
        "recorded every fourth step.",
    ),
)

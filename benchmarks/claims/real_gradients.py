"""Laws and correlations of gradients, measured on two networks in training."""

import statistics
from typing import Any

import jax
import numpy as np

from claims import networks
from claims.claim import Claim, Judged, decide
from claims.descent import least, within
from claims.trained_quantizers import BOTH, PLANS, gradients
from jaxcomp import theory
from jaxcomp.theory import fit_laws, gradient_statistics

MOMENTS = (0, 50, 150)
SMALLEST = 256
SETTING = f"{BOTH}: gradients of four workers after {', '.join(map(str, MOMENTS))} steps"


def _leaves(task: networks.Task, vector: Any) -> dict[str, np.ndarray]:
    """The leaves of a gradient with at least 256 elements that are not zero."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    parts = np.split(np.asarray(vector), np.cumsum(sizes)[:-1])
    found = dict(zip(names, parts, strict=True))
    return {name: part for name, part in found.items() if np.count_nonzero(part) >= SMALLEST}


def _laws() -> dict[str, Any]:
    rows = []
    for make, plan in PLANS.items():
        task = make()
        for moment, workers in zip(MOMENTS, gradients(task, plan, MOMENTS), strict=True):
            for name, leaf in _leaves(task, workers[0]).items():
                fits = fit_laws(leaf)
                rows.append({
                    "task": task.name,
                    "step": moment,
                    "leaf": name,
                    "distances": {law.name: round(law.distance, 4) for law in fits.laws},
                })  # fmt: skip
    return {"numbers": {"rows": rows}}


def _laws_judged(numbers: dict[str, Any]) -> Judged:
    words, margins = [], []
    tasks = sorted({row["task"] for row in numbers["rows"]})
    for task in tasks:
        rows = [row for row in numbers["rows"] if row["task"] == task]
        best = [min(row["distances"].values()) for row in rows]
        wins = [min(row["distances"], key=row["distances"].get) for row in rows]
        middle = statistics.median(best)
        words.append(
            f"{task}: {middle:.3f} ({min(best):.3f} to {max(best):.3f}) in {len(rows)} leaves and "
            "moments, "
            + ", ".join(f"{law} {wins.count(law)}" for law in ("exponential", "gamma", "pareto"))
        )
        margins += [within(0.05, middle), within(0.1, max(best))]
    text = f"distance of the best law, and how often it is which, {'; '.join(words)}"
    return Judged(text, decide(min(margins) >= 1, part=max(margins) >= 1), least(*margins))


ROUNDS, GROWTHS, OVERHEADS = 100.0, (5.0, 20.0, 80.0), (64.0, 128.0, 256.0)


def _costs() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    unseen: list[str] = []
    for make, plan in PLANS.items():
        task = make()
        for moment, workers in zip(MOMENTS, gradients(task, plan, MOMENTS), strict=True):
            whole = gradient_statistics(np.asarray(workers)).whole
            if not whole.signal:
                unseen.append(f"{task.name} at {moment}")
                continue
            noise = [each / whole.signal for each in whole.noise]
            finest = 1 / (1 + sum(1 / each for each in noise))
            for growth in GROWTHS:
                for overhead in OVERHEADS:
                    best = theory.ceo_total_cost(
                        1.0, noise, rounds=ROUNDS, growth=ROUNDS * growth, overhead=overhead
                    )
                    fine = theory.ceo_total_cost(
                        1.0,
                        noise,
                        rounds=ROUNDS,
                        growth=ROUNDS * growth,
                        overhead=overhead,
                        distortion=1.05 * finest,
                    )
                    rows.append({
                        "task": task.name,
                        "step": moment,
                        "noise": float(f"{whole.ratio:.4g}"),
                        "correlation": round(whole.correlation, 4),
                        "growth": growth,
                        "overhead": overhead,
                        "distortion": float(f"{best.distortion / finest:.4g}"),
                        "saved": float(f"{1 - best.bits / fine.bits:.4g}"),
                    })  # fmt: skip
    return {"numbers": {"rows": rows, "unseen": unseen}}


def _costs_judged(numbers: dict[str, Any]) -> Judged:
    rows = numbers["rows"]
    times = [row["distortion"] for row in rows]
    saved = [row["saved"] for row in rows]
    noise = {(row["task"], row["step"]): row["noise"] for row in rows}
    listed = ", ".join(f"{task} at {step} {each:.2g}" for (task, step), each in noise.items())
    words = (
        f"the cheapest distortion is {min(times):.2g} to {max(times):.2g} times the least one, and "
        f"saves {100 * min(saved):.0f} to {100 * max(saved):.0f} % of the bits at 1.05 times it; "
        f"noise over signal: {listed}; no signal seen: {', '.join(numbers['unseen']) or 'nowhere'}"
    )
    margins = min(times) / 1.2, min(saved) / 0.1
    good = [t >= 1.2 and s >= 0.1 for t, s in zip(times, saved, strict=True)]
    return Judged(words, decide(all(good), part=any(good)), least(*margins))


CLAIMS = (
    Claim(
        name="sidco-laws",
        methods=("sidco", "SIDCo"),
        source="Abdelmoniem et al., An efficient statistical-based gradient compression technique, "
        "2021, section on the statistics of gradients",
        claim="Gradients are well described by double exponential, double gamma and double "
        "generalised Pareto laws.",
        setting=f"{SETTING}; leaves with at least {SMALLEST} elements that are not zero, the "
        "distance of Kolmogorov and Smirnov of the best of the three laws.",
        judge=_laws_judged,
        criterion="distance of the best law at most 0.05 in the median and 0.1 in every case, on "
        "both networks",
        why="false",
        fixed="814d4410",
        run=_laws,
        minutes=0.5,
        note="Laws are fitted by moments to a single worker's gradient, without feedback.",
    ),
    Claim(
        name="ceo-real-gradients",
        methods=("CEO",),
        source="Zhang, Tao, Wang and Xu, Fundamental limits of communication efficiency for model "
        "aggregation, 2022, abstract",
        claim="A high distortion of the gradients can achieve a low total communication cost, by "
        "the statistics of real gradients.",
        setting=f"{SETTING}, whose signal and noise are measured; trainings of {ROUNDS:g} (1 + b "
        f"D) rounds with b of {', '.join(f'{b:g}' for b in GROWTHS)} and an overhead of "
        f"{', '.join(f'{o:g}' for o in OVERHEADS)} bits an element; D in units of the signal.",
        judge=_costs_judged,
        criterion="for all networks, moments, b and overheads: cheapest D ≥ 1.2 times the least "
        "one, and ≥ 10 % fewer bits",
        why="false",
        run=_costs,
        minutes=0.5,
        note="The numbers of rounds are a model, and are shown for nine pairs of its parameters. "
        "Where noise is much larger than the signal, the least distortion is near the signal "
        "itself, and little is left to trade. Overheads below 64 bits are left out: some have "
        "their minimum where nothing is sent.",
    ),
)

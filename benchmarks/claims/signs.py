"""Signs, partial participation and lazy messages with full gradients."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from convergence import AXIS, Way, everywhere

import jaxcomp
from claims import descent
from claims.claim import Claim, Judged, decide
from claims.descent import Oracle, least, within
from jaxcomp import algorithms, codecs
from jaxcomp.testing import problems

METHODS, COMMAND = "convergence/methods.json", "python benchmarks/methods.py"
FEEDBACK, FEEDBACK_COMMAND = "feedback/feedback.json", "python benchmarks/feedback.py"
SQUARES = "Least squares of eight workers with optima of their own, full gradients, "
CANCER = "breast cancer, 8 workers"


def _fixed(found: dict[str, Any]) -> Judged:
    errors = {name: curve[-1][1] for name, curve in found["errors"].items()}
    plain, fixed = errors["sign, nothing remembered"], errors["sign, residuals"]
    words = f"relative error {fixed:.3f} with error feedback, {plain:.2f} without"
    verdict = decide(fixed < 1e-6 < 0.1 < plain, part=fixed < 0.2 * plain)
    return Judged(words, verdict, least(within(1e-6, fixed), plain / 0.1))


def _majority(found: dict[str, Any]) -> Judged:
    ends = {
        title: curves["signsgd, majority vote"]["errors"][-1]
        for title, curves in found["curves"].items()
        if "signsgd, majority vote" in curves
    }
    words = ", ".join(f"{end:.2g} ({title})" for title, end in ends.items())
    worst = max(ends.values())
    verdict = decide(worst < 1e-3, part=min(ends.values()) < 1e-3)
    return Judged(f"relative squared error {words}", verdict, least(within(1e-3, worst)))


LENGTHS = (2048, 8192)
RATES = {
    "SGD": tuple(2.0**j for j in range(-9, 2)),
    "majority vote": tuple(2.0**j for j in range(-14, -3)),
}
"""The first in units of 1/L; steps of signs are lengths of an element's step."""


def pooled() -> problems.Quadratics:
    """Least squares whose workers draw from the same rows, with the same mean loss."""
    given = problems.quadratics()
    workers, rows, size = given.matrices.shape
    matrices = given.matrices.reshape(workers * rows, size) / np.sqrt(workers)
    targets = given.targets.reshape(workers * rows) / np.sqrt(workers)
    return given._replace(
        matrices=jnp.broadcast_to(matrices, (workers, *matrices.shape)),
        targets=jnp.broadcast_to(targets, (workers, *targets.shape)),
    )


@descent.in_float64
def _same_data() -> dict[str, Any]:
    problem = pooled()
    ballot = jaxcomp.Vote(everywhere(codecs.Ballot()))

    def vote(rate: Any, key: Any) -> Way:
        return Way(optax.chain(algorithms.signsgd(AXIS, up=ballot, key=key), optax.sgd(rate)))

    found: dict[str, Any] = {}
    for name, make in {"SGD": descent.plain(jaxcomp.Dense()), "majority vote": vote}.items():
        unit = 1 / problem.smoothness if name == "SGD" else 1.0
        for steps in LENGTHS:
            runs = descent.run(
                make,
                problem,
                rates=[unit * rate for rate in RATES[name]],
                steps=steps,
                oracle=Oracle(batch=8),
                every=32,
            )
            at = descent.best(runs.steepness)
            row = {"rate": RATES[name][at], "gradient": descent.spread(runs.steepness[at])}
            found.setdefault(name, {})[str(steps)] = row
    return {"numbers": found}


def _same_data_judged(numbers: dict[str, Any]) -> Judged:
    ends = {
        name: [rows[str(steps)]["gradient"][0] for steps in LENGTHS]
        for name, rows in numbers.items()
    }
    ratios = [b / a for a, b in zip(*(ends[name] for name in RATES), strict=True)]
    words = "; ".join(
        f"{name} {values[0]:.2g} and {values[1]:.2g}" for name, values in ends.items()
    )
    fell = ends["majority vote"][0] / ends["majority vote"][1]
    return Judged(
        f"squared gradient after {LENGTHS[0]:,} and {LENGTHS[1]:,} steps: {words}",
        decide(max(ratios) <= 2, fell >= 2),
        least(within(2, max(ratios))),
    )


def _participation(found: dict[str, Any]) -> Judged:
    curves = found["curves"]["least squares, 8 workers"]
    both, left = (
        curves[name]["errors"][-1]
        for name in ("artemis, half of the workers", "artemis PP1, half of the workers")
    )
    words = f"squared error {both:.0e}; {left:.0e} if absent workers are left out"
    verdict = decide(both < 1e-12 and left > 1e-6, part=both < 1e-12)
    return Judged(words, verdict, least(within(1e-12, both), left / 1e-6))


def _reached(curve: dict[str, list[float]], target: float) -> tuple[float, float]:
    """The first drawn step below the target, and the bits of a worker by then."""
    at = next(i for i, error in enumerate(curve["errors"]) if error <= target)
    return curve["steps"][at], curve["bits"][at]


def _lazy(found: dict[str, Any]) -> Judged:
    curves, size = found["curves"][CANCER], 31
    steps, bits = _reached(curves["lag"], 1e-3)
    dense, _ = _reached(curves["dense descent"], 1e-3)
    share = bits / (64 * size * steps)
    words = f"{100 * share:.0f} % of the messages, in {steps} steps; descent takes {dense}"
    verdict = decide(share < 0.2 and steps <= 1.1 * dense, part=share < 0.5)
    return Judged(words, verdict, least(within(0.2, share), within(1.1 * dense, steps)))


CLAIMS = (
    Claim(
        name="error-feedback-fixes-signs",
        methods=("ef_signsgd", "ef_sgd"),
        source="Karimireddy et al., Error feedback fixes SignSGD, 2019, abstract",
        claim="Scaled signs alone need not converge; with error feedback they converge at the rate "
        "of SGD without compression.",
        setting=f"{SQUARES}2,000 steps of 0.1/L.",
        judge=_fixed,
        criterion="relative error below 1e-6 with error feedback, and above 0.1 without, "
        "after 2,000 steps",
        why="premise",
        results=FEEDBACK,
        command=FEEDBACK_COMMAND,
        note="Outside its assumptions: the paper has one worker, as the row "
        "`error-feedback-one-worker`. Workers that disagree keep error feedback in a "
        "neighbourhood of the solution, which shrinks with the step; `ef21` reaches the solution.",
    ),
    Claim(
        name="majority-vote-converges",
        methods=("signsgd",),
        source="Bernstein et al., signSGD with majority vote, 2019, theorem on convergence",
        claim="SignSGD with majority vote converges at the order of SGD.",
        setting=f"{SQUARES}and logistic regression on sorted data, 10,000 steps of decreasing "
        "length.",
        judge=_majority,
        criterion="relative squared error below 1e-3 after 10,000 steps on every problem",
        why="premise",
        results=METHODS,
        command=COMMAND,
        note="Outside its assumptions. The theorem has workers that draw from the same data, with "
        "symmetric noise, as in the row `majority-vote-same-data`. Here workers disagree, and the "
        "majority points elsewhere.",
    ),
    Claim(
        name="majority-vote-same-data",
        methods=("signsgd",),
        source="Bernstein et al., signSGD with majority vote, 2019, theorem on convergence",
        claim="SignSGD with majority vote converges at the order of SGD, if workers draw from the "
        "same data with unimodal and symmetric noise.",
        setting="Least squares of eight workers that draw batches of 8 from the same 800 rows, "
        f"{descent.SEEDS} seeds, each method at the best of eleven constant rates for each number "
        "of steps; the mean of the last quarter.",
        judge=_same_data_judged,
        criterion="squared gradient at most twice SGD's after 2,048 and after 8,192 steps",
        why="false",
        run=_same_data,
        minutes=1,
        note="It holds within twice SGD's squared gradient at both numbers of steps, and in part "
        "if the squared gradient halves while steps quadruple, the order of 1/√T.",
    ),
    Claim(
        name="artemis-participation",
        methods=("artemis", "Artemis"),
        source="Philippenko and Dieuleveut, Artemis, 2020, partial participation with memory (PP2)",
        claim="With memories that the server keeps for absent workers, partial participation with "
        "heterogeneous workers converges to the solution.",
        setting=f"{SQUARES}half of the workers in each of 10,000 steps, qsgd of two bits both "
        "ways.",
        judge=_participation,
        criterion="squared error below 1e-12, and above 1e-6 if absent workers are left out",
        results=METHODS,
        command=COMMAND,
    ),
    Claim(
        name="lag-messages",
        methods=("lag",),
        source="Chen et al., LAG: lazily aggregated gradient, 2018, abstract",
        claim="Lazy aggregation has the convergence rate of gradient descent with significantly "
        "fewer messages if workers differ in their smoothness.",
        setting="Logistic regression on scikit-learn's breast cancer, sorted before it is divided "
        "over eight workers, full gradients, to a squared error of 1e-3.",
        judge=_lazy,
        criterion="less than 20 % of the messages, in at most 10 % more steps than descent",
        results=METHODS,
        command=COMMAND,
        note="On well-conditioned least squares it saves an eighth of the messages only.",
    ),
)

"""Claims inside the assumptions of their papers: one worker, shared data, symmetric noise."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from convergence import AXIS, Way, everywhere
from rich.progress import track

import jaxcomp
from claims import descent
from claims.claim import HOLDS, Change, Claim, Judged, decide
from claims.descent import Oracle, least, method, plain, within
from claims.signs import pooled
from jaxcomp import algorithms, codecs
from jaxcomp.testing import problems

FACTORS = tuple(2.0**j for j in range(-9, 2))
LENGTHS = (2048, 8192)
EPSILON = 0.1


def crossing() -> problems.Quadratics:
    """`⟨a₁, x − x*⟩² + ⟨a₂, x − x*⟩²` of `a = ±(1, −1) + ε (1, 1)`, which signs cannot minimise.

    The gradient of a row has the signs ±(1, −1) everywhere, so that their steps keep `x₁ + x₂`.
    """
    rows = np.array([[1.0, -1.0], [-1.0, 1.0]]) + EPSILON
    solution, values = np.ones(2), np.linalg.eigvalsh(rows.T @ rows)
    return problems.Quadratics(
        matrices=jnp.asarray(rows[None]),
        targets=jnp.asarray((rows @ solution)[None]),
        ridge=0.0,
        solution=jnp.asarray(solution),
        smoothness=float(values[-1]),
        condition=float(values[-1] / values[0]),
    )


@descent.in_float64
def _one_worker() -> dict[str, Any]:
    sign = everywhere(jaxcomp.sign(bucket_size=None))
    ways = {
        "SGD": plain(jaxcomp.Dense()),
        "signs": plain(jaxcomp.Gather(jaxcomp.Link(sign))),
        "error feedback": method(algorithms.ef_sgd, sign),
    }
    cases = {
        "published example": (crossing(), 1, LENGTHS[-1:]),
        "least squares": (problems.quadratics(workers=1), 8, LENGTHS),
    }
    found: dict[str, Any] = {}
    for title, (problem, batch, lengths) in cases.items():
        rates = [factor / problem.smoothness for factor in FACTORS]
        for steps in lengths:
            runs = descent.run_all(
                ways,
                problem,
                f"{title}, {steps} steps",
                rates=rates,
                steps=steps,
                oracle=Oracle(batch=batch),
                every=32,
            )
            found[f"{title}, {steps}"] = {
                name: {
                    "factor": FACTORS[descent.best(each.steepness)],
                    "gradient": descent.spread(each.steepness[descent.best(each.steepness)]),
                    "least error": float(np.nanmin(each.errors)),
                    "error": descent.spread(each.floors[descent.best(each.floors)]),
                }
                for name, each in runs.items()
            }
    return {"numbers": found}


def _one_worker_judged(numbers: dict[str, Any]) -> Judged:
    example = numbers[f"published example, {LENGTHS[-1]}"]
    fixed, stuck = example["error feedback"]["error"][0], example["signs"]["least error"]
    ratios = {}
    for steps in LENGTHS:
        rows = numbers[f"least squares, {steps}"]
        ratios[steps] = rows["error feedback"]["gradient"][0] / rows["SGD"]["gradient"][0]
    listed = ", ".join(f"{ratio:.2f} after {steps:,} steps" for steps, ratio in ratios.items())
    words = (
        f"published example: error {fixed:.1e} with feedback, never below {stuck:.2f} without; "
        f"least squares: squared gradient over SGD's {listed}"
    )
    margins = [within(1e-6, fixed), stuck / 0.99, *(within(1.5, each) for each in ratios.values())]
    verdict = decide(min(margins) >= 1, part=min(margins[:2]) >= 1)
    return Judged(words, verdict, least(*margins))


EXACT_STEPS = 10_000


@descent.in_float64
def _alike() -> dict[str, Any]:
    problem = pooled()
    size = problem.solution.size
    sign, top = (
        everywhere(jaxcomp.sign(bucket_size=None)),
        everywhere(jaxcomp.top_k(fraction=0.1)),
    )
    coded = everywhere(jaxcomp.ndsc(bits=3, dithered=False, bucket_size=size))

    def democratic(rate: Any, key: Any) -> Way:
        del rate  # It must be known before the program runs.
        half = 0.5 / problem.smoothness
        return Way(algorithms.dgd_def(coded, AXIS, learning_rate=half, key=key))

    ways = {
        "ef_sgd": (method(algorithms.ef_sgd, top), 0.2),
        "double_squeeze": (method(algorithms.double_squeeze, top), 0.2),
        "neolithic": (method(algorithms.neolithic, sign, stages=4), 0.3),
        "dgd_def": (democratic, 0.5),
    }
    found = {}
    for name, (make, factor) in track(ways.items(), description="workers with the same data"):
        runs = descent.run(
            make,
            problem,
            rates=[factor / problem.smoothness],
            steps=EXACT_STEPS,
            oracle=Oracle(batch=0),
            seeds=1,
            every=100,
        )
        found[name] = float(f"{runs.errors[0, 0, -1]:.4g}")
    return {"numbers": found}


def _alike_judged(numbers: dict[str, Any]) -> Judged:
    words = ", ".join(f"{name} {end:.1e}" for name, end in numbers.items())
    exact = [end < 1e-10 for end in numbers.values()]
    margin = least(within(1e-10, max(numbers.values())))
    return Judged(f"squared errors {words}", decide(all(exact), part=any(exact)), margin)


ROUNDS, HOSTILE, VOTERS = (64, 256, 1024, 4096), 2, 8


class Voters(NamedTuple):
    """Workers with the same least squares, of which the first invert what they send.

    Attributes:
        shared: the least squares, the same for all.
        hostile: how many workers invert.
    """

    shared: problems.Quadratics
    hostile: int

    @property
    def workers(self) -> int:
        return VOTERS

    @property
    def solution(self) -> Any:
        return self.shared.solution

    @property
    def data(self) -> tuple[Any, Any]:
        """The matrices; the targets, and what each worker multiplies its gradients with."""
        turned = jnp.where(jnp.arange(VOTERS) < self.hostile, -1.0, 1.0)
        matrices, targets = (jnp.repeat(part, VOTERS, axis=0) for part in self.shared.data)
        return matrices, (targets, turned)

    def gradient(self, x: Any, matrix: Any, given: Any) -> Any:
        return self.shared.gradient(x, matrix, given[0])

    def error(self, x: Any) -> Any:
        return self.shared.error(x)


class Symmetric(NamedTuple):
    """Gradients with Gaussian noise of this deviation in every element."""

    deviation: float

    def gradient(self, problem: Voters, key: Any, x: Any, data: Any) -> Any:
        noise = self.deviation * jax.random.normal(key, x.shape)
        return data[1][1] * (problem.gradient(x, *data) + noise)


@descent.in_float64
def _voted() -> dict[str, Any]:
    shared = problems.quadratics(workers=1)
    size, start = shared.solution.size, np.asarray(shared.solution)
    curvature = np.asarray(shared.matrices[0].T @ shared.matrices[0]) + shared.ridge * np.eye(size)
    smooth = float(np.abs(curvature).sum())  # The diagonal of row sums is above the matrix.
    gap = float(start @ curvature @ start / 2)
    noise = float(np.sqrt(smooth * gap * VOTERS))  # ‖σ‖₁, so that both terms are equal.
    ballot = jaxcomp.Vote(everywhere(codecs.Ballot()))

    def vote(rate: Any, key: Any) -> Way:
        return Way(optax.chain(algorithms.signsgd(AXIS, up=ballot, key=key), optax.sgd(rate)))

    found: dict[str, Any] = {}
    for hostile in (0, HOSTILE):
        problem = Voters(shared, hostile)

        def absolute(x: Any, problem: Voters = problem) -> Any:
            return jnp.abs(descent.full(problem, x)).sum()

        for rounds in track(ROUNDS, description=f"{hostile} hostile workers"):
            runs = descent.run(
                vote,
                problem,
                rates=[np.sqrt(gap / (smooth * rounds))],
                steps=rounds,
                oracle=Symmetric(noise / size / np.sqrt(rounds)),
                watch=absolute,
            )
            spent = noise / ((1 - 2 * hostile / VOTERS) * np.sqrt(VOTERS))
            found.setdefault(str(hostile), []).append({
                "rounds": rounds,
                "square": descent.spread(runs.watched[0].mean(axis=-1) ** 2),
                "bound": float(f"{4 / rounds * (spent + np.sqrt(smooth * gap)) ** 2:.4g}"),
            })  # fmt: skip
    return {"numbers": found}


def _voted_judged(numbers: dict[str, Any]) -> Judged:
    words, margins = [], []
    for hostile, rows in numbers.items():
        used = [row["square"][2] / row["bound"] for row in rows]
        first, last = rows[0], rows[-1]
        span = np.log(last["rounds"] / first["rounds"])
        power = float(np.log(last["square"][0] / first["square"][0]) / span)
        words.append(
            f"{hostile} of {VOTERS} hostile: at most {max(used):.2f} of the bound, ∝ K^{power:.2f}"
        )
        margins += [within(1, max(used)), -power / 0.9]
    text = f"squared mean ℓ₁ norm of the gradient, {'; '.join(words)}"
    return Judged(text, decide(min(margins) >= 1, part=max(margins) >= 1), least(*margins))


CLAIMS = (
    Claim(
        name="error-feedback-one-worker",
        methods=("ef_signsgd", "ef_sgd"),
        source="Karimireddy et al., Error feedback fixes SignSGD, 2019, abstract and "
        "Counterexample 3",
        claim="Steps of signs fail on simple convex losses; with error feedback they converge at "
        "the rate of SGD without compression.",
        setting="One worker, as in the paper: its example ⟨a₁, x⟩² + ⟨a₂, x⟩² with "
        f"a = ±(1, −1) + {EPSILON:g} (1, 1) and batches of one row, and least squares with batches "
        f"of 8; scaled signs, {LENGTHS[0]:,} and {LENGTHS[1]:,} steps, {descent.SEEDS} seeds, each "
        "method at its best of eleven rates from 2⁻⁹/L to 2/L; the mean of the last quarter.",
        judge=_one_worker_judged,
        criterion="example: error < 1e-6 with feedback, > 0.99 at every rate without; least "
        "squares: squared gradient ≤ 1.5 times SGD's",
        fixed="814d4410",
        run=_one_worker,
        minutes=1,
        note="From the start of the example no point with the same x₁ + x₂ is nearer to the "
        "solution.",
    ),
    Claim(
        name="residuals-same-data",
        methods=("double_squeeze", "neolithic", "dgd_def", "ef_sgd"),
        source="Papers of error feedback, on losses of workers that draw from the same data",
        claim="Error feedback has the rate of descent without compression.",
        setting="Least squares of eight workers with the same data, full gradients, "
        f"{EXACT_STEPS:,} steps of the lengths of `residuals-with-full-gradients`.",
        judge=_alike_judged,
        criterion=f"squared errors of all four methods below 1e-10 after {EXACT_STEPS:,} steps",
        fixed="814d4410",
        changed=(
            Change(
                "814d4410",
                HOLDS,
                "DGD-DEF takes the step 0.5/L, not each one of the grid: it must be known before "
                "the program runs.",
            ),
        ),
        run=_alike,
        minutes=0.5,
    ),
    Claim(
        name="majority-vote-bound",
        methods=("signsgd",),
        source="Bernstein et al., signSGD with majority vote is communication efficient and fault "
        "tolerant, 2019, Theorem 2",
        claim="With unimodal symmetric noise, K rounds and batches of K, the squared mean ℓ₁ norm "
        "of the gradient is at most 4/K [‖σ‖₁/((1 − 2α)√M) + √(‖L‖₁ (f₀ − f*))]², with a share "
        "α < ½ of hostile workers.",
        setting=f"Least squares, the same for {VOTERS} workers, Gaussian noise whose ‖σ‖₁ makes "
        f"both terms equal without hostile workers; none and {HOSTILE} of them invert their "
        f"gradients; the theorem's step, K from {ROUNDS[0]} to {ROUNDS[-1]:,}, {descent.SEEDS} "
        "seeds.",
        judge=_voted_judged,
        criterion="at most the bound for every K and seed, and ∝ K^p with p ≤ −0.9, without "
        "hostile workers and with two",
        fixed="8aedc62a",
        run=_voted,
        minutes=0.5,
        note="The theorem from memory of the paper's proof; the order of SGD in its N = K² "
        "gradients of a worker is 1/√N.",
    ),
)

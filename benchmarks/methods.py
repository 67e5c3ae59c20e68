"""Compares every method with its theory: error against steps and against bits.

    python benchmarks/methods.py

Workers have losses of their own, with optima of their own, and take full gradients in float64: the
error that is left in the end comes from compression. The problems are least squares of eight
workers, and logistic regression on two real sets, sorted before they are dealt to eight and to
twenty workers. Methods of composite problems have an l1 norm or a ball (`composite.py`), and are
compared by the objective. Bits are those that a worker has sent up and was sent down by each step,
from the payloads that were made and the messages that the states of the methods have counted.
"""

import warnings
from typing import Any

import composite
import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
from convergence import AXIS, Curve, Prices, Way, everywhere, price, solve, solve_all, stepped
from methods_plot import COMPOSITE, draw
from sklearn import datasets

import jaxcomp
from jaxcomp import algorithms, codecs
from jaxcomp.testing import problems

WARM, STAGES = 200, 4
"""Steps before 1-bit and 0/1 Adam freeze their variance; stages of NEOLITHIC."""


def ef21_rate(problem: Any, delta: float) -> float:
    """The longest step that the theory of EF21 allows around a contraction of `delta`."""
    worst = np.sqrt(np.mean(problem.smoothnesses**2))
    theta = 1 - np.sqrt(1 - delta)
    return float(1 / (problem.smoothness + worst * np.sqrt((1 - delta) / theta**2)))


def decaying(step: Any) -> Any:
    return 0.02 / jnp.sqrt(1 + step / 100)


def methods(problem: Any) -> dict[str, Way]:
    """Every method of smooth problems, with the bits of its messages."""
    size, unit, theory = problem.solution.size, 1 / problem.smoothness, ef21_rate(problem, 0.1)
    plain_sign = jaxcomp.sign(bucket_size=None)
    sign, top = everywhere(plain_sign), everywhere(jaxcomp.top_k(fraction=0.1))
    signs = everywhere(jaxcomp.msc(plain_sign, STAGES))
    ballot, whole = everywhere(codecs.Ballot()), everywhere(codecs.Identity())
    qsgd = everywhere(jaxcomp.qsgd(bits=2, bucket_size=size))
    random = everywhere(jaxcomp.random_k(fraction=0.1, bucket_size=size))
    coded = everywhere(jaxcomp.ndsc(bits=3, dithered=False, bucket_size=size))
    dense = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS), optax.sgd(unit))
    vote = optax.chain(algorithms.signsgd(AXIS, up=jaxcomp.Vote(ballot)), optax.sgd(decaying))
    dgd = algorithms.dgd_def(coded, AXIS, learning_rate=0.5 * unit)
    heavy = algorithms.censored_heavy_ball(None, AXIS, learning_rate=unit)

    def way(tx: Any, up: Any, back: Any = None, exact: bool = True) -> Way:
        costs = price(up, size), price(back, size) if back else 0.0
        return Way(tx, Prices(*costs, 64.0 * size, problem.workers), exact)

    def at(make: Any, codec: Any, rate: Any, *, up=None, back=None, exact=True, **given: Any):
        return way(stepped(make, codec, rate, **given), up or codec, back, exact)

    def adam(make: Any, **given: Any) -> Way:
        tx = stepped(make, sign, decaying, freeze_step=WARM, **given)
        return way(tx, sign, sign, exact=False)

    near: Any = {"exact": False}
    return {
        "dense descent": way(dense, whole, whole),
        "ef_sgd, top 10 %": at(algorithms.ef_sgd, top, 0.2 * unit, **near),
        "ef_signsgd": at(algorithms.ef_sgd, sign, 0.2 * unit, **near),
        "double_squeeze, top 10 %": at(
            algorithms.double_squeeze, top, 0.2 * unit, back=top, **near
        ),
        "neolithic, 4 signs": at(
            algorithms.neolithic, sign, 0.3 * unit, up=signs, back=signs, stages=STAGES, **near
        ),
        "signsgd, majority vote": way(vote, ballot, ballot, exact=False),
        "one_bit_adam": adam(algorithms.one_bit_adam),
        "zero_one_adam, 16 local steps": adam(algorithms.zero_one_adam, double_every=1000),
        "zero_one_adam, no local steps": adam(algorithms.zero_one_adam, max_interval=1),
        "dgd_def, 3 bits": way(dgd, coded, exact=False),
        "ef21, top 10 %": at(algorithms.ef21, top, theory),
        "ef21_sgdm, top 10 %": at(algorithms.ef21_sgdm, top, theory / 2, eta=0.5),
        "ef21_bc, sign": at(algorithms.ef21_bc, sign, 0.15 * unit, back=sign),
        "cd_adam, sign": at(algorithms.cd_adam, sign, decaying, back=sign),
        "diana, qsgd": at(algorithms.diana, qsgd, 0.052 * unit),
        "marina, random 10 %": at(algorithms.marina, random, 0.15 * unit, p=0.1),
        "artemis, half of the workers": at(algorithms.artemis, qsgd, 0.02 * unit, back=qsgd, p=0.5),
        "artemis PP1, half of the workers": at(
            algorithms.artemis, qsgd, 0.02 * unit, p=0.5, absent="left out", **near
        ),
        "dore, qsgd and sign": at(algorithms.dore, qsgd, 0.02 * unit, down=sign, back=sign),
        "mcm, qsgd": at(algorithms.mcm, qsgd, 0.052 * unit, back=qsgd),
        "rand_mcm, qsgd": at(algorithms.rand_mcm, qsgd, 0.052 * unit, back=qsgd),
        "lag": way(algorithms.lag(AXIS, learning_rate=unit), whole),
        "censored heavy ball": way(heavy, whole),
        "clag, top 10 %": at(algorithms.clag, top, theory, threshold=0.1 / theory**2),
    }


COLUMNS = (
    "problem {problem} | method {method} | 100 steps {errors[0]:.1e} | 1,000 {errors[1]:.1e} | "
    "STEPS {errors[2]:.1e} | kB by 1,000 {sent[0]:,.1f} | kB by STEPS {sent[1]:,.1f} | "
    "accuracy {accuracy:.3f} | zeros {zeros} | replicas alike {alike}"
)


def record(title: str, name: str, problem: Any, curve: Curve) -> dict[str, Any]:
    steps = len(curve.errors)
    marks = [min(step, steps) - 1 for step in (100, 1000, steps)]
    found: dict[str, Any] = {"problem": title, "method": name}
    if hasattr(problem, "accuracy"):
        found["accuracy"] = float(problem.accuracy(curve.params))
    if getattr(problem, "weight", 0):
        found["zeros"] = f"{int((curve.params == 0).sum())} of {curve.params.size}"
    return {
        **found,
        "errors": [curve.errors[at] for at in marks],
        "sent": [curve.bits[at] / 8e3 for at in marks[1:]],
        "alike": "yes" if curve.alike else "NO",
    }


def thinned(curve: Curve) -> dict[str, list[Any]]:
    at = reporting.moments(len(curve.errors), 80)
    return {
        "steps": [int(t) + 1 for t in at],
        "errors": [float(f"{curve.errors[t]:.4g}") for t in at],
        "bits": [round(float(curve.bits[t])) for t in at],
    }


SPARSE = (
    "problem {problem} | method {method} | gradients {gradients} | zeros {zeros} | "
    "accuracy {accuracy:.3f}"
)


def sparse(title: str, problem: Any, steps: int) -> list[dict[str, Any]]:
    """QCMD and QRDA with an l1 norm: how sparse, and how accurate."""
    size, found = problem.solution.size, []
    ternary: dict[str, jaxcomp.Codec] = {
        "threshold_ternary": jaxcomp.threshold_ternary(bucket_size=size),
        "stochastic ternary": jaxcomp.terngrad(clip=None, bucket_size=size),
        "not quantised": codecs.Identity(),
    }
    l1 = jaxcomp.optimizers.L1(0.02)
    for make in (algorithms.qcmd_adagrad, algorithms.qrda_adagrad):
        for name, codec in ternary.items():
            tx = make(everywhere(codec), AXIS, learning_rate=0.1, regularizer=l1)
            params = solve(problem._replace(ridge=0.0), Way(tx), steps).params
            row = {"problem": title, "method": make.__name__, "gradients": name}
            zeros = f"{int((params == 0).sum())} of {size}"
            found.append({**row, "zeros": zeros, "accuracy": float(problem.accuracy(params))})
    return found


def cases() -> dict[str, tuple[Any, dict[str, Way]]]:
    """The problems by title, with their methods."""
    digits: Any = datasets.load_digits()
    cancer: Any = datasets.load_breast_cancer()
    sets = {
        "breast cancer": (cancer.data, cancer.target),
        "digits, odd or even": (digits.data, digits.target % 2),
    }
    smooth: dict[str, Any] = {"least squares, 8 workers": problems.quadratics()}
    for name, (features, labels) in sets.items():
        for workers in (8, 20):
            smooth[f"{name}, {workers} workers"] = problems.logistic(features, labels, workers)
    l1 = composite.with_l1(*sets["breast cancer"], workers=8)
    hinge, radius = composite.in_a_ball(*sets["digits, odd or even"], workers=8)
    others = (l1, composite.proximal(l1)), (hinge, composite.subgradients(hinge, radius))
    found = {title: (problem, methods(problem)) for title, problem in smooth.items()}
    return found | dict(zip(COMPOSITE, others, strict=True))


def main() -> None:
    options = reporting.options(
        __doc__,
        "out/convergence",
        steps=(10_000, "of each method"),
        problems=("", "those whose title has this in it"),
    )
    jax.config.update("jax_enable_x64", True)
    # DGD-DEF's own codec does not contract every input.
    warnings.filterwarnings("ignore", message=".*not known to be contractive.*")
    # One case of QCMD and QRDA has no error feedback, for comparison.
    warnings.filterwarnings("ignore", message=".*what it drops is lost for good.*")
    every = {title: case for title, case in cases().items() if options.problems in title}
    found = {
        title: solve_all(title, problem, ways, options.steps)
        for title, (problem, ways) in every.items()
    }
    records = [
        record(title, name, every[title][0], curve)
        for title, curves in found.items()
        for name, curve in curves.items()
    ]
    title = "Relative squared error; with an l1 norm or in a ball, relative gap of the objective"
    kept = {
        title: {name: thinned(curve) for name, curve in curves.items()}
        for title, curves in found.items()
    }
    table = reporting.Table(title, COLUMNS.replace("STEPS", f"{options.steps:,}"), records)
    reporting.show(table, {"curves": kept}, options.out / "methods.md")
    rows = [
        row
        for title, (problem, _) in every.items()
        if hasattr(problem, "accuracy") and title not in COMPOSITE
        for row in sparse(title, problem, min(1000, options.steps))
    ]
    table = reporting.Table("With an l1 norm, 1,000 steps", SPARSE, rows)
    reporting.show(table, {"runs": rows}, options.out / "sparse.md")
    draw(kept, options.out / "methods.png")


if __name__ == "__main__":
    main()

"""Whether every method does what its theory says: error against steps and against bits.

    python benchmarks/convergence.py

Workers have losses of their own, with optima of their own, and take full gradients in float64:
whatever error is left in the end is the compression's. Least squares of eight workers, and logistic
regression on two real sets, sorted before they are dealt to eight and to twenty workers; for the
methods of composite problems an l1 norm and a ball (`composite.py`), by the objective. Bits are
what a worker has sent up and was sent down by each step, from the payloads that were made and the
messages that the methods' own states have counted (`ledger.py`).
"""

import argparse
import pathlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import composite
import jax
import jax.numpy as jnp
import ledger
import matplotlib.pyplot as plt
import numpy as np
import optax
from composite import everywhere
from harness import show
from ledger import Prices, price
from rich.progress import track
from sklearn import datasets

import jaxcomp
from jaxcomp.testing import problems

AXIS = "workers"
WARM, STAGES = 200, 4
"""Steps before 1-bit and 0/1 Adam freeze their variance; stages of NEOLITHIC."""
COMPOSITE = ("breast cancer with an l1 norm", "digits, hinge loss in a ball")
Problem = Any


class Run(NamedTuple):
    """A transformation, what its messages cost, and whether theory has it come to the solution."""

    tx: Any
    prices: Prices
    exact: bool = True


class Curve(NamedTuple):
    """Errors and bits after each step, and whether theory has it come to the solution."""

    errors: np.ndarray
    bits: np.ndarray
    exact: bool


class Method(NamedTuple):
    """How a method is run.

    Attributes:
        tx: the transformation.
        up: name of the codec up.
        down: of the codec down; None: nothing.
        exact: whether theory has it come to the solution, workers disagreeing.
    """

    tx: Any
    up: str
    down: str | None
    exact: bool = True


def codecs(size: int) -> dict[str, jaxcomp.Policy]:
    sign = jaxcomp.sign(bucket_size=None)
    return {
        "top": everywhere(jaxcomp.top_k(fraction=0.1)),
        "sign": everywhere(sign),
        "signs": everywhere(jaxcomp.msc(sign, STAGES)),
        "ballot": everywhere(jaxcomp.codecs.Ballot()),
        "qsgd": everywhere(jaxcomp.qsgd(bits=2, bucket_size=size)),
        "random": everywhere(jaxcomp.random_k(fraction=0.1, bucket_size=size)),
        "whole": everywhere(jaxcomp.codecs.Identity()),
        "coded": everywhere(jaxcomp.ndsc(bits=3, dithered=False, bucket_size=size)),
    }


def ef21_rate(problem: Problem, delta: float) -> float:
    """The longest step that the theory of EF21 allows around a contraction of `delta`."""
    worst = problem.smoothness * 1.6  # The root of the mean square of the workers' own.
    theta = 1 - np.sqrt(1 - delta)
    return float(1 / (problem.smoothness + worst * np.sqrt((1 - delta) / theta**2)))


def methods(problem: Problem) -> dict[str, Method]:
    size = problem.solution.size
    with_, unit = codecs(size), 1 / problem.smoothness
    top, sign, qsgd, random = (with_[name] for name in ("top", "sign", "qsgd", "random"))
    theory = ef21_rate(problem, 0.1)

    def decaying(step: Any) -> Any:
        return 0.02 / jnp.sqrt(1 + step / 100)

    def at(make: Callable[..., Any], codec: Any, rate: Any, **settings: Any) -> Any:
        return make(codec, AXIS, learning_rate=rate, **settings)

    dense = jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS)
    adam = {"learning_rate": decaying, "freeze_step": WARM}
    return {
        "dense descent": Method(optax.chain(dense, optax.sgd(unit)), "whole", "whole"),
        "ef_sgd, top 10 %": Method(
            at(jaxcomp.algorithms.ef_sgd, top, 0.2 * unit), "top", None, False
        ),
        "ef_signsgd": Method(at(jaxcomp.algorithms.ef_sgd, sign, 0.2 * unit), "sign", None, False),
        "double_squeeze, top 10 %": Method(
            at(jaxcomp.algorithms.double_squeeze, top, 0.2 * unit), "top", "top", False
        ),
        "neolithic, 4 signs": Method(
            at(jaxcomp.algorithms.neolithic, sign, 0.3 * unit, stages=STAGES),
            "signs",
            "signs",
            False,
        ),
        "signsgd, majority vote": Method(
            jaxcomp.algorithms.signsgd(
                AXIS, learning_rate=decaying, up=jaxcomp.Vote(with_["ballot"])
            ),
            "ballot",
            "ballot",
            False,
        ),
        "one_bit_adam": Method(
            jaxcomp.algorithms.one_bit_adam(sign, AXIS, **adam), "sign", "sign", False
        ),
        "zero_one_adam, 16 local steps": Method(
            jaxcomp.algorithms.zero_one_adam(sign, AXIS, **adam, double_every=1000),
            "sign",
            "sign",
            False,
        ),
        "zero_one_adam, no local steps": Method(
            jaxcomp.algorithms.zero_one_adam(sign, AXIS, **adam, max_interval=1),
            "sign",
            "sign",
            False,
        ),
        "dgd_def, 3 bits": Method(
            jaxcomp.algorithms.dgd_def(with_["coded"], AXIS, learning_rate=0.5 * unit),
            "coded",
            None,
            False,
        ),
        "ef21, top 10 %": Method(at(jaxcomp.algorithms.ef21, top, theory), "top", None),
        "ef21_sgdm, top 10 %": Method(
            at(jaxcomp.algorithms.ef21_sgdm, top, theory / 2, eta=0.5), "top", None
        ),
        "ef21_bc, sign": Method(at(jaxcomp.algorithms.ef21_bc, sign, 0.15 * unit), "sign", "sign"),
        "cd_adam, sign": Method(at(jaxcomp.algorithms.cd_adam, sign, decaying), "sign", "sign"),
        "diana, qsgd": Method(at(jaxcomp.algorithms.diana, qsgd, 0.052 * unit), "qsgd", None),
        "marina, random 10 %": Method(
            at(jaxcomp.algorithms.marina, random, 0.15 * unit, p=0.1), "random", None
        ),
        "artemis, half of the workers": Method(
            at(jaxcomp.algorithms.artemis, qsgd, 0.02 * unit, p=0.5), "qsgd", "qsgd"
        ),
        "artemis PP1, half of the workers": Method(
            at(jaxcomp.algorithms.artemis, qsgd, 0.02 * unit, p=0.5, absent="left out"),
            "qsgd",
            None,
            False,
        ),
        "dore, qsgd and sign": Method(
            at(jaxcomp.algorithms.dore, qsgd, 0.02 * unit, down=sign), "qsgd", "sign"
        ),
        "mcm, qsgd": Method(at(jaxcomp.algorithms.mcm, qsgd, 0.052 * unit), "qsgd", "qsgd"),
        "rand_mcm, qsgd": Method(
            at(jaxcomp.algorithms.rand_mcm, qsgd, 0.052 * unit), "qsgd", "qsgd"
        ),
        "lag": Method(jaxcomp.algorithms.lag(AXIS, learning_rate=unit), "whole", None),
        "censored heavy ball": Method(
            jaxcomp.algorithms.censored_heavy_ball(None, AXIS, learning_rate=unit), "whole", None
        ),
        "clag, top 10 %": Method(at(jaxcomp.algorithms.clag, top, theory), "top", None),
    }


def priced(problem: Problem) -> dict[str, Run]:
    """Every method of smooth problems, with what its messages cost."""
    size = problem.solution.size
    cost: dict[str | None, float] = {None: 0.0}
    cost |= {name: price(codec, size) for name, codec in codecs(size).items()}
    return {
        name: Run(
            one.tx, Prices(cost[one.up], cost[one.down], 64.0 * size, problem.workers), one.exact
        )
        for name, one in methods(problem).items()
    }


def thinned(errors: np.ndarray) -> np.ndarray:
    """The steps that are drawn and written down."""
    return np.unique(np.geomspace(1, len(errors), 80).astype(int)) - 1


def race(
    title: str, problem: Problem, ways: dict[str, Run], steps: int, rows: list[tuple], kept: dict
) -> dict[str, Curve]:
    """Every method on a problem: errors, and bits sent."""
    found = {}
    for name, way in track(ways.items(), description=title):

        def far(params: Any, state: Any, averaged: bool = name.startswith("dq_psgd")) -> Any:
            point = jaxcomp.optimizers.average(state) if averaged else params
            return problem.error(point["x"][0])

        run = problems.descend(ledger.kept(way.tx, steps, way.prices, far), problem, steps, AXIS)
        errors, bits = (np.asarray(column[0]) for column in (run.state.gap, run.state.bits))
        found[name] = Curve(errors, bits, way.exact)
        cells = [f"{errors[t - 1]:.1e}" for t in (100, 1000, steps)]
        real = hasattr(problem, "accuracy")
        accuracy = f"{float(problem.accuracy(run.params)):.3f}" if real else ""
        l1, zeros = getattr(problem, "weight", 0), int((run.params == 0).sum())
        last = (f"{zeros} of {run.params.size}" if l1 else "", "yes" if run.alike else "NO")
        sent = [f"{bits[t - 1] / 8e3:,.1f}" for t in (1000, steps)]
        rows.append((title, name, *cells, *sent, accuracy, *last))
        at = thinned(errors)
        kept.setdefault(title, {})[name] = {
            "steps": [int(t) + 1 for t in at],
            "errors": [float(f"{errors[t]:.4g}") for t in at],
            "bits": [round(float(bits[t])) for t in at],
        }
    return found


def draw(found: dict[str, dict[str, Curve]], path: pathlib.Path) -> None:
    """Solid: theory has it come to the solution; dashed: to a neighbourhood. QRDA is dashed too."""
    figure, grid = plt.subplots(len(found), 2, figsize=(16, 5.2 * len(found)), squeeze=False)
    shades = [plt.get_cmap("tab20")(n) for n in (*range(0, 20, 2), *range(1, 20, 2))]
    for (left, right), (title, curves) in zip(grid, found.items(), strict=True):
        seen = {True: 0, False: 0}
        drawn = []
        for name, (errors, bits, exact) in curves.items():
            at = thinned(errors)
            style: dict[str, Any] = {
                "color": shades[seen[exact] % 20],
                "linestyle": "-" if exact else "--",
                "linewidth": 1.5,
            }
            seen[exact] += 1
            if name == "dense descent":
                style |= {"color": "black", "linestyle": ":", "linewidth": 2.2}
                seen[exact] -= 1
            height = np.maximum(errors[at], 1e-32)
            left.loglog(at + 1, height, **style)
            (line,) = right.loglog(bits[at] / 8e3, height, label=name, **style)
            drawn.append((errors[-1], line))
        drawn.sort(key=lambda pair: -pair[0])
        objective = title in COMPOSITE
        error = "(F(x) − F*) / (F(0) − F*)" if objective else "‖x − x*‖² / ‖x*‖²"
        left.set(title=title, xlabel="steps", ylabel=error)
        right.set(title=title, xlabel="kB that a worker sent and was sent")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        right.legend(
            handles=[line for _, line in drawn],
            fontsize=8,
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            title="by error in the end",
            title_fontsize=8,
        )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    print(f"drawn to {path}")


def sparse(problem: Problem, steps: int) -> list[tuple[str, ...]]:
    """QCMD and QRDA with an l1 norm: how sparse, and how accurate."""
    rows, size = [], problem.solution.size
    ternary: dict[str, jaxcomp.Codec] = {
        "threshold_ternary": jaxcomp.threshold_ternary(bucket_size=size),
        "stochastic ternary": jaxcomp.terngrad(clip=None, bucket_size=size),
        "not quantised": jaxcomp.codecs.Identity(),
    }
    recipes: dict[str, Callable[..., Any]] = {
        "qcmd_adagrad": jaxcomp.algorithms.qcmd_adagrad,
        "qrda_adagrad": jaxcomp.algorithms.qrda_adagrad,
    }
    for recipe, make in recipes.items():
        for name, codec in ternary.items():
            tx = make(
                everywhere(codec),
                AXIS,
                learning_rate=0.1,
                regularizer=jaxcomp.optimizers.L1(0.02),
            )
            run = problems.descend(tx, problem._replace(ridge=0.0), steps, AXIS)
            zeros = int((run.params == 0).sum())
            accuracy = float(problem.accuracy(run.params))
            rows.append((recipe, name, f"{zeros} of {size}", f"{accuracy:.3f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/convergence"))
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    # DGD-DEF's own code, which is no contraction of every input.
    warnings.filterwarnings("ignore", message=".*not known to be contractive.*")
    # QCMD and QRDA with nothing fed back, for comparison.
    warnings.filterwarnings("ignore", message=".*what it drops is lost for good.*")
    digits: Any = datasets.load_digits()
    cancer: Any = datasets.load_breast_cancer()
    sets = {
        "breast cancer": (cancer.data, cancer.target),
        "digits, odd or even": (digits.data, digits.target % 2),
    }
    every: dict[str, Problem] = {"least squares, 8 workers": problems.quadratics()}
    for name, (features, labels) in sets.items():
        for workers in (8, 20):
            every[f"{name}, {workers} workers"] = problems.logistic(features, labels, workers)
    l1 = composite.with_l1(*sets["breast cancer"], workers=8)
    hinge, radius = composite.in_a_ball(*sets["digits, odd or even"], workers=8)
    others = (composite.proximal(l1, AXIS), composite.subgradients(hinge, radius, AXIS))
    runs = [(title, problem, priced(problem)) for title, problem in every.items()]
    for title, problem, ways in zip(COMPOSITE, (l1, hinge), others, strict=True):
        solid = {name: Run(*way, "qrda" not in name) for name, way in ways.items()}
        runs.append((title, problem, solid))
    rows: list[tuple] = []
    kept: dict[str, Any] = {}
    found = {
        title: race(title, problem, ways, options.steps, rows, kept)
        for title, problem, ways in runs
    }
    columns = ("problem", "method", "100 steps", "1,000", f"{options.steps:,}")
    columns += ("kB by 1,000", f"kB by {options.steps:,}", "accuracy", "zeros", "replicas alike")
    title = "Relative squared error; with an l1 norm or in a ball, relative gap of the objective"
    show(title, columns, rows, {"curves": kept}, options.out / "methods.md")
    thin = [
        (title, *row)
        for title, problem in every.items()
        if hasattr(problem, "accuracy")
        for row in sparse(problem, 1000)
    ]
    columns = ("problem", "method", "gradients", "zeros", "accuracy")
    show("With an l1 norm, 1,000 steps", columns, thin, {}, options.out / "sparse.md")
    chosen = [title for title in found if "20" not in title]
    draw({title: found[title] for title in chosen}, options.out / "methods.png")


if __name__ == "__main__":
    main()

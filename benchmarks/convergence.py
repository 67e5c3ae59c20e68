"""Whether every method does what its theory says: error against steps and against bits.

    python benchmarks/convergence.py

Workers have losses of their own, with optima of their own, and take full gradients in float64:
whatever error is left in the end is the compression's. Least squares of eight workers, and logistic
regression on two real sets, sorted before they are dealt to eight and to twenty workers. Bits are
what a worker sends up and is sent down, from the payloads that were made; of a method that does not
send in every step, what it did send.
"""

import argparse
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from harness import show
from rich.progress import track
from sklearn import datasets

import jaxcomp
from jaxcomp.testing import problems

AXIS = "workers"
WARM = 200
"""Dense steps of 1-bit Adam."""
Problem = Any


def everywhere(codec: jaxcomp.Codec) -> jaxcomp.Policy:
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


def codecs(size: int) -> dict[str, jaxcomp.Policy]:
    return {
        "top": everywhere(jaxcomp.top_k(fraction=0.1)),
        "sign": everywhere(jaxcomp.sign(bucket_size=None)),
        "qsgd": everywhere(jaxcomp.qsgd(bits=2, bucket_size=size)),
        "random": everywhere(jaxcomp.random_k(fraction=0.1, bucket_size=size)),
        "whole": everywhere(jaxcomp.Identity()),
        "coded": everywhere(jaxcomp.ndsc(bits=3, dithered=False, bucket_size=size)),
    }


def ef21_rate(problem: Problem, delta: float) -> float:
    """The longest step that the theory of EF21 allows around a contraction of `delta`."""
    worst = problem.smoothness * 1.6  # The root of the mean square of the workers' own.
    theta = 1 - np.sqrt(1 - delta)
    return float(1 / (problem.smoothness + worst * np.sqrt((1 - delta) / theta**2)))


def methods(problem: Problem) -> dict[str, tuple[Any, str, str | None]]:
    """Name to transformation, codec up, and codec down (None: nothing)."""
    size = problem.solution.size
    with_, unit = codecs(size), 1 / problem.smoothness
    top, sign, qsgd, random = (with_[name] for name in ("top", "sign", "qsgd", "random"))
    theory, ballot = ef21_rate(problem, 0.1), everywhere(jaxcomp.Ballot())

    def decaying(step: Any) -> Any:
        return 0.02 / jnp.sqrt(1 + step / 100)

    return {
        "ef_sgd, top 10 %": (jaxcomp.ef_sgd(top, AXIS, learning_rate=0.2 * unit), "top", None),
        "double_squeeze, top 10 %": (
            jaxcomp.double_squeeze(top, AXIS, learning_rate=0.2 * unit),
            "top",
            "top",
        ),
        "neolithic, 4 signs": (
            jaxcomp.neolithic(sign, AXIS, learning_rate=0.3 * unit, stages=4),
            "sign",
            "sign",
        ),
        "signsgd, majority vote": (
            jaxcomp.signsgd(AXIS, learning_rate=decaying, up=jaxcomp.Vote(ballot)),
            "sign",
            "sign",
        ),
        "one_bit_adam": (
            jaxcomp.one_bit_adam(AXIS, learning_rate=decaying, freeze_step=WARM, codec=sign),
            "sign",
            "sign",
        ),
        "ef21_sgdm, top 10 %": (
            jaxcomp.ef21_sgdm(top, AXIS, learning_rate=theory / 2, eta=0.5),
            "top",
            None,
        ),
        "dgd_def, 3 bits": (
            jaxcomp.dgd_def(AXIS, learning_rate=0.5 * unit, codec=with_["coded"]),
            "coded",
            None,
        ),
        "lag": (jaxcomp.lag(AXIS, learning_rate=unit), "whole", None),
        "ef21, top 10 %": (jaxcomp.ef21(top, AXIS, learning_rate=theory), "top", None),
        "ef21_bc, sign": (jaxcomp.ef21_bc(sign, AXIS, learning_rate=0.15 * unit), "sign", "sign"),
        "cd_adam, sign": (jaxcomp.cd_adam(sign, AXIS, learning_rate=decaying), "sign", "sign"),
        "diana, qsgd": (jaxcomp.diana(qsgd, AXIS, learning_rate=0.052 * unit), "qsgd", None),
        "marina, random 10 %": (
            jaxcomp.marina(random, AXIS, learning_rate=0.15 * unit, p=0.1),
            "random",
            None,
        ),
        "artemis, half of the workers": (
            jaxcomp.artemis(qsgd, AXIS, learning_rate=0.02 * unit, p=0.5),
            "qsgd",
            "qsgd",
        ),
        "artemis PP1, half of the workers": (
            jaxcomp.artemis(qsgd, AXIS, learning_rate=0.02 * unit, p=0.5, absent="left out"),
            "qsgd",
            None,
        ),
        "dore, qsgd and sign": (
            jaxcomp.dore(qsgd, AXIS, learning_rate=0.02 * unit, down=sign),
            "qsgd",
            "sign",
        ),
        "mcm, qsgd": (jaxcomp.mcm(qsgd, AXIS, learning_rate=0.052 * unit), "qsgd", "qsgd"),
        "rand_mcm, qsgd": (
            jaxcomp.rand_mcm(qsgd, AXIS, learning_rate=0.052 * unit),
            "qsgd",
            "qsgd",
        ),
        "censored heavy ball": (
            jaxcomp.censored_heavy_ball(AXIS, learning_rate=unit),
            "whole",
            None,
        ),
        "clag, top 10 %": (jaxcomp.clag(top, AXIS, learning_rate=theory), "top", None),
    }


def bits(
    problem: Problem, up: str, down: str | None, rounds: float, messages: float, stages: int
) -> float:
    """What a worker sends and is sent in a step, on average."""
    size = problem.solution.size
    like = {"x": jax.ShapeDtypeStruct((1, size), jnp.float64)}
    with_ = codecs(size)
    sent = 8 * stages * jaxcomp.wire_bytes(with_[up], like) * messages
    heard = 0 if down is None else 8 * stages * jaxcomp.wire_bytes(with_[down], like) * rounds
    return sent + heard


def traffic(name: str, run: problems.Run, problem: Problem, up: str, down: str | None) -> float:
    """Bits a step of a run: of gated ones what was counted, of MARINA whole gradients too."""
    steps, size = len(run.error), problem.solution.size
    stages = 4 if name.startswith("neolithic") else 1
    whole = 64 * size
    if name.startswith("marina"):
        chance = 0.1
        return chance * whole + (1 - chance) * bits(problem, up, down, 1, 1, 1)
    if name == "one_bit_adam":
        early = WARM / steps
        return early * 2 * whole + (1 - early) * bits(problem, up, down, 1, 1, 1)
    gates = [n for n in _nodes(run.state) if hasattr(n, "messages")]
    if gates:
        rounds = float(gates[0].rounds[0]) / steps
        messages = float(gates[0].messages[0]) / steps / problem.workers
        return bits(problem, up, down, rounds, messages, stages)
    each = 1 / stages  # NEOLITHIC holds a round in as many steps as it has stages.
    return bits(problem, up, down, each, each, stages)


def _nodes(state: Any) -> list[Any]:
    def named(node: Any) -> bool:
        return hasattr(node, "messages")

    return jax.tree.leaves(state, is_leaf=named)


def thinned(errors: np.ndarray) -> np.ndarray:
    """The steps that are drawn and written down."""
    return np.unique(np.geomspace(1, len(errors), 80).astype(int)) - 1


def race(title: str, problem: Problem, steps: int, rows: list[tuple], kept: dict) -> dict[str, Any]:
    """Every method on a problem: errors, and bits a step."""
    found: dict[str, Any] = {}
    for name, (tx, up, down) in track(methods(problem).items(), description=title):
        run = problems.descend(tx, problem, steps, AXIS)
        own = traffic(name, run, problem, up, down)
        found[name] = (np.asarray(run.error), own)
        cells = [f"{run.error[t - 1]:.1e}" for t in (100, 1000, steps)]
        extra = f"{float(problem.accuracy(run.params)):.3f}" if hasattr(problem, "accuracy") else ""
        rows.append((title, name, *cells, f"{own:.0f}", extra, "yes" if run.alike else "NO"))
        at = thinned(run.error)
        kept.setdefault(title, {})[name] = {
            "bits a step": own,
            "errors": [[int(t) + 1, float(run.error[t])] for t in at],
        }
    return found


def draw(found: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    figure, grid = plt.subplots(len(found), 2, figsize=(13, 4.4 * len(found)), squeeze=False)
    colours = plt.get_cmap("tab20")
    for (left, right), (title, curves) in zip(grid, found.items(), strict=True):
        for number, (name, (errors, own)) in enumerate(curves.items()):
            at = thinned(errors)
            style = {"color": colours(number % 20), "linewidth": 1.4}
            left.loglog(at + 1, np.maximum(errors[at], 1e-32), label=name, **style)
            right.loglog((at + 1) * own / 8e3, np.maximum(errors[at], 1e-32), **style)
        left.set(title=title, xlabel="steps", ylabel="‖x − x*‖² / ‖x*‖²")
        right.set(title=title, xlabel="kB that a worker sent and was sent")
        for axes in (left, right):
            axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=6.5, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"drawn to {path}")


def sparse(problem: Problem, steps: int) -> list[tuple[str, ...]]:
    """QCMD and QRDA with an l1 norm: how sparse, and how accurate."""
    rows, size = [], problem.solution.size
    ternary: dict[str, jaxcomp.Codec] = {
        "threshold_ternary": jaxcomp.threshold_ternary(bucket_size=size),
        "stochastic ternary": jaxcomp.terngrad(clip=None, bucket_size=size),
        "not quantised": jaxcomp.Identity(),
    }
    recipes: dict[str, Callable[..., Any]] = {
        "qcmd_adagrad": jaxcomp.qcmd_adagrad,
        "qrda_adagrad": jaxcomp.qrda_adagrad,
    }
    for recipe, make in recipes.items():
        for name, codec in ternary.items():
            tx = make(
                AXIS,
                learning_rate=0.1,
                regularizer=jaxcomp.optimizers.L1(0.02),
                codec=everywhere(codec),
            )
            run = problems.descend(tx, problem._replace(ridge=0.0), steps, AXIS)
            zeros = int((run.params == 0).sum())
            accuracy = float(problem.accuracy(run.params))
            rows.append((recipe, name, f"{zeros} of {size}", f"{accuracy:.3f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/convergence"))
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    # DGD-DEF's own code, which is no contraction of every input.
    warnings.filterwarnings("ignore", message=".*not known to be contractive.*")
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
    rows: list[tuple] = []
    kept: dict[str, Any] = {}
    found = {
        title: race(title, problem, options.steps, rows, kept) for title, problem in every.items()
    }
    columns = ("problem", "method", "100 steps", "1,000", f"{options.steps:,}")
    columns += ("bits a step", "accuracy", "replicas alike")
    show("Relative squared error", columns, rows, {"curves": kept}, options.out / "methods.md")
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

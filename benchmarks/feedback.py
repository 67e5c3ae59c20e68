"""Measures error feedback: one bit an element in both directions, on workers that disagree.

    python benchmarks/feedback.py

Eight workers have least squares of their own, with optima of their own, and take full gradients in
float64: the final error comes from compression alone. Written are a table, its numbers,
and a picture.
"""

import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
from convergence import AXIS, Way, everywhere, solve
from matplotlib.ticker import LogLocator
from rich.progress import track

import jaxcomp
from jaxcomp.testing import problems

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

SIGN = jaxcomp.sign(bucket_size=None)
QSGD = jaxcomp.qsgd(bits=2, bucket_size=None)
"""Of levels −1, 0, 1: what TernGrad and QSGD with `s = 1` send."""


def both(codec: jaxcomp.Codec, feedback: Any) -> jaxcomp.TwoShot:
    with warnings.catch_warnings():  # One case measures what signs without feedback lose.
        warnings.filterwarnings("ignore", message=".*what it drops is lost for good.*")
        up = jaxcomp.Link(everywhere(codec), feedback)
        return jaxcomp.TwoShot(up, jaxcomp.Link(codec, feedback))


def artemis(step: float | None) -> jaxcomp.TwoShot:
    """Unbiased codecs in both directions, with a shift on the uplink."""
    up = jaxcomp.Shift(step) if step else jaxcomp.NoFeedback()
    return jaxcomp.TwoShot(jaxcomp.Link(everywhere(QSGD), up), jaxcomp.Link(QSGD))


HALF = jaxcomp.gates.Bernoulli(0.5)
CASES: dict[str, tuple[Any, Any, float, int]] = {
    "dense": (jaxcomp.Dense(), None, 1.0, 500),
    "sign, nothing remembered": (both(SIGN, jaxcomp.NoFeedback()), None, 0.1, 2000),
    "sign, residuals": (both(SIGN, jaxcomp.Residual()), None, 0.1, 2000),
    "sign, EF21": (both(SIGN, jaxcomp.Shift()), None, 0.15, 2000),
    "qsgd, half of the workers": (artemis(None), HALF, 0.02, 20_000),
    "qsgd with memory, half of the workers (Artemis)": (artemis(0.1), HALF, 0.02, 20_000),
}
"""Name to reducer, gate, rate as a share of 1/L, and steps."""


def time_average(codec: jaxcomp.Codec, dtype: str | None, steps: int) -> np.ndarray:
    """The relative error of the mean of all outputs up to each step, for constant inputs."""
    problem = problems.quadratics()
    grads = jnp.einsum("nmd,nm->nd", problem.matrices, problem.targets)[:, None]
    tx = jaxcomp.compressed_mean(both(codec, jaxcomp.Residual(dtype=dtype)), AXIS)
    exact = jnp.mean(grads, axis=0)

    def step(carry: Any, t: Any) -> Any:
        state, total = carry
        mean, state = jax.vmap(tx.update, axis_name=AXIS)(grads, state)
        total = total + jnp.asarray(mean)[0]
        return (state, total), jnp.linalg.norm(total / (t + 1) - exact) / jnp.linalg.norm(exact)

    @jax.jit
    def run() -> Any:
        state = jax.vmap(tx.init, axis_name=AXIS)(grads)
        start = (state, jnp.zeros_like(grads[0]))
        return jax.lax.scan(step, start, jnp.arange(steps))[1]

    return np.asarray(run())


COLUMNS = (
    "case {case} | rate {rate} | 500 steps {errors[0]} | 2,000 steps {errors[1]} | "
    "20,000 steps {errors[2]} | replicas alike {alike}"
)


def at(errors: np.ndarray, steps: tuple[int, ...]) -> list[str]:
    return [f"{errors[t - 1]:.1e}" if t <= len(errors) else "" for t in steps]


def main() -> None:
    options = reporting.options(__doc__, "out/feedback", steps=(20_000, "of each case at most"))
    jax.config.update("jax_enable_x64", True)
    problem = problems.quadratics()
    curves: dict[str, np.ndarray] = {}
    records: list[dict[str, Any]] = []
    for name, (reducer, gate, rate, steps) in track(CASES.items(), description="descents"):
        mean = jaxcomp.compressed_mean(reducer, AXIS, gate=gate)
        way = Way(optax.chain(mean, optax.sgd(rate / problem.smoothness)))
        run = solve(problem, way, min(steps, options.steps))
        curves[name] = np.sqrt(run.errors)
        row = {"case": name, "rate": f"{rate:g}/L", "alike": "yes" if run.alike else "NO"}
        records.append({**row, "errors": at(curves[name], (500, 2000, 20_000))})
    dtypes = {"float64": None, "bfloat16": "bfloat16", "8-bit blocks": "int8"}
    averages = {
        label: time_average(SIGN, dtype, min(1000, options.steps))
        for label, dtype in dtypes.items()
    }
    for label, errors in averages.items():
        case = f"mean of T outputs, residuals in {label} (T = 10, 100, 1000)"
        records.append({"case": case, "errors": at(errors, (10, 100, 1000))})
    kept = {
        name: [[int(t) + 1, float(errors[t])] for t in reporting.moments(len(errors), 60)]
        for name, errors in {**curves, **averages}.items()
    }
    title = "Relative error ‖x − x*‖/‖x*‖ of compressed descent, 8 workers with optima of their own"
    table = reporting.Table(title, COLUMNS, records)
    reporting.show(table, {"errors": kept}, options.out / "feedback.md")
    draw(kept, options.out / "feedback.png")


LABELS = {
    "sign, nothing remembered": "signs, no memory",
    "qsgd, half of the workers": "qsgd, no memory",
    "sign, residuals": "signs, residuals",
    "sign, EF21": "signs, EF21",
    "qsgd with memory, half of the workers (Artemis)": "qsgd, Artemis",
    "dense": "dense",
}
DTYPES = ("float64", "bfloat16", "8-bit blocks")


def draw(kept: dict[str, list[list[float]]], path: pathlib.Path) -> None:
    """Descents, and means of outputs, from the errors as they are kept in `feedback.json`."""
    names = ("sign, EF21", "sign, residuals", "sign, nothing remembered")
    shift, residual, nothing = (pictures.power(kept[name][-1][1]) for name in names)
    figure, ((left, right),) = pictures.page(
        f"With one bit both ways, EF21 comes to an error of {shift}, residuals stay at {residual}, "
        f"and without memory it is {nothing}",
        "Least squares of eight workers with optima of their own, full gradients; qsgd with half "
        "of the workers in each step. Right: residuals kept in fewer bits average as well.",
        columns=2,
        height=3.0,
        width_ratios=(5, 4),
    )
    left.set(title="Compressed both ways", xlabel="steps", ylabel="‖x − x*‖ / ‖x*‖")
    right.set(title="Mean of outputs of signs", xlabel="outputs, T", ylabel="relative error")
    lines(left, kept, LABELS)
    lines(right, kept, {name: name for name in DTYPES})
    steps = np.array([at for at, _ in kept[DTYPES[0]]])
    start = kept[DTYPES[0]][0][1]
    right.plot(steps, start / steps, "--", color=pictures.BASE, label="1/T")
    pictures.log_axis(right, "y")
    for axes in (left, right):
        axes.set(ylim=axes.get_ylim())
        pictures.log_axis(axes, "x")
        axes.xaxis.set_major_locator(LogLocator(10))
        pictures.name_ends(axes, axes.lines, gap=0.075)
    pictures.save(figure, path)


def lines(axes: Any, kept: dict[str, list[list[float]]], labels: dict[str, str]) -> None:
    for (name, label), color in zip(labels.items(), pictures.COLORS, strict=False):
        color = pictures.BASE if name == "dense" else color
        style = "--" if name == "dense" else "-"
        axes.plot(*zip(*kept[name], strict=True), style, color=color, label=label)
    axes.set_yscale("log")


if __name__ == "__main__":
    main()

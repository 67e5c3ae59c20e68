"""What memory is worth: one bit an element in both directions, on workers that disagree.

    python benchmarks/feedback.py

Eight workers have least squares of their own, with optima of their own, and take full gradients in
float64: whatever error is left in the end is the compression's. Written are a table, its numbers,
and a picture.
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from harness import show
from rich.progress import track

import jaxcomp
from jaxcomp.testing import problems

AXIS = "workers"
SIGN = jaxcomp.sign(bucket_size=None)
QSGD = jaxcomp.qsgd(bits=2, bucket_size=None)
"""Of levels −1, 0, 1: what TernGrad and QSGD with `s = 1` send."""


def policy(codec: jaxcomp.Codec) -> jaxcomp.Policy:
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


def both(codec: jaxcomp.Codec, feedback: Any) -> jaxcomp.TwoShot:
    up = jaxcomp.Link(policy(codec), feedback)
    return jaxcomp.TwoShot(up, jaxcomp.Link(codec, feedback))


def artemis(step: float | None) -> jaxcomp.TwoShot:
    """Unbiased both ways, with a memory on the way up."""
    up = jaxcomp.Shift(step) if step else jaxcomp.NoFeedback()
    return jaxcomp.TwoShot(jaxcomp.Link(policy(QSGD), up), jaxcomp.Link(QSGD))


HALF = jaxcomp.gates.Bernoulli(0.5)
CASES: dict[str, tuple[Any, Any, float, int]] = {
    "dense": (jaxcomp.Dense(), None, 1.0, 500),
    "sign, nothing remembered": (both(SIGN, jaxcomp.NoFeedback()), None, 0.1, 2000),
    "sign, residuals": (both(SIGN, jaxcomp.Residual()), None, 0.1, 2000),
    "sign, EF21": (both(SIGN, jaxcomp.Shift()), None, 0.15, 2000),
    "qsgd, half of the workers": (artemis(None), HALF, 0.02, 20_000),
    "qsgd with memory, half of the workers (Artemis)": (artemis(0.05), HALF, 0.02, 20_000),
}
"""Name to reducer, gate, rate as a share of 1/L, and steps."""


def time_average(codec: jaxcomp.Codec, dtype: str | None, steps: int) -> np.ndarray:
    """The relative error of the mean of all outputs up to each step, where inputs stay."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/feedback"))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    problem = problems.quadratics()
    curves: dict[str, np.ndarray] = {}
    rows = []
    for name, (reducer, gate, rate, steps) in track(CASES.items(), description="descents"):
        tx = optax.chain(
            jaxcomp.compressed_mean(reducer, AXIS, gate=gate),
            optax.sgd(rate / problem.smoothness),
        )
        run = problems.descend(tx, problem, steps, AXIS)
        curves[name] = np.sqrt(run.error)
        cells = [f"{curves[name][t - 1]:.1e}" if t <= steps else "" for t in (500, 2000, 20_000)]
        rows.append((name, f"{rate:g}/L", *cells, "yes" if run.alike else "NO"))
    averages = {
        label: time_average(SIGN, dtype, 1000)
        for label, dtype in (("float64", None), ("bfloat16", "bfloat16"), ("8-bit blocks", "int8"))
    }
    for label, errors in averages.items():
        cells = [f"{errors[t - 1]:.1e}" for t in (10, 100, 1000)]
        rows.append(
            (f"mean of T outputs, residuals in {label} (T = 10, 100, 1000)", "", *cells, "")
        )
    columns = ("case", "rate", "500 steps", "2,000 steps", "20,000 steps", "replicas alike")
    kept = {
        name: [[int(t) + 1, float(errors[t])] for t in moments(len(errors))]
        for name, errors in {**curves, **averages}.items()
    }
    title = "Relative error ‖x − x*‖/‖x*‖ of compressed descent, 8 workers with optima of their own"
    show(title, columns, rows, {"errors": kept}, options.out / "feedback.md")
    draw(curves, averages, options.out / "feedback.png")


def moments(steps: int) -> np.ndarray:
    return np.unique(np.geomspace(1, steps, 60).astype(int)) - 1


def draw(
    curves: dict[str, np.ndarray], averages: dict[str, np.ndarray], path: pathlib.Path
) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), width_ratios=[3, 2])
    for name, errors in curves.items():
        at = moments(len(errors))
        left.loglog(at + 1, errors[at], label=name)
    left.set(
        xlabel="steps", ylabel="‖x − x*‖ / ‖x*‖", title="Descent, compressed in both directions"
    )
    left.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)
    for name, errors in averages.items():
        right.loglog(np.arange(1, len(errors) + 1), errors, label=f"residuals in {name}")
    steps = np.arange(1, 1001)
    right.loglog(steps, averages["float64"][0] / steps, "k:", label="1/T")
    right.set(
        xlabel="T", ylabel="relative error", title="Mean of T outputs of signs, inputs constant"
    )
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drawn to {path}")


if __name__ == "__main__":
    main()

"""Compares methods for stochastic gradients with dense Adam on real networks, at equal steps.

    python benchmarks/networks.py

Handwritten digits by the perceptron of `examples/train_digits.py` and bytes of source text by the
transformer of `examples/byte_lm.py`, over eight simulated workers: the same initial parameters, the
same batches in the same order, the same number of steps. Bytes are read off the compiled program,
which has the collectives of all phases of a method.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import convergence
import numpy as np
import optax
import reporting
from convergence import Task
from rich.progress import track

import jaxcomp
from jaxcomp import algorithms

# isort: split
import byte_lm_model  # pyright: ignore[reportMissingImports]
import pictures  # pyright: ignore[reportMissingImports]
import train_digits  # pyright: ignore[reportMissingImports]

AXIS = train_digits.training.AXIS


def digits() -> Task:
    data = train_digits.load()

    def batches(steps: int, seed: int) -> Iterator[tuple]:
        order, images = np.random.default_rng(seed), data.train[0]
        for _ in range(steps):
            chosen = order.permutation(len(images))[:128]
            yield data.train[0][chosen], data.train[1][chosen]

    def score(params: Any) -> float:
        return float(train_digits.accuracy_of(params, *data.test))

    return Task(train_digits.MODEL, batches, score, "test accuracy, %", 10)


def bytes_() -> Task:
    text, context = byte_lm_model.read_text(), 64
    model = byte_lm_model.ByteModel(3, 128)
    held_out = byte_lm_model.validation_of(text, context)

    def batches(steps: int, seed: int) -> Iterator[tuple]:
        for step in range(1, steps + 1):
            yield byte_lm_model.batch_of(text, step, size=16, context=context, seed=seed)

    def score(params: Any) -> float:
        return float(byte_lm_model.bits_per_byte(model, params, held_out))

    return Task(model, batches, score, "bits a byte, held out", 20)


def methods(
    fast: float, slow: float, steps: int, seed: int
) -> dict[str, optax.GradientTransformationExtraArgs]:
    adam, descent = (
        optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps) for rate in (fast, slow)
    )
    top, sign = jaxcomp.top_k(fraction=0.05), jaxcomp.sign()
    dense = jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS)
    return {
        "dense, Adam": optax.chain(dense, optax.adam(adam)),
        "dense, momentum": optax.chain(dense, optax.sgd(descent, momentum=0.9)),
        "ef21_sgdm, top 5 %": optax.chain(
            algorithms.ef21_sgdm(top, AXIS), optax.sgd(lambda step: 10 * descent(step))
        ),
        "ef21_sgdm's mean, top 5 %, Adam": optax.chain(
            jaxcomp.per_worker(optax.ema(0.9, debias=False)),
            jaxcomp.compressed_mean(
                jaxcomp.Gather(jaxcomp.Link(top, jaxcomp.Shift())), AXIS, key=seed
            ),
            optax.adam(adam),
        ),
        "cd_adam, sign": optax.chain(algorithms.cd_adam(sign, AXIS), optax.sgd(adam)),
        "one_bit_adam": optax.chain(
            algorithms.one_bit_adam(sign, AXIS, freeze_step=steps // 5), optax.sgd(adam)
        ),
    }


class Case(NamedTuple):
    """A task, the peak learning rates of Adam and of momentum, and the number of steps."""

    task: Callable[[], Task]
    fast: float
    slow: float
    steps: int


CASES = (Case(digits, 1e-3, 0.05, 140), Case(bytes_, 3e-3, 0.1, 300))


SHORT = {
    "dense, Adam": "dense Adam",
    "one_bit_adam": "one_bit_adam",
    "dense, momentum": "dense momentum",
    "ef21_sgdm, top 5 %": "ef21_sgdm",
    "cd_adam, sign": "cd_adam",
    "ef21_sgdm's mean, top 5 %, Adam": "ef21_sgdm, Adam",
}
COLORS = (pictures.BASE, *pictures.COLORS[:5])
"""Labels of the picture, and their colours."""


def draw(curves: dict[str, Any], path: pathlib.Path) -> None:
    """A panel a task, from the curves as they are kept in `networks.json`."""
    metrics = list(dict.fromkeys(name.partition(": ")[0] for name in curves))
    figure, (panels,) = pictures.page(
        message(curves, metrics),
        f"Equal steps and equal batches over {convergence.DEVICES} workers, learning rates of the "
        "dense runs. Signs, or the largest 5 % of the elements; 1-bit Adam sends the first fifth "
        "of its steps dense.",
        columns=len(metrics),
        height=2.9,
    )
    for axes, metric in zip(panels, metrics, strict=True):
        lines = []
        for (method, label), color in zip(SHORT.items(), COLORS, strict=True):
            curve = curves.get(f"{metric}: {method}")
            if curve:
                style = "--" if color == pictures.BASE else "-"
                lines += axes.plot(*zip(*curve, strict=True), style, color=color, label=label)
        axes.set(xlabel="steps", ylabel=metric)
        if metric.endswith("%"):
            axes.set(ylim=(80, 100), yticks=range(80, 101, 5))
        axes.set(ylim=axes.get_ylim())
        pictures.name_ends(axes, lines, gap=0.075)
    pictures.save(figure, path)


def message(curves: dict[str, Any], metrics: list[str]) -> str:
    """Which compressed method ends closest to dense Adam, and how far from it."""
    closest: dict[str, list[str]] = {}
    for metric in metrics:
        ends = {n.partition(": ")[2]: c[-1][1] for n, c in curves.items() if metric in n}
        dense = ends.get("dense, Adam", np.nan)
        far = {name: abs(end - dense) for name, end in ends.items() if "dense" not in name}
        name = min(far, key=lambda name: far[name], default="")
        unit = "points" if metric.endswith("%") else metric.partition(",")[0]
        closest.setdefault(name, []).append(f"{far.get(name, np.nan):.1f} {unit}")
    if len(closest) != 1:
        return "Scores of compressed and dense methods on networks, at equal steps"
    ((name, said),) = closest.items()
    return (
        f"Of the compressed methods {name} ends closest to dense Adam: {' and '.join(said)} from it"
    )


COLUMNS = (
    "score {metric} | method {name} | steps {steps} | in the end {score:.2f} | "
    "bytes in the program {sent:,}"
)


def main() -> None:
    options = convergence.options(
        __doc__,
        steps=([case.steps for case in CASES], "of either task"),
        seed=(0, "of the parameters and batches"),
        method=(methods(*CASES[0][1:], seed=0), "some of them"),
    )
    records, kept = [], {}
    for case, steps in zip(CASES, options.steps, strict=True):
        task, ways = case.task(), methods(case.fast, case.slow, steps, options.seed)
        for name in track(list(options.method), description=task.metric):
            done = convergence.train(task, ways[name], steps, options.seed)
            kept[f"{task.metric}: {name}"] = done.curve
            row = {"metric": task.metric, "name": name, "steps": steps}
            records.append({**row, "score": done.curve[-1][1], "sent": sum(done.sent.values())})
    title = f"Equal steps over {convergence.DEVICES} workers"
    table = reporting.Table(title, COLUMNS, records)
    reporting.show(table, {"curves": kept}, options.out / "networks.md")
    draw(kept, options.out / "networks.png")


if __name__ == "__main__":
    main()

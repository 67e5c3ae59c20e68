"""Methods for stochastic gradients beside dense Adam, on real networks, at equal steps.

    PYTHONPATH=examples python benchmarks/methods.py

Handwritten digits by the perceptron of `examples/train_digits.py` and bytes of source text by the
transformer of `examples/byte_lm.py`, over eight simulated workers: the same initial parameters, the
same batches in the same order, the same number of steps. Bytes are read off the compiled program,
which has the collectives of all phases of a method.
"""

import argparse
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import byte_lm_model  # pyright: ignore[reportMissingImports]
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import train_digits  # pyright: ignore[reportMissingImports]
import training  # pyright: ignore[reportMissingImports]
from harness import show
from rich.progress import track

import jaxcomp

AXIS, WORKERS, SEED = training.AXIS, 8, 0


class Task(NamedTuple):
    """What is learned.

    Attributes:
        model: a flax module from inputs to logits.
        batches: of the whole run.
        score: of parameters, on held-out data.
        metric: what the score is.
        rates: of Adam, and of descent with momentum.
        every: steps from score to score.
    """

    model: Any
    batches: Callable[[int], Iterator[tuple]]
    score: Callable[[Any], float]
    metric: str
    rates: tuple[float, float]
    every: int


def digits() -> Task:
    data = train_digits.load()

    def batches(steps: int) -> Iterator[tuple]:
        order, images = np.random.default_rng(SEED), data.train[0]
        for _ in range(steps):
            chosen = order.permutation(len(images))[:128]
            yield data.train[0][chosen], data.train[1][chosen]

    def score(params: Any) -> float:
        return float(train_digits.accuracy_of(params, *data.test))

    return Task(train_digits.MODEL, batches, score, "test accuracy, %", (1e-3, 0.05), 10)


def bytes_() -> Task:
    text, context = byte_lm_model.read_text(), 64
    model = byte_lm_model.ByteModel(3, 128)
    held_out = byte_lm_model.validation_of(text, context)

    def batches(steps: int) -> Iterator[tuple]:
        for step in range(1, steps + 1):
            yield byte_lm_model.batch_of(text, step, size=16, context=context, seed=SEED)

    def score(params: Any) -> float:
        return float(byte_lm_model.bits_per_byte(model, params, held_out))

    return Task(model, batches, score, "bits a byte, held out", (3e-3, 0.1), 20)


def methods(task: Task, steps: int) -> dict[str, optax.GradientTransformationExtraArgs]:
    fast, slow = task.rates
    adam, descent = (
        optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps) for rate in (fast, slow)
    )
    top, sign = jaxcomp.top_k(fraction=0.05), jaxcomp.sign()
    dense = jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS)
    return {
        "dense, Adam": optax.chain(dense, optax.adam(adam)),
        "dense, momentum": optax.chain(dense, optax.sgd(descent, momentum=0.9)),
        "ef21_sgdm, top 5 %": jaxcomp.algorithms.ef21_sgdm(
            top, AXIS, learning_rate=lambda step: 10 * descent(step)
        ),
        "ef21_sgdm's mean, top 5 %, Adam": optax.chain(
            jaxcomp.per_worker(optax.ema(0.9, debias=False)),
            jaxcomp.compressed_mean(
                jaxcomp.Gather(jaxcomp.Link(top, jaxcomp.Shift())), AXIS, key=SEED
            ),
            optax.adam(adam),
        ),
        "cd_adam, sign": jaxcomp.algorithms.cd_adam(sign, AXIS, learning_rate=adam),
        "one_bit_adam": jaxcomp.algorithms.one_bit_adam(
            jaxcomp.sign(), AXIS, learning_rate=adam, freeze_step=steps // 5
        ),
    }


class Run(NamedTuple):
    """What came of a method: its curve of (step, score), and the bytes of its program's step."""

    curve: list[tuple[int, float]]
    sent: dict[str, int]


def run(task: Task, tx: Any, steps: int, mesh: Any) -> Run:
    first = next(task.batches(1))
    params: Any = jax.jit(task.model.init)(jax.random.key(SEED), first[0][:1])
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    params = jaxcomp.place(params, mesh, AXIS)
    build = training.build_step(task.model, tx, mesh)
    step = build.lower(params, state, training.put(first, mesh)).compile()
    curve = []
    for number, rows in enumerate(task.batches(steps), start=1):
        params, state, loss = step(params, state, training.put(rows, mesh))
        float(loss)  # Waits: on a few cores, simulated devices must not queue up steps.
        if number % task.every == 0 or number == steps:
            curve.append((number, task.score(training.first_copy(params))))
    return Run(curve, jaxcomp.collective_bytes(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, nargs=2, default=(140, 300), help="of either task")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/convergence"))
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = training.make_mesh(jax.devices()[:WORKERS])
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.6))
    rows, kept = [], {}
    for panel, make, steps in zip(panels, (digits, bytes_), options.steps, strict=True):
        task = make()
        for name, tx in track(methods(task, steps).items(), description=task.metric):
            done = run(task, tx, steps, mesh)
            kept[f"{task.metric}: {name}"] = done.curve
            panel.plot(*zip(*done.curve, strict=True), label=name)
            score = f"{done.curve[-1][1]:.2f}"
            rows.append((task.metric, name, str(steps), score, f"{sum(done.sent.values()):,}"))
        panel.set(xlabel="steps", ylabel=task.metric)
        panel.grid(alpha=0.3)
    panels[1].legend(fontsize=8)
    panels[0].set_ylim(80, 100)
    figure.tight_layout()
    columns = ("score", "method", "steps", "in the end", "bytes in the program")
    title = f"Equal steps over {WORKERS} workers"
    show(title, columns, rows, {"curves": kept}, options.out / "networks.md")
    figure.savefig(options.out / "networks.png", dpi=120)
    print(f"drawn to {options.out / 'networks.png'}")


if __name__ == "__main__":
    main()

"""Trains one model on handwritten digits, dense and compressed, and compares what it cost.

Every run has the same initial parameters, the same batches in the same order and the same
optimizer; only what crosses the wire differs. The workers are the accelerators of this machine,
or eight simulated devices of its CPU:

    python examples/train_digits.py
    python examples/train_digits.py --codec dense top_k --optimizer adam --epochs 10

It needs `pip install '.[examples]'`, downloads nothing, and leaves `digits.png` and
`results.json` in the folder that `--out` names.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import digits_report
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import options
import pictures
import report
import training
from jax.sharding import Mesh
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TEST_SIZE = 517  # Leaves 1,280 to train on: ten batches of 128.
RATES = {"sgd": 0.4, "momentum": 0.05, "adam": 1e-3}


class Classifier(nn.Module):
    """A perceptron of 0.3 million parameters, nearly all of them in three matrices."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(512, name="first")(images))
        x = nn.relu(nn.Dense(512, name="second")(x))
        return nn.Dense(10, name="logits")(x)


MODEL = Classifier()


class Data(NamedTuple):
    """Images of 8 x 8 pixels as rows, less the mean training image, and their digits."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, each checked as far as it can be on its own."""
    parser = options.parser(
        (__doc__ or "").split("\n\n")[0],
        optimizer="sgd",
        rates=RATES,
        decay="start of a cosine decay",
        length=("--epochs", 14, "passes over the images"),
        batch_size=128,
        out="out/digits",
    )
    return parser, options.parse(parser, argv, RATES)


def load() -> Data:
    images, digits = (np.asarray(part) for part in load_digits(return_X_y=True))
    train, test = train_test_split(
        np.arange(len(digits)), test_size=TEST_SIZE, random_state=0, stratify=digits
    )
    images = ((images - images[train].mean(axis=0)) / 16).astype(np.float32)
    digits = digits.astype(np.int32)
    return Data((images[train], digits[train]), (images[test], digits[test]))


def batches(data: Data, args: argparse.Namespace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every batch of a run, in an order that depends on the seed alone."""
    images, digits = data.train
    order = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        shuffled = order.permutation(len(images))
        for start in range(0, len(images) - args.batch_size + 1, args.batch_size):
            chosen = shuffled[start : start + args.batch_size]
            yield images[chosen], digits[chosen]


@jax.jit
def accuracy_of(params: Any, images: jax.Array, digits: jax.Array) -> jax.Array:
    logits: Any = MODEL.apply(params, images)
    return 100 * jnp.mean(logits.argmax(-1) == digits)


def train(
    name: str, data: Data, args: argparse.Namespace, mesh: Mesh, show: Callable[..., None]
) -> report.Run:
    """One run: builds the step, reads off it what it sends, and takes it to the end."""
    steps = args.epochs * (len(data.train[0]) // args.batch_size)
    rate = optax.cosine_decay_schedule(args.learning_rate, steps)
    first = next(batches(data, args))
    ready = training.prepare(name, args, mesh, model=MODEL, rate=rate, batch=first)

    # The picture has a logarithmic axis, so the points are spread evenly on one.
    watched = {round(number) for number in np.geomspace(1, steps, 48)}
    params, state, curve, times = ready.params, ready.state, [], []
    for number, rows in enumerate(batches(data, args), start=1):
        batch = training.put(rows, mesh)
        start = time.perf_counter()
        params, state, loss = ready.step(params, state, batch)
        loss = float(loss)  # Waits: on a few cores, simulated devices must not queue up steps.
        times.append(time.perf_counter() - start)
        if number in watched:
            accuracy = float(accuracy_of(training.first_copy(params), *data.test))
            curve.append(report.Point(number, loss, accuracy))
        show(number, steps, loss, curve[-1].score)
    return training.summary(name, ready, curve, times)


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    devices = options.find_devices(parser, args.devices)
    data = load()
    images = len(data.train[0])
    options.check(parser, args, len(devices))
    if args.batch_size > images:
        most = f"at most {images}, the images there are to train on"
        options.refuse(parser, "--batch-size", most, args.batch_size)
    mesh = training.make_mesh(devices)

    console = report.console()
    console.print(
        f"{len(devices)} {devices[0].platform} devices; {args.epochs} epochs of {args.optimizer} "
        f"at {args.learning_rate:g}, batch {args.batch_size}, the same for each codec; one of the "
        f"{TEST_SIZE} test digits is {100 / TEST_SIZE:.1f} points"
    )
    metric = digits_report.METRIC
    with report.progress(console) as bars:
        runs = [
            train(name, data, args, mesh, report.watcher(bars, options.label(name), metric))
            for name in args.codec
        ]
    report.print_table(console, runs, devices, metric)
    settings = {**vars(args), "out": str(args.out)}
    report.save(args.out, runs, devices, metric, settings)
    picture = digits_report.picture(runs, len(devices), settings)
    pictures.save(picture, args.out / "digits.png")
    console.print(f"Saved {args.out / 'results.json'}")


if __name__ == "__main__":
    main()

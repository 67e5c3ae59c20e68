"""Trains one model on handwritten digits, dense and compressed, and compares what it cost.

Every run has the same initial parameters, the same batches in the same order and the same
optimizer; only what crosses the wire differs. The workers are the accelerators of this machine,
or eight simulated devices of its CPU:

    python examples/train_digits.py
    python examples/train_digits.py --codec dense top_k --optimizer adam --epochs 10

It needs `pip install 'jaxcomp[examples]'`, downloads nothing, and leaves `digits.png` and
`results.json` in the folder that `--out` names.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxcomp

AXIS = "data"
TEST_SIZE = 517  # Leaves 1,280 to train on: ten batches of 128.


class Method(NamedTuple):
    """What to compress with, and how to show it."""

    label: str
    codec: Any
    color: str


METHODS = {
    "dense": Method("dense", jaxcomp.Dense(), "#3d4451"),
    "qsgd_inf": Method("qsgd_inf 4-bit", jaxcomp.qsgd_inf(bits=4), "#1f77b4"),
    "terngrad": Method("terngrad", jaxcomp.terngrad(), "#2a9d6f"),
    "sign": Method("sign", jaxcomp.sign(), "#d98200"),
    "top_k": Method("top_k 1 %", jaxcomp.top_k(fraction=0.01), "#c2334d"),
    "qsgd": Method("qsgd 4-bit", jaxcomp.qsgd(bits=4), "#7a5bb5"),
    "bf16": Method("bf16", jaxcomp.cast("bfloat16"), "#8a6a4f"),
}
DEFAULT_METHODS = ["dense", "qsgd_inf", "terngrad", "sign", "top_k"]

OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "sgd": (optax.sgd, 0.3),
    "momentum": (lambda rate: optax.sgd(rate, momentum=0.9), 0.03),
    "adam": (optax.adam, 1e-3),
}


class Classifier(nn.Module):
    """A perceptron of 0.3 million parameters, nearly all of them in three matrices."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(512, name="first")(images))
        x = nn.relu(nn.Dense(512, name="second")(x))
        return nn.Dense(10, name="logits")(x)


MODEL = Classifier()


class Data(NamedTuple):
    """Images of 8 x 8 pixels in [0, 1] as rows, and their digits."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


class Point(NamedTuple):
    """How good the model is after so many steps."""

    step: int
    loss: float
    test_accuracy: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run reached and what it cost; bytes are those of one device."""

    name: str
    test_accuracy: float
    bytes_per_step: int
    bytes_by_collective: dict[str, int]
    ratio_to_dense: float
    bits_per_element: float
    step_ms: float
    compile_s: float
    sent_mb: float
    curve: list[Point]


# What was asked for.


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, each checked as far as it can be on its own."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--codec", nargs="+", choices=METHODS, default=DEFAULT_METHODS, help="what to compare")
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="the same for every codec")
    add("--learning-rate", type=positive, help="first rate of a cosine decay; by the optimizer")
    add("--epochs", type=at_least(1), default=20, help="passes over the training images")
    add("--batch-size", type=at_least(1), default=128, help="images a step, over all devices")
    add("--devices", type=at_least(2), help="workers; up to eight accelerators or eight simulated")
    add("--seed", type=at_least(0), default=0, help="of the parameters, the order and the noise")
    add("--out", type=pathlib.Path, default=pathlib.Path("out/digits"), help="folder for results")
    args = parser.parse_args(argv)
    args.codec = list(dict.fromkeys(args.codec))
    args.learning_rate = args.learning_rate or OPTIMIZERS[args.optimizer][1]
    return parser, args


def at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(
                f"must be an integer of at least {least}, got {text!r}"
            )
        return int(text)

    return integer


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def find_devices(parser: argparse.ArgumentParser, wanted: int | None) -> list[jax.Device]:
    """Accelerators if there are two or more, and simulated devices of the CPU otherwise."""
    jax.config.update("jax_num_cpu_devices", wanted or 8)  # Before JAX first looks for devices.
    found = jax.devices()
    if len(found) < 2:
        found = jax.devices("cpu")
    if len(found) < (wanted or 2):
        parser.error(
            f"argument --devices: must be at most {len(found)}, the {found[0].platform} devices "
            f"that JAX has here, got {wanted or 'no number'}"
        )
    return found[: wanted or max(n for n in (2, 4, 8) if n <= len(found))]


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, devices: int) -> None:
    """Whether the options fit the devices, the data and the disk."""
    if args.batch_size % devices:
        parser.error(
            f"argument --batch-size: must be a multiple of the {devices} devices, "
            f"got {args.batch_size}"
        )
    images = len(load_digits().target) - TEST_SIZE
    if args.batch_size > images:
        parser.error(
            f"argument --batch-size: must be at most {images}, the images there are to train on, "
            f"got {args.batch_size}"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        parser.error(
            f"argument --out: must be a folder that can be written, got {str(args.out)!r} "
            f"({error.strerror})"
        )


# Training.


def load() -> Data:
    images, digits = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        (images / 16).astype(np.float32),
        digits.astype(np.int32),
        test_size=TEST_SIZE,
        random_state=0,
        stratify=digits,
    )
    return Data((train_x, train_y), (test_x, test_y))


def batches(data: Data, args: argparse.Namespace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every batch of a run, in an order that depends on the seed alone."""
    images, digits = data.train
    order = np.random.default_rng(args.seed)
    for _ in range(args.epochs):
        shuffled = order.permutation(len(images))
        for start in range(0, len(images) - args.batch_size + 1, args.batch_size):
            chosen = shuffled[start : start + args.batch_size]
            yield images[chosen], digits[chosen]


def loss_of(params: Any, batch: Any) -> jax.Array:
    images, digits = batch
    logits = MODEL.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


@jax.jit
def accuracy_of(params: Any, images: jax.Array, digits: jax.Array) -> jax.Array:
    return 100 * jnp.mean(MODEL.apply(params, images).argmax(-1) == digits)


def build_step(tx: optax.GradientTransformationExtraArgs, mesh: Mesh) -> Callable[..., Any]:
    """A data-parallel training step: what differs from a dense one is inside `tx`."""

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(jaxcomp.local(params, AXIS), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, AXIS)

    return jaxcomp.data_parallel(step, mesh, AXIS, donate_argnums=(0, 1))


def train(
    name: str, data: Data, args: argparse.Namespace, mesh: Mesh, show: Callable[[int, Point], None]
) -> Run:
    codec = METHODS[name].codec
    steps = args.epochs * (len(data.train[0]) // args.batch_size)
    rate = optax.cosine_decay_schedule(args.learning_rate, steps)
    tx = optax.chain(
        jaxcomp.compressed_mean(codec, AXIS, key=args.seed), OPTIMIZERS[args.optimizer][0](rate)
    )
    whole, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(AXIS)))
    init = jax.jit(MODEL.init, out_shardings=whole)
    params: Any = init(jax.random.key(args.seed), data.train[0][:1])
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    facts = costs(codec, params, mesh.size)

    start = time.perf_counter()
    batch = jax.device_put(next(batches(data, args)), split)
    step = build_step(tx, mesh).lower(params, state, batch).compile()
    compile_s = time.perf_counter() - start
    sent = jaxcomp.collective_bytes(step)

    # The picture has a logarithmic axis, so the points are spread evenly on one.
    watched = {round(s) for s in np.geomspace(1, steps, 48)}
    curve, times = [], []
    for number, rows in enumerate(batches(data, args), start=1):
        batch = jax.device_put(rows, split)
        start = time.perf_counter()
        params, state, loss = step(params, state, batch)
        loss = float(loss)  # Waits: many simulated devices on few cores must not queue up steps.
        times.append(time.perf_counter() - start)
        if number in watched:
            first = jax.tree.map(lambda x: x.addressable_data(0), params)  # All have the same.
            curve.append(Point(number, loss, float(accuracy_of(first, *data.test))))
        show(steps, curve[-1]._replace(step=number, loss=loss))

    return Run(
        name=name,
        test_accuracy=curve[-1].test_accuracy,
        bytes_per_step=sum(sent.values()),
        bytes_by_collective=sent,
        ratio_to_dense=facts["dense_bytes"] / sum(sent.values()),
        bits_per_element=facts["bits_per_element"],
        step_ms=1e3 * statistics.median(times),
        compile_s=compile_s,
        sent_mb=sum(sent.values()) * steps / 1e6,
        curve=curve,
    )

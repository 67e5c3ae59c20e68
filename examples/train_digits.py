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
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import digits_report as report
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxcomp

AXIS = "data"
TEST_SIZE = 517  # Leaves 1,280 to train on: ten batches of 128.

METHODS: dict[str, tuple[str, Any]] = {
    "dense": ("dense", jaxcomp.Dense()),
    "qsgd_inf": ("qsgd_inf 4-bit", jaxcomp.qsgd_inf(bits=4)),
    "terngrad": ("terngrad", jaxcomp.terngrad()),
    "sign": ("sign", jaxcomp.sign()),
    "top_k": ("top_k 1 %", jaxcomp.top_k(fraction=0.01)),
    "qsgd": ("qsgd 4-bit", jaxcomp.qsgd(bits=4)),
    "bf16": ("bf16", jaxcomp.cast("bfloat16")),
}
DEFAULT_METHODS = ["dense", "qsgd_inf", "terngrad", "sign", "top_k"]

OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "sgd": (optax.sgd, 0.4),
    "momentum": (lambda rate: optax.sgd(rate, momentum=0.9), 0.05),
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
    """Images of 8 x 8 pixels as rows, less the mean training image, and their digits."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, each checked as far as it can be on its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    names, rates = ", ".join(METHODS), ", ".join(f"{r:g} {n}" for n, (_, r) in OPTIMIZERS.items())
    add(
        "--codec",
        nargs="+",
        metavar="NAME",
        choices=METHODS,
        default=DEFAULT_METHODS,
        help=f"what to compare, of {names} (default: the first five)",
    )
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="for every codec (default: sgd)")
    add("--learning-rate", type=positive, help=f"start of a cosine decay (default: {rates})")
    add("--epochs", type=at_least(1), default=14, help="passes over the images (default: 14)")
    add("--batch-size", type=at_least(1), default=128, help="over all devices (default: 128)")
    add("--devices", type=at_least(2), help="how many workers (default: 8, or what there is)")
    add("--seed", type=at_least(0), default=0, help="of parameters, order, noise (default: 0)")
    out = pathlib.Path("out/digits")
    add("--out", type=pathlib.Path, default=out, help=f"folder for results (default: {out})")
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


def find_devices(parser: argparse.ArgumentParser, wanted: int | None) -> list[Any]:
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


def check(
    parser: argparse.ArgumentParser, args: argparse.Namespace, devices: int, images: int
) -> None:
    """Whether the options fit the devices, the data and the disk."""
    if args.batch_size % devices:
        parser.error(
            f"argument --batch-size: must be a multiple of the {devices} devices, "
            f"got {args.batch_size}"
        )
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


def loss_of(params: Any, batch: Any) -> jax.Array:
    images, digits = batch
    logits: Any = MODEL.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, digits).mean()


@jax.jit
def accuracy_of(params: Any, images: jax.Array, digits: jax.Array) -> jax.Array:
    logits: Any = MODEL.apply(params, images)
    return 100 * jnp.mean(logits.argmax(-1) == digits)


def build_step(tx: optax.GradientTransformationExtraArgs, mesh: Mesh) -> Callable[..., Any]:
    """A data-parallel training step: what differs from a dense one is inside `tx`."""

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(jaxcomp.local(params, AXIS), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, AXIS)

    return jaxcomp.data_parallel(step, mesh, AXIS, donate_argnums=(0, 1))


def train(
    name: str, data: Data, args: argparse.Namespace, mesh: Mesh, show: Callable[..., None]
) -> report.Run:
    """One run: builds the step, reads off it what it sends, and takes it to the end."""
    label, codec = METHODS[name]
    optimizer, _ = OPTIMIZERS[args.optimizer]
    steps = args.epochs * (len(data.train[0]) // args.batch_size)
    tx = optax.chain(
        jaxcomp.compressed_mean(codec, AXIS, key=args.seed),
        optimizer(optax.cosine_decay_schedule(args.learning_rate, steps)),
    )
    whole, split = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(AXIS)))
    init = jax.jit(MODEL.init, out_shardings=whole)
    params: Any = init(jax.random.key(args.seed), data.train[0][:1])
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    bits_per_element = jaxcomp.describe(codec, params).bits_per_element
    dense_bytes = jaxcomp.wire_bytes(jaxcomp.Dense(), params, workers=mesh.size)

    batch = jax.device_put(next(batches(data, args)), split)
    step = build_step(tx, mesh).lower(params, state, batch).compile()
    sent = jaxcomp.collective_bytes(step)  # Of this very program, by kind of collective.

    # The picture has a logarithmic axis, so the points are spread evenly on one.
    watched = {round(number) for number in np.geomspace(1, steps, 48)}
    curve, times = [], []
    for number, rows in enumerate(batches(data, args), start=1):
        batch = jax.device_put(rows, split)
        start = time.perf_counter()
        params, state, loss = step(params, state, batch)
        loss = float(loss)  # Waits: on a few cores, simulated devices must not queue up steps.
        times.append(time.perf_counter() - start)
        if number in watched:
            first = jax.tree.map(lambda x: x.addressable_data(0), params)  # All have the same.
            curve.append(report.Point(number, loss, float(accuracy_of(first, *data.test))))
        show(number, steps, loss, curve[-1].test_accuracy)

    return report.Run(
        name=name,
        label=label,
        test_accuracy=curve[-1].test_accuracy,
        bytes_per_step=sum(sent.values()),
        bytes_by_collective=sent,
        times_less_than_dense=dense_bytes / sum(sent.values()),
        bits_per_element=bits_per_element,
        step_ms=1e3 * statistics.median(times),
        sent_mb=steps * sum(sent.values()) / 1e6,
        curve=curve,
    )


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    devices = find_devices(parser, args.devices)
    data = load()
    check(parser, args, len(devices), len(data.train[0]))
    mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)

    console = report.console()
    console.print(
        f"{len(devices)} {devices[0].platform} devices; {args.epochs} epochs of {args.optimizer} "
        f"at {args.learning_rate:g}, batch {args.batch_size}, the same for each codec; one of the "
        f"{TEST_SIZE} test digits is {100 / TEST_SIZE:.1f} points"
    )
    with report.progress(console) as bars:
        runs = [
            train(name, data, args, mesh, report.watcher(bars, METHODS[name][0]))
            for name in args.codec
        ]
    report.print_table(console, runs, devices)
    report.save(args.out, runs, devices, {**vars(args), "out": str(args.out)})
    console.print(f"Saved {args.out / 'digits.png'} and {args.out / 'results.json'}")


if __name__ == "__main__":
    main()

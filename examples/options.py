"""The shared command line of the training examples: options and their checks."""

import argparse
import math
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import optax

import jaxcomp

Optimizer = Callable[[optax.Schedule], optax.GradientTransformation]


class Method(NamedTuple):
    """A way of taking the mean of the workers' gradients.

    Attributes:
        label: what it is called in the table and the picture.
        mean: the first argument of `jaxcomp.compressed_mean`.
        optimizer: from a learning rate, where the one that is chosen for all would be wrong.
        rate: the optimizer whose learning rate that takes, or the rate itself.
    """

    label: str
    mean: Any
    optimizer: Optimizer | None = None
    rate: str | float | None = None

    def learning_rate(self, args: argparse.Namespace) -> float:
        """The common optimizer, unless this method needs its own."""
        if self.rate is None or self.rate == args.optimizer:
            return args.learning_rate
        return args.rates[self.rate] if isinstance(self.rate, str) else self.rate


def warmed_up(fraction: float) -> jaxcomp.ReducerSchedule:
    """Deep Gradient Compression, whose residual has the momentum."""
    feedback = jaxcomp.MomentumCorrection(momentum=0.9)
    shares = jaxcomp.dgc_warmup(fraction, steps_per_epoch=20)
    return jaxcomp.ReducerSchedule(
        tuple((start, jaxcomp.Link(jaxcomp.dgc(share), feedback)) for start, share in shares)
    )


def where_dense(reducer: jaxcomp.Reducer) -> Optimizer:
    """Momentum for the leaves that are not compressed, whose residual has none."""

    def optimizer(rate: optax.Schedule) -> optax.GradientTransformation:
        momentum = optax.masked(optax.trace(0.9), jaxcomp.dense_leaves(reducer))
        return optax.chain(momentum, optax.sgd(rate))

    return optimizer


def sign_of(rate: optax.Schedule) -> optax.GradientTransformation:
    """DeMo's step after the mean: its residual is the momentum."""
    return optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(rate))


def without_memory(codec: jaxcomp.Codec) -> jaxcomp.Link:
    """A sparsifier without a residual, for comparison; the warning is suppressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return jaxcomp.Link(codec, jaxcomp.NoFeedback())


def remembered(dtype: str) -> jaxcomp.Link:
    """Signs with a residual that is kept in fewer bits than the gradient."""
    return jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual(dtype=dtype))


DGC = warmed_up(0.001)
EF21 = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
TWO_WAYS = jaxcomp.TwoShot(up=EF21, down=EF21)
METHODS: dict[str, Method] = {
    "dense": Method("dense", jaxcomp.Dense()),
    "qsgd_inf": Method("qsgd_inf 4-bit", jaxcomp.qsgd_inf(bits=4)),
    "terngrad": Method("terngrad", jaxcomp.terngrad()),
    "sign": Method("sign", jaxcomp.sign()),
    "top_k": Method("top_k 1 %", jaxcomp.top_k(fraction=0.01)),
    "qsgd": Method("qsgd 4-bit", jaxcomp.qsgd(bits=4)),
    "nuqsgd": Method("nuqsgd 4-bit", jaxcomp.nuqsgd(bits=4)),
    "natural": Method("natural 8-bit", jaxcomp.natural(bits=8)),
    "eden": Method("eden 1-bit", jaxcomp.eden(bits=1, rotations=2)),
    "bf16": Method("bf16", jaxcomp.cast("bfloat16")),
    "top_k_alone": Method("top_k 1 % alone", without_memory(jaxcomp.top_k(fraction=0.01))),
    "sidco": Method("sidco 0.1 %", jaxcomp.sidco(fraction=0.001)),
    "dgc": Method("dgc 0.1 %", DGC, optimizer=where_dense(DGC), rate="momentum"),
    "powersgd": Method("PowerSGD rank 4", jaxcomp.PowerIteration(rank=4)),
    "two_ways": Method("EF21, sign both ways", TWO_WAYS),
    "sign_bf16": Method("sign, bf16 memory", remembered("bfloat16")),
    "sign_int8": Method("sign, 8-bit memory", remembered("int8")),
    "demo": Method(
        "DeMo",
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.demo(k=32), jaxcomp.Residual(decay=0.999))),
        optimizer=sign_of,
        rate=1e-3,
    ),
}
DEFAULT_METHODS = ["dense", "qsgd_inf", "terngrad", "sign", "top_k"]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": optax.adam,
}


def parser(
    description: str,
    *,
    optimizer: str,
    rates: Mapping[str, float],
    decay: str,
    length: tuple[str, int, str],
    batch_size: int,
    out: str,
) -> argparse.ArgumentParser:
    """The options of every training example, with the defaults of one.

    Args:
        description: what the example does.
        optimizer: the default one.
        rates: the default learning rate of each optimizer.
        decay: what the learning rate is the start or the peak of.
        length: how a run's length is given: the option, its default and what it counts.
        batch_size: over all devices.
        out: the folder for results.
    """
    made = argparse.ArgumentParser(description=description)
    add = made.add_argument
    names, by_default = ", ".join(METHODS), ", ".join(f"{r:g} {n}" for n, r in rates.items())
    add(
        "--codec",
        nargs="+",
        metavar="NAME",
        choices=METHODS,
        default=DEFAULT_METHODS,
        help=f"what to compare, of {names} (default: the first five)",
    )
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default=optimizer,
        help=f"for every codec (default: {optimizer})",
    )
    add("--learning-rate", type=positive, help=f"{decay} (default: {by_default})")
    option, default, counted = length
    add(option, type=at_least(1), default=default, help=f"{counted} (default: {default})")
    add(
        "--batch-size",
        type=at_least(1),
        default=batch_size,
        help=f"over all devices (default: {batch_size})",
    )
    add("--devices", type=at_least(2), help="how many workers (default: 8, or what there is)")
    add("--seed", type=at_least(0), default=0, help="of parameters, order, noise (default: 0)")
    folder = pathlib.Path(out)
    add("--out", type=pathlib.Path, default=folder, help=f"folder for results (default: {folder})")
    return made


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, rates: Mapping[str, float]
) -> argparse.Namespace:
    """The options, each checked as far as it can be on its own."""
    args = parser.parse_args(argv)
    args.codec = list(dict.fromkeys(args.codec))
    args.rates = dict(rates)
    args.learning_rate = args.learning_rate or rates[args.optimizer]
    return args


def label(name: str) -> str:
    """The name of a method in the table and the picture."""
    return METHODS[name].label


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


def refuse(parser: argparse.ArgumentParser, option: str, must: str, got: Any) -> NoReturn:
    """Ends the program with an error that names the allowed and the given values."""
    parser.error(f"argument {option}: must be {must}, got {got}")


def find_devices(parser: argparse.ArgumentParser, wanted: int | None) -> list[Any]:
    """Accelerators if there are two or more, and simulated devices of the CPU otherwise."""
    jax.config.update("jax_num_cpu_devices", wanted or 8)  # Before JAX first looks for devices.
    found = jax.devices()
    if len(found) < 2:
        found = jax.devices("cpu")
    if len(found) < (wanted or 2):
        platform = found[0].platform
        most = f"at most {len(found)}, the {platform} devices that JAX has here"
        refuse(parser, "--devices", most, wanted or "no number")
    return found[: wanted or max(n for n in (2, 4, 8) if n <= len(found))]


def check(parser: argparse.ArgumentParser, args: argparse.Namespace, devices: int) -> None:
    """Whether the options fit the devices and the disk."""
    if args.batch_size % devices:
        refuse(parser, "--batch-size", f"a multiple of the {devices} devices", args.batch_size)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        got = f"{str(args.out)!r} ({error.strerror})"
        refuse(parser, "--out", "a folder that can be written", got)

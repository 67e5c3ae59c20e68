"""The command line: `jaxcomp codecs`, `jaxcomp bench`, `jaxcomp plan`.

Codecs and reducers are written as in Python, for instance `"qsgd_inf(bits=4)"` or
`"TwoShot(up=qsgd(bits=4), down=qsgd(bits=8))"`; nothing but the names of `jaxcomp` is known there.
"""

import argparse
import ast
import functools
import importlib
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp import measuring, offers, pictures, planning, tables
from jaxcomp.theory import plan as plan_

CATALOGUE = (
    "cast('bfloat16')",
    "cast('float8_e4m3fn')",
    "cast('float8_e5m2')",
    "qsgd(bits=4)",
    "qsgd_inf(bits=4)",
    "qsgd_inf(bits=8)",
    "nuqsgd(bits=4)",
    "alq(bits=4)",
    "amq(bits=4)",
    "blockwise(bits=4)",
    "natural()",
    "natural_dithering(bits=4)",
    "mx('mxfp4')",
    "mx('nvfp4')",
    "eden(bits=2)",
    "eden(bits=4)",
    "drive()",
    "ndsc(bits=4)",
    "dsc(bits=4)",
    "rotated_uniform(bits=4)",
    "ecsq(bits=2)",
    "elias_qsgd(bits=4)",
    "huffman_nuqsgd(bits=4)",
    "int_sgd(bits=8)",
    "thc(bits=4)",
    "terngrad()",
    "threshold_ternary()",
    "averaged_ternary(workers=8)",
    "sign()",
    "msc(sign(), stages=2)",
    "random_k(fraction=0.01)",
    "top_k(fraction=0.01)",
    "threshold(2.6, fraction=0.012)",
    "sidco(fraction=0.001)",
    "dgc(fraction=0.001)",
    "fastsgd()",
    "demo()",
)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; errors of its arguments end it with what is allowed and what came."""
    parser = build()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except ValueError as error:
        parser.exit(2, f"jaxcomp {args.command}: {error}\n")
    except BrokenPipeError:  # Of `jaxcomp codecs | head`.
        sys.stderr.close()


def build() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="jaxcomp",
        description="Communication-compressed training: what there is, what it takes, if it pays.",
        epilog=(__doc__ or "").split("\n\n")[1].replace("`", ""),
    )
    parser.add_argument("--version", action="version", version=jaxcomp.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    listed = commands.add_parser("codecs", help="every recipe of a codec: bits, kind, feedback")
    bench = commands.add_parser("bench", help="how long codecs take on this device")
    plan = commands.add_parser("plan", help="whether compressing pays on a link, and by what")
    for command, run in ((listed, codecs_), (bench, bench_), (plan, plan_for)):
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument(
            "--codec", nargs="+", metavar="EXPRESSION", help="these, and no others"
        )
    for command in (listed, bench):
        command.add_argument("--elements", type=count, default=2**22, help="(default: 4,194,304)")
    bench.add_argument("--repeats", type=count, default=5, help="a median is of (default: 5)")
    _options_of_plan(plan.add_argument)
    return parser


def _options_of_plan(add: Callable[..., Any]) -> None:
    add("--params", type=count, help="how many parameters, as in 125e6")
    add(
        "--tree",
        type=tree,
        metavar="MODULE:NAME",
        help="a tree of parameters or shapes, or what returns one",
    )
    add("--workers", type=levels, required=True, help="8; or 4x8: hosts of eight devices")
    add("--link", type=bandwidth, required=True, help="of a worker, as in 10Gbit or 1.2GB")
    add("--latency", type=seconds, default=50e-6, help="of a message (default: 50us)")
    add("--fast-link", type=bandwidth, help="between the devices of a host")
    add("--fast-latency", type=seconds, default=5e-6, help="(default: 5us)")
    add(
        "--step",
        type=step,
        default=0.0,
        help="without communication: 250ms, or MODULE:NAME to call and time",
    )
    add("--backward", type=seconds, default=0.0, help="of that, the backward pass")
    add("--overlap", type=float, default=0.0, help="share of it that the mean runs beside")
    add("--every", type=count, default=1, help="steps from one mean to the next (default: 1)")
    add("--max-error", type=float, help="leave out what loses more of one normal message")
    add(
        "--device-bandwidth",
        type=bandwidth,
        help="memory bandwidth of the device to plan for, as in 3.3TB: codecs are timed here, and "
        "taken to be faster by so much as its memory is",
    )
    add("--elements", type=count, default=2**22, help="to time codecs with (default: 4,194,304)")
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw it, as .png, .svg or .pdf")


def codecs_(args: argparse.Namespace) -> None:
    """Every recipe, without running one."""
    side = max(1, round(args.elements**0.5))
    like = jax.ShapeDtypeStruct((side, -(-args.elements // side)), jnp.float32)
    found = []
    for text in args.codec or CATALOGUE:
        codec = _codec(text)
        kind = "contractive" if offers.contractive(codec) else "biased"
        found.append(
            {
                "codec": text,
                "bits": 8 * jaxcomp.wire_bytes(codec, like) / math.prod(like.shape),
                "kind": "unbiased" if codec.unbiased else kind,
                "linear": codec.linear,
                "feedback": type(jaxcomp.Cheapest(codec).uplink.feedback).__name__,
            }
        )
    heads = ("codec", "bits/element", "kind", "linear", "feedback by default")
    rows = [
        (
            line["codec"],
            f"{line['bits']:.3f}",
            line["kind"],
            "yes" if line["linear"] else "",
            line["feedback"],
        )
        for line in found
    ]
    _show(args, found, heads, rows, right=(False, True))


def bench_(args: argparse.Namespace) -> None:
    """Encoding and decoding on this device, beside a copy."""
    copy, found = measuring.copy(args.elements) * args.elements, []
    for text in args.codec or CATALOGUE:
        link = jaxcomp.Cheapest(_codec(text)).uplink
        took = measuring.measure(link, args.elements, repeats=args.repeats)
        bits = 8 * jaxcomp.wire_bytes(link.codec, jnp.zeros((1024, 1024))) / 2**20
        even = (16 - bits) / 8 * took.elements / (took.whole + took.add)
        found.append(
            {
                "codec": text,
                "bits": bits,
                "encode": took.whole - took.decode,
                "decode": took.decode,
                "add": took.add,
                "copies": took.whole / copy,
                "error": took.error,
                "even_with_bfloat16": max(0.0, even),
            }
        )
        _progress(text)
    heads = ("codec", "bits", "encode", "decode", "add one", "copies", "error", "pays below")
    rows = [
        (
            line["codec"],
            f"{line['bits']:.2f}",
            *(plan_.duration(line[name]) for name in ("encode", "decode", "add")),
            f"{line['copies']:.1f}",
            f"{line['error']:.2g}",
            plan_.speed(line["even_with_bfloat16"]),
        )
        for line in found
    ]
    device = jax.devices()[0].device_kind
    about = (
        f"{args.elements:,} float32 on {device}, with feedback; a copy takes "
        f"{plan_.duration(copy)}. Pays below: between two workers, against bfloat16."
    )
    _show(args, found, heads, rows, right=[False] + [True] * 7, about=about)


def plan_for(args: argparse.Namespace) -> None:
    """A plan for a model, a number of workers and a link."""
    if (args.params is None) == (args.tree is None):
        raise ValueError("one of --params and --tree must be given, and not both")
    if (len(args.workers) > 1) != (args.fast_link is not None):
        raise ValueError("--fast-link goes with two numbers of --workers, as in 4x8, and only then")
    fast = args.fast_link and jaxcomp.Network(args.fast_link, args.fast_latency)
    workers = args.workers if len(args.workers) > 1 else args.workers[0]
    codecs = None if args.codec is None else {text: _expression(text) for text in args.codec}
    planned = planning.plan(
        args.params if args.tree is None else args.tree,
        workers,
        jaxcomp.Network(args.link, args.latency),
        codecs=codecs,
        compute=args.step if isinstance(args.step, float) else measuring.seconds(args.step),
        backward=args.backward,
        overlap=args.overlap,
        every=args.every,
        fast=fast,
        max_error=args.max_error,
        clock=_clock(args),
    )
    if args.plot is not None:
        pictures.save(planned, args.plot)
    print(planned.to_json() if args.json else planned)


def _clock(args: argparse.Namespace) -> planning.Clock:
    """Measures here; on a device with faster memory, takes the same so many times faster."""

    def here(way: Any) -> measuring.Measured:
        took = measuring.measure(way, args.elements)
        _progress(plan_.duration(took.whole))
        return took

    if args.device_bandwidth is None:
        return here
    own = 8 / measuring.copy(args.elements)  # Bytes a second, read and written.
    return lambda way: here(way).faster(args.device_bandwidth / own)


def _progress(said: str) -> None:
    """A sign of life where someone is looking."""
    if sys.stderr.isatty():
        print(f"\r\033[Kmeasured {said}", end="", file=sys.stderr, flush=True)


def _show(
    args: argparse.Namespace,
    found: list[dict[str, Any]],
    heads: Sequence[str],
    rows: list[tuple[str, ...]],
    *,
    right: Sequence[bool],
    about: str = "",
) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    if about:
        print(about, end="\n\n")
    print("\n".join(tables.text([tuple(heads), *rows], right=right)))


def _codec(text: str) -> Any:
    codec = _expression(text)
    if not isinstance(codec, jaxcomp.Codec):
        raise ValueError(f"{text!r} must be a codec, as in 'sign()', and is {codec!r}")
    return codec


def _expression(text: str) -> Any:
    """What an expression of names of jaxcomp, calls of them and literals stands for."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            made = getattr(jaxcomp, name, None)
            if name.startswith("_") or not callable(made):
                close = ", ".join(sorted(entry.partition("(")[0] for entry in CATALOGUE))
                raise ValueError(f"{name!r} in {text!r} must be a name of jaxcomp, such as {close}")
            settings = {str(word.arg): value(word.value) for word in node.keywords}
            return made(*map(value, node.args), **settings)
        return ast.literal_eval(node)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no expression such as 'qsgd_inf(bits=4)': {error}") from None


def _named(text: str) -> Any:
    """What `module:name` stands for; modules of the folder that one is in are found too."""
    module, _, name = text.partition(":")
    if not name:
        wanted = "must be MODULE:NAME, as in my_model:shapes"
        raise argparse.ArgumentTypeError(f"{wanted}, got {text!r}")
    sys.path.insert(0, "")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"cannot find {text!r}: {error}") from None
    finally:
        sys.path.remove("")


def tree(text: str) -> Any:
    """Parameters, or their shapes, by where they are."""
    found = _named(text)
    return jax.eval_shape(found) if callable(found) else found


def count(text: str) -> int:
    """A number of things: 25000000, 25e6, 25M."""
    value = _number(text, _UNITS, "a positive whole number, as in 25e6 or 25M")
    if value < 1 or value != round(value):
        raise argparse.ArgumentTypeError(f"must be a positive whole number, got {text!r}")
    return round(value)


def levels(text: str) -> tuple[int, ...]:
    """How many workers on each level: 8, or 4x8."""
    found = tuple(int(part) if part.isdecimal() else 0 for part in text.split("x"))
    if not 1 <= len(found) <= 2 or min(found) < 1 or math.prod(found) < 2:
        raise argparse.ArgumentTypeError(f"must be like 8 or 4x8, at least 2 in all, got {text!r}")
    return found


def bandwidth(text: str) -> float:
    """Bytes a second: 100Mbit, 10Gbit/s, 3.3TB."""
    units = {f"{k}bit": v / 8 for k, v in _UNITS.items()} | {f"{k}b": v for k, v in _UNITS.items()}
    return _number(text.removesuffix("/s"), units, "a speed such as 100Mbit, 10Gbit or 3.3TB")


def seconds(text: str) -> float:
    """A time: 0.25, 250ms, 50us."""
    return _number(text, {"": 1.0, **_TIMES}, "a time such as 0.25, 250ms or 50us")


def step(text: str) -> float | Callable[[], Any]:
    """A time, or what takes as long: a function of no arguments."""
    if ":" not in text:
        return seconds(text)
    run = _named(text)
    return lambda: jax.block_until_ready(run())


def _number(text: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-zµ]*)\s*", text.lower())
    try:
        number = float(found.group(1)) * units[found.group(2)] if found else math.nan
    except (KeyError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return number


if __name__ == "__main__":
    main()

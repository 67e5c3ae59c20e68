"""The command line: `jaxcomp codecs`, `jaxcomp bench`, `jaxcomp plan`.

Codecs and reducers are written as in Python, for instance `"qsgd_inf(bits=4)"` or
`"TwoShot(up=qsgd(bits=4), down=qsgd(bits=8))"`; only the names of `jaxcomp` and
`jaxcomp.codecs` are known there.
"""

import argparse
import ast
import functools
import importlib
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.planning import models, options, planner, plots, timing
from jaxcomp.recipes import catalogue
from jaxcomp.theory import rounds as rounds_, tables, units


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; an invalid argument ends it with an error message."""
    parser = build()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except ValueError as error:
        parser.exit(2, f"jaxcomp {args.command}: {error}\n")
    except BrokenPipeError:  # For instance `jaxcomp codecs | head`.
        sys.stderr.close()


def build() -> argparse.ArgumentParser:
    """Builds the parser of the commands and their options."""
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
        command.add_argument(
            "--elements", type=options.count, default=2**22, help="(default: 4,194,304)"
        )
    bench.add_argument(
        "--repeats", type=options.count, default=7, help="the fastest counts (default: 7)"
    )
    _options_of_plan(plan.add_argument)
    return parser


def _options_of_plan(add: Callable[..., Any]) -> None:
    _options_of_model(add)
    _options_of_links(add)
    _options_of_step(add)
    _options_of_rounds(add)
    add("--max-error", type=float, help="leave out codecs with a larger error, as in 0.5")
    _options_of_clock(add)
    add("--plot", type=pathlib.Path, metavar="FILE", help="draw it, as .png, .svg or .pdf")


def _options_of_model(add: Callable[..., Any]) -> None:
    add(
        "--params",
        type=options.count,
        help="as in 125e6: a transformer like GPT-2 of so many parameters",
    )
    add("--model", choices=models.MODELS, help="the shapes of a known model")
    add(
        "--tree",
        type=tree,
        metavar="MODULE:NAME",
        help="a tree of parameters or shapes, or what returns one",
    )


def _options_of_links(add: Callable[..., Any]) -> None:
    add("--workers", type=options.levels, required=True, help="8; or 4x8: hosts of eight devices")
    add(
        "--link",
        type=options.bandwidth,
        required=True,
        help="speed of the slow link of one worker, or of one host with --workers 4x8, as in "
        "10Gbit or 1.2GB",
    )
    add(
        "--link-per",
        choices=("host", "device"),
        default="host",
        help="with --workers 4x8, whose link that is: of a host, whose devices share it, or of "
        "each device (default: host)",
    )
    add(
        "--link-only",
        action="store_true",
        help="count the links alone: time no codec, as if encoding and decoding took no time",
    )
    add("--latency", type=options.seconds, default=50e-6, help="of a message (default: 50us)")
    add("--fast-link", type=options.bandwidth, help="of one device to the others of its host")
    add("--fast-latency", type=options.seconds, default=5e-6, help="(default: 5us)")


def _options_of_step(add: Callable[..., Any]) -> None:
    add(
        "--step",
        type=step,
        default=0.0,
        help="without communication: 250ms, or MODULE:NAME to call and time",
    )
    add("--backward", type=options.seconds, default=0.0, help="of that, the backward pass")
    add("--overlap", type=float, default=0.0, help="share of it that the mean runs beside")
    add(
        "--every",
        type=options.count,
        default=1,
        help="steps from one mean to the next (default: 1)",
    )


def _options_of_rounds(add: Callable[..., Any]) -> None:
    add(
        "--rounds",
        action="store_true",
        help="plan rounds of local steps: how many, by which codec, with which delay",
    )
    add(
        "--stall",
        type=float,
        default=0.05,
        help="with --rounds, the share that exchanges may add to steps (default: 0.05)",
    )
    add(
        "--longest",
        type=options.count,
        default=100,
        help="with --rounds, the longest round to prefer (default: 100 steps)",
    )


def _options_of_clock(add: Callable[..., Any]) -> None:
    add(
        "--device-bandwidth",
        type=options.bandwidth,
        help="memory bandwidth of the device to plan for, as in 3.3TB: codecs are timed here, and "
        "taken to be faster by so much as its memory is",
    )
    add(
        "--elements",
        type=options.count,
        default=2**22,
        help="to time codecs with (default: 4,194,304)",
    )
    add("--repeats", type=options.count, default=7, help="of which the fastest counts (default: 7)")


def codecs_(args: argparse.Namespace) -> None:
    """Prints every recipe, without running one."""
    side = max(1, round(args.elements**0.5))
    like = jax.ShapeDtypeStruct((side, -(-args.elements // side)), jnp.float32)
    found = []
    for text in args.codec or catalogue.expressions():
        codec = _codec(text)
        kind = "contractive" if codec.contractive else "biased"
        found.append(
            {
                "codec": text,
                "bits": 8 * jaxcomp.wire_bytes(codec, like) / math.prod(like.shape),
                "kind": "unbiased" if codec.unbiased else kind,
                "linear": codec.linear,
                "feedback": type(jaxcomp.Auto(codec).uplink.feedback).__name__,
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
    """Times encoding and decoding on this device, in comparison with a copy."""
    copy, found = timing.copy(args.elements) * args.elements, []
    for text in args.codec or catalogue.expressions():
        link = jaxcomp.Auto(_codec(text)).uplink
        took = timing.measure(link, args.elements, repeats=args.repeats)
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
                "spread": took.spread,
                "error": took.error,
                "even_with_bfloat16": max(0.0, even),
            }
        )
        _progress(text)
    heads = (
        "codec",
        "bits",
        "encode",
        "decode",
        "add one",
        "spread",
        "copies",
        "error",
        "pays below",
    )
    rows = [
        (
            line["codec"],
            f"{line['bits']:.2f}",
            *(units.duration(line[name]) for name in ("encode", "decode", "add")),
            f"{100 * line['spread']:.0f} %",
            f"{line['copies']:.1f}",
            f"{line['error']:.2g}",
            units.speed(line["even_with_bfloat16"]),
        )
        for line in found
    ]
    device = jax.devices()[0].device_kind
    about = (
        f"{args.elements:,} float32 on {device}, with feedback; a copy takes "
        f"{units.duration(copy)}. Times are the fastest of {args.repeats} repeats; spread: how far "
        "their median is above it. Pays below: between two workers, against bfloat16."
    )
    _show(args, found, heads, rows, right=[False] + [True] * 8, about=about)


def plan_for(args: argparse.Namespace) -> None:
    """Prints a plan for a model, a number of workers and a link."""
    if sum(given is not None for given in (args.params, args.model, args.tree)) != 1:
        raise ValueError("`plan` needs exactly one of --params, --model and --tree")
    if (len(args.workers) > 1) != (args.fast_link is not None):
        raise ValueError(
            "--fast-link and two numbers of --workers, as in 4x8, must be given together"
        )
    fast = args.fast_link and jaxcomp.planning.Network(args.fast_link, args.fast_latency)
    workers = args.workers if len(args.workers) > 1 else args.workers[0]
    codecs = None if args.codec is None else {text: _expression(text) for text in args.codec}
    like = models.MODELS[args.model]() if args.model else args.params or args.tree
    planned = planner.plan(
        like,
        workers,
        jaxcomp.planning.Network(args.link, args.latency),
        codecs=codecs,
        compute=args.step if isinstance(args.step, float) else min(timing.times(args.step)),
        backward=args.backward,
        overlap=args.overlap,
        every=args.every,
        fast=fast,
        link_per=args.link_per,
        link_only=args.link_only,
        max_error=args.max_error,
        clock=None if args.link_only else _clock(args),
    )
    if args.plot is not None:
        plots.save(planned, args.plot)
    if args.rounds:
        planned = rounds_.rounds(planned, stall=args.stall, longest=args.longest)
    print(planned.to_json() if args.json else planned)


def _clock(args: argparse.Namespace) -> planner.Clock:
    """Measures on this device, and scales the times to the target device's memory bandwidth."""

    def here(way: Any) -> timing.Measured:
        took = timing.measure(way, args.elements, repeats=args.repeats)
        _progress(units.duration(took.whole))
        return took

    if args.device_bandwidth is None:
        return here
    own = 8 / timing.copy(args.elements)  # Bytes a second, reads plus writes.
    return lambda way: here(way).faster(args.device_bandwidth / own)


def _progress(said: str) -> None:
    """Prints progress if the output is a terminal."""
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
        raise ValueError(f"{text!r} must be a codec, as in 'sign()', got {codec!r}")
    return codec


def _expression(text: str) -> Any:
    """Evaluates an expression made of jaxcomp's names, calls and literals."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
            made = getattr(jaxcomp, name, None) or getattr(jaxcomp.codecs, name, None)
            if name.startswith("_") or not callable(made):
                entries = catalogue.expressions()
                close = ", ".join(sorted({entry.partition("(")[0] for entry in entries}))
                raise ValueError(
                    f"{name!r} in {text!r} must be a name of jaxcomp or jaxcomp.codecs, such as "
                    f"{close}"
                )
            settings = {str(word.arg): value(word.value) for word in node.keywords}
            return made(*map(value, node.args), **settings)
        return ast.literal_eval(node)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(
            f"{text!r} must be an expression such as 'qsgd_inf(bits=4)': {error}"
        ) from None


def _named(text: str) -> Any:
    """Imports `module:name`; modules of the working directory are found too."""
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
    """Parses `module:name` of a tree of parameters or shapes."""
    found = _named(text)
    return jax.eval_shape(found) if callable(found) else found


def step(text: str) -> float | Callable[[], Any]:
    """Parses the time of a step, or `module:name` of a function to time."""
    if ":" not in text:
        return options.seconds(text)
    run = _named(text)
    return lambda: jax.block_until_ready(run())


if __name__ == "__main__":
    main()

"""`jaxcomp codecs` and `jaxcomp bench`, and how they print."""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp.cli import expressions
from jaxcomp.feedback import default
from jaxcomp.planning import timing
from jaxcomp.recipes import catalogue
from jaxcomp.reducers import choose
from jaxcomp.theory import tables, units


def codecs(args: argparse.Namespace) -> None:
    """Prints every recipe, without running one."""
    like, found = _like(args.elements), []
    for text in args.codec or catalogue.expressions():
        codec = expressions.evaluate(text)
        if not isinstance(codec, jaxcomp.Codec):
            others = "; `jaxcomp bench` and `jaxcomp plan` take reducers and links"
            raise ValueError(f"{text!r} must be a codec, such as sign{others}")
        kind = "contractive" if codec.contractive else "biased"
        found.append(
            {
                "codec": text,
                "bits": 8 * jaxcomp.wire_bytes(codec, like) / math.prod(like.shape),
                "kind": "unbiased" if codec.unbiased else kind,
                "linear": codec.linear,
                "feedback": type(default(codec)).__name__,
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
    show(args, found, heads, rows, right=(False, True))


def bench(args: argparse.Namespace) -> None:
    """Times encoding and decoding on this device, in comparison with a copy."""
    texts = args.codec or catalogue.expressions()
    ways = {text: _way(text, expressions.evaluate(text)) for text in texts}
    copy = timing.copy(args.elements) * args.elements
    found = []
    for text, way in ways.items():
        found.append(_timed(text, way, args, copy))
        progress(text)
    heads = ("codec", "bits", "encode", "decode", "add one")
    heads += ("spread", "copies", "error", "pays below")
    rows = [
        (
            line["codec"],
            f"{line['bits']:.2f}",
            units.duration(line["encode"]),
            *("–" if line[n] is None else units.duration(line[n]) for n in ("decode", "add")),
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
    if any(line["decode"] is None for line in found):
        about += " A reducer is timed whole, over one worker, without sending."
    show(args, found, heads, rows, right=[False] + [True] * 8, about=about)


def _way(text: str, given: Any) -> Any:
    """The part to time: a codec with its feedback, a link, or a whole reducer."""
    if isinstance(given, jaxcomp.Codec):
        return choose.given(given)
    if isinstance(given, jaxcomp.Hierarchical):
        raise ValueError(
            f"{text!r} must be a codec, a link, or a reducer over one axis: bench one of the "
            "reducers of Hierarchical, or compare it by `jaxcomp plan --workers 4x8`"
        )
    if not isinstance(given, jaxcomp.Link | jaxcomp.Reducer):
        raise ValueError(f"{text!r} must be a codec, a link or a reducer, got {given!r}")
    return given


def _timed(text: str, way: Any, args: argparse.Namespace, copy: float) -> dict[str, Any]:
    took = timing.measure(way, args.elements, repeats=args.repeats)
    reducer = jaxcomp.Gather(way) if isinstance(way, jaxcomp.Link) else way
    like = _like(args.elements)
    bits = 8 * jaxcomp.wire_bytes(reducer, like, workers=2) / math.prod(like.shape)
    even = (16 - bits) / 8 * took.elements / (took.whole + took.add)
    whole = not isinstance(way, jaxcomp.Link)
    return {
        "codec": text,
        "bits": bits,
        "encode": took.whole - took.decode,
        "decode": None if whole else took.decode,
        "add": None if whole else took.add,
        "copies": took.whole / copy,
        "spread": took.spread,
        "error": took.error,
        "even_with_bfloat16": max(0.0, even),
    }


def _like(elements: int) -> jax.ShapeDtypeStruct:
    """A square matrix of so many elements, or nearly one."""
    side = max(1, round(elements**0.5))
    return jax.ShapeDtypeStruct((side, -(-elements // side)), jnp.float32)


def progress(said: str) -> None:
    """Prints progress if the output is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[Kmeasured {said}", end="", file=sys.stderr, flush=True)


def show(
    args: argparse.Namespace,
    found: Any,
    heads: Sequence[str],
    rows: list[tuple[str, ...]],
    *,
    right: Sequence[bool],
    about: str = "",
) -> None:
    """Prints what was found as JSON, or as a table."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print(tables.to_json(found))
        return
    if about:
        print(about, end="\n\n")
    print("\n".join(tables.text([tuple(heads), *rows], right=right)))

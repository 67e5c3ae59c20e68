"""`jaxcomp codecs` and `jaxcomp bench`: the bits of codecs, and their times on this device."""

import argparse
import math
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from jaxcomp import expressions
from jaxcomp.cli import output
from jaxcomp.feedback import default
from jaxcomp.planning import timing
from jaxcomp.recipes import catalogue
from jaxcomp.reducers import choose
from jaxcomp.tables import Column
from jaxcomp.theory import units

_CODECS = (
    Column("codec", itemgetter("codec")),
    Column("bits/element", itemgetter("bits"), ".3f", right=True),
    Column("kind", itemgetter("kind")),
    Column("linear", lambda line: "yes" if line["linear"] else ""),
    Column("feedback by default", itemgetter("feedback")),
)


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
    output.show(args, found, _CODECS, found)


_BENCH = (
    Column("codec", itemgetter("codec")),
    Column("bits", itemgetter("bits"), ".2f", right=True),
    Column("encode", itemgetter("encode"), units.duration, right=True),
    Column("decode", itemgetter("decode"), units.duration, right=True),
    Column("add one", itemgetter("add"), units.duration, right=True),
    Column("spread", lambda line: f"{100 * line['spread']:.0f} %", right=True),
    Column("copies", itemgetter("copies"), ".1f", right=True),
    Column("error", itemgetter("error"), ".2g", right=True),
    Column("pays below", itemgetter("even_with_bfloat16"), units.speed, right=True),
)


def bench(args: argparse.Namespace) -> None:
    """Times encoding and decoding on this device, in comparison with a copy."""
    texts = args.codec or catalogue.expressions()
    ways = {text: _way(text, expressions.evaluate(text)) for text in texts}
    copy = timing.copy(args.elements) * args.elements
    found = []
    for text, way in ways.items():
        output.progress(f"timing {text}", lines=True)
        found.append(_timed(text, way, args, copy))
    device = jax.devices()[0].device_kind
    about = (
        f"{args.elements:,} float32 on {device}, with feedback; a copy takes "
        f"{units.duration(copy)}. Times are the fastest of {args.repeats} repeats; spread: how far "
        "their median is above it. Pays below: between two workers, against bfloat16."
    )
    if any(line["decode"] is None for line in found):
        about += " A reducer is timed whole, over one worker, without sending."
    output.show(args, found, _BENCH, found, about)


def _way(text: str, given: Any) -> Any:
    """The part to time: a codec with its feedback, a link, or a whole reducer."""
    if isinstance(given, jaxcomp.Codec):
        return choose.link_or_reducer(given)
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

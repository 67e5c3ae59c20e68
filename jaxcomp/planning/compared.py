"""The codecs that a plan compares by default, and how a user writes their means."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxcomp.feedback import Link, Residual
from jaxcomp.recipes.quantizers import qsgd_inf, sign
from jaxcomp.recipes.sparsifiers import chunk_top_k, sidco, top_k
from jaxcomp.reducers.dense import Dense
from jaxcomp.reducers.gather import Gather
from jaxcomp.reducers.power import PowerIteration
from jaxcomp.reducers.two_shot import TwoShot

_WRITTEN: Mapping[str, tuple[str, Any]] = {
    "qsgd_inf 8-bit": ("jaxcomp.qsgd_inf(bits=8)", qsgd_inf(bits=8)),
    "qsgd_inf 4-bit": ("jaxcomp.qsgd_inf(bits=4)", qsgd_inf(bits=4)),
    "qsgd_inf 2-bit": ("jaxcomp.qsgd_inf(bits=2)", qsgd_inf(bits=2)),
    "sign": ("jaxcomp.sign()", sign()),
    "top_k 1 %": ("jaxcomp.top_k(fraction=0.01)", top_k(fraction=0.01)),
    "sidco 0.1 %": ("jaxcomp.sidco(fraction=0.001)", sidco(fraction=0.001)),
    "PowerSGD rank 4": ("jaxcomp.PowerIteration(rank=4)", PowerIteration(rank=4)),
}
CODECS: Mapping[str, Any] = {name: codec for name, (_, codec) in _WRITTEN.items()}
"""The codecs that a plan compares by default."""
_DENSE: Mapping[str, tuple[str, Any]] = {
    "dense float32": ("jaxcomp.Dense()", Dense()),
    "dense bfloat16": ('jaxcomp.Dense("bfloat16")', Dense("bfloat16")),
}
DENSE: Mapping[str, Any] = {name: mean for name, (_, mean) in _DENSE.items()}
"""The dense means, of which there is one over all axes."""
_LOCAL = {"SparseLoCo": ("jaxcomp.chunk_top_k()", Gather(Link(chunk_top_k(), Residual(0.95))))}
LOCAL: Mapping[str, Any] = {name: mean for name, (_, mean) in _LOCAL.items()}
"""Codecs of methods of local steps, beside those above."""


def delayed(reducer: Any, delay: float | None) -> Any:
    """The reducer with this delay, if it has one.

    Args:
        reducer: a reducer.
        delay: seconds one way; None for what is assumed.
    """
    if delay is None or not isinstance(reducer, Dense | Gather | TwoShot):
        return reducer
    return dataclasses.replace(reducer, delay=delay)


def means(
    named: Mapping[str, Any], sizes: tuple[int, ...], delay: float | None = None
) -> dict[str, str]:
    """The mean of each of the default ways, as a user writes it.

    `compressed_mean` chooses the reducer over one axis; `Hierarchical` must be given it, and links
    with a delay are named in it. Methods of local steps are given a codec, and have one axis.
    """
    whole = _DENSE if len(sizes) > 1 else {**_DENSE, **_LOCAL}
    found = {name: written for name, (written, _) in whole.items()}
    told = "" if delay is None else f", delay={delay:g}"
    if len(sizes) == 1:
        for name in _DENSE:
            found[name] = f"{found[name][:-1]}{told})".replace("(, ", "(")
    for name, given in named.items():
        codec, _, reducer = name.partition(", ")
        if codec not in _WRITTEN:
            continue
        mean, _ = _WRITTEN[codec]
        own = told if reducer in ("Gather", "TwoShot") else ""
        if len(sizes) > 1 or own:
            if given.uplink.feedback.facts.keeps_unsent:
                mean = f"jaxcomp.Link({mean}, jaxcomp.Residual())"
            both = f"{mean}, {mean}" if reducer == "TwoShot" else mean
            mean = f"jaxcomp.{reducer}({both}{own})"
        if len(sizes) > 1:
            mean = f"jaxcomp.Hierarchical(jaxcomp.Dense(), {mean})"
        found[name] = mean
    return found

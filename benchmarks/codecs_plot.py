"""The picture of `codecs.py`: how long some codecs, and functions of other libraries, encode."""

import pathlib
from typing import Any

import numpy as np
import reporting  # noqa: F401  It makes the examples importable.

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

PEERS = ("torch", "lax.", "pi-quant", "fedjax")
"""The beginnings of the names of other libraries' functions."""
SHOWN = (
    "blockwise 4-bit",
    "nuqsgd 4-bit",
    "qsgd_inf 4-bit",
    "sign",
    "mxfp4",
    "top_k 1 %",
    "dgc 0.1 %",
    "terngrad",
    "eden 4-bit",
    "torch bfloat16",
    "pi-quant 4-bit nearest",
    "pi-quant 4-bit stochastic",
    "fedjax 16 levels",
    "torch top-k 1 %, as GRACE",
    "lax.top_k 1 %",
)
"""All others are in the table."""
COMPARED = ("qsgd_inf 4-bit", "top_k 1 %", "lax.top_k 1 %")
"""What the message names."""


def plot(results: Any, size: str, path: pathlib.Path) -> None:
    """The time of encoding beside that of a copy: the library's codecs, then those of others."""
    rows = results["gaussian"][size]
    names = [name for name in SHOWN if name in rows] or list(rows)
    names.sort(key=lambda name: (name.startswith(PEERS), rows[name]["encode"]))
    times = {name: rows[name]["encode"] for name in names}
    words = {
        name: f"{time:{'.1f' if time < 10 else '.0f'}}, to {rows[name]['bits']:.2g} bits a float"
        for name, time in times.items()
    }
    copy = np.median([rows[name]["copy_ms"] for name in names])
    figure, ((axes,),) = pictures.page(
        message(rows),
        f"{int(size):,} Gaussian floats on a CPU, medians with warm buffers; a copy of them takes "
        f"about {copy:.0f} ms. Blue: jaxcomp. Grey: other libraries.",
        height=0.6 + 0.2 * len(names),
    )
    colors = {name: pictures.BASE for name in names if name.startswith(PEERS)}
    pictures.dots(axes, times, words, colors, room=0.25)
    axes.set_xlabel("time to encode, in copies of the same floats")
    pictures.save(figure, path)


def message(rows: Any) -> str:
    if any(name not in rows for name in COMPARED):
        return "How long codecs encode, as multiples of a copy"
    ours, top, other = (rows[name]["encode"] for name in COMPARED)
    return (
        f"Encoding takes {ours:.1f} copies of the array with qsgd_inf, {top:.1f} with top_k and "
        f"{other:.0f} with lax.top_k"
    )

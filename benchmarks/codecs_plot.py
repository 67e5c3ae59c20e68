"""The picture of `codecs.py`: time and error of every codec and of its peers."""

import pathlib
from typing import Any

import reporting

LAWS = {"gaussian": "Gaussian", "blocks": "in blocks"}
PEERS = ("torch", "lax.", "pi-quant", "fedjax")
"""The beginnings of the names of other libraries' functions."""
MARKS = {
    "encode": {"label": "encode", "marker": "o", "s": 30, "color": "#1b6ca8"},
    "decode": {
        "label": "decode", "marker": "s", "s": 48, "facecolor": "none", "edgecolor": "#d1495b"
    },
    "decode_sum_8": {
        "label": "decode and sum of 8", "marker": "D", "s": 44, "facecolor": "none",
        "edgecolor": "#b07c10",
    },
}  # fmt: skip
ERRORS = {
    "gaussian": {"marker": "o", "s": 62, "facecolor": "none", "edgecolor": "#30638e"},
    "blocks": {"marker": "s", "s": 16, "color": "#9b2226"},
}
"""The marks of what was measured; hollow ones stay visible around those of equal values."""


def plot(results: Any, size: str, path: pathlib.Path) -> None:
    """Time and error of all measured contenders: the library's codecs, then those of others."""
    rows = results["gaussian"][size]
    peers = [name for name in rows if name.startswith(PEERS)]
    ours = [name for name in rows if name not in peers]
    figure, ((left, right),) = reporting.panels(
        1, 2, (11, 1.6 + 0.27 * len(rows)), sharey=True, width_ratios=(3, 2)
    )
    place = {name: -number for number, name in enumerate(ours, 1)}
    place |= {name: -number for number, name in enumerate(peers, len(ours) + 3)}
    for key, mark in MARKS.items():
        points = {place[name]: row[key] for name, row in rows.items() if key in row}
        left.scatter(points.values(), points.keys(), linewidth=1.3, zorder=3, **mark)
    for law, mark in ERRORS.items():
        found = results[law].get(size, {})
        points = {place[name]: max(row["nmse"], 1e-9) for name, row in found.items()}
        label = LAWS[law]
        right.scatter(points.values(), points.keys(), linewidth=1.3, label=label, zorder=3, **mark)
    labels = [f"{name}  ({rows[name]['bits']:.3g} bits)" for name in place]
    left.set_yticks(list(place.values()), labels)
    left.set_ylim(min(place.values(), default=0) - 0.8, 0.8)
    for heading, names in (("jaxcomp", ours), ("other libraries", peers)):
        if names:
            at, mark = place[names[0]] + 1, {"va": "center", "ha": "right", "weight": "bold"}
            left.text(-0.01, at, heading, transform=left.get_yaxis_transform(), **mark)
    left.set_xlabel(f"time, in copies of the same {int(size):,} floats")
    right.set_xlabel("relative squared error (1: as of nothing)")
    for axes in (left, right):
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    reporting.draw(figure, path)

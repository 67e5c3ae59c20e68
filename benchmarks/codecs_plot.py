"""The picture of `codecs.py`: time and error of every codec and of its peers."""

import pathlib
from typing import Any

import reporting

LAWS = {"gaussian": "Gaussian", "blocks": "in blocks"}
MARKS = {
    "encode": ("encode", "o", "#1b6ca8"),
    "decode": ("decode", "s", "#d1495b"),
    "decode_sum_8": ("decode and sum of 8", "D", "#edae49"),
}
ERRORS = {"gaussian": ("o", "#30638e"), "blocks": ("s", "#9b2226")}


def plot(results: Any, size: str, path: pathlib.Path) -> None:
    """Time and error of all measured contenders in one table."""
    rows = results["gaussian"][size]
    figure, ((left, right),) = reporting.panels(
        1, 2, (11, 1.6 + 0.34 * len(rows)), sharey=True, width_ratios=(3, 2)
    )
    place = {name: len(rows) - number for number, name in enumerate(rows)}
    for key, (label, mark, colour) in MARKS.items():
        points = {place[name]: row[key] for name, row in rows.items() if key in row}
        left.scatter(
            points.values(), points.keys(), marker=mark, color=colour, label=label, zorder=3
        )
    for law, (mark, colour) in ERRORS.items():
        found = results[law].get(size, {})
        points = {place[name]: max(row["nmse"], 1e-9) for name, row in found.items()}
        right.scatter(points.values(), points.keys(), marker=mark, color=colour, label=LAWS[law])
    labels = [f"{name}  ({row['bits']:.3g} bits)" for name, row in rows.items()]
    left.set_yticks(list(place.values()), labels)
    left.set_xlabel(f"time, in copies of the same {int(size):,} floats")
    right.set_xlabel("relative squared error (1: as of nothing)")
    for axes in (left, right):
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    reporting.draw(figure, path)

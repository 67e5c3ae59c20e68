"""The picture of `make bench`: time and error of everything that was measured, side by side."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MARKS = {
    "encode": ("encode", "o", "#1b6ca8"),
    "decode": ("decode", "s", "#d1495b"),
    "decode_sum_8": ("decode and sum of 8", "D", "#edae49"),
}
ERRORS = {"gaussian": ("Gaussian", "o", "#30638e"), "blocks": ("in blocks", "s", "#9b2226")}


def plot(results: dict[str, Any], size: str, path: pathlib.Path) -> None:
    rows = results["gaussian"][size]
    names = list(rows)
    places = range(len(names), 0, -1)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.34 * len(names)), sharey=True, width_ratios=(3, 2)
    )
    for key, (label, mark, colour) in MARKS.items():
        points = [(rows[n][key], y) for n, y in zip(names, places, strict=True) if key in rows[n]]
        if points:
            left.scatter(
                *zip(*points, strict=True), marker=mark, color=colour, label=label, zorder=3
            )
    left.axvline(1, color="black", linewidth=1)
    left.set_xscale("log")
    left.set_xlabel(f"time, in copies of the same {int(size):,} floats")
    labels = [f"{name}  ({rows[name]['bits']:.3g} bits)" for name in names]
    left.set_yticks(list(places), labels)
    for law, (label, mark, colour) in ERRORS.items():
        found = results[law].get(size, {})
        points = [
            (max(found[n]["nmse"], 1e-9), y)
            for n, y in zip(names, places, strict=True)
            if n in found
        ]
        if points:
            right.scatter(*zip(*points, strict=True), marker=mark, color=colour, label=label)
    right.set_xscale("log")
    right.axvline(1, color="black", linewidth=1)
    right.set_xlabel("relative squared error (1: as of nothing)")
    for axes in (left, right):
        axes.grid(axis="both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)

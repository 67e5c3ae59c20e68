"""Draws methods beside the lower bounds of `jaxcomp.theory.rates`, from the committed results.

    make reproduce CLAIM=lower-bounds
    python benchmarks/bounds.py

The first command measures, the second draws docs/lower_bounds.png.
"""

import pathlib
from typing import Any

import numpy as np
import reporting
from matplotlib.axes import Axes

COLORS = {
    "SGD": "#222222",
    "QSGD-like, unbiased": "#d1495b",
    "DIANA, unbiased": "#e08e1b",
    "EF21-SGDM, random": "#2a7f4f",
    "EF, random": "#7b4fa3",
    "NEOLITHIC, random, both ways": "#1b6ca8",
}
NAMES = {
    "SGD": "SGD, nothing compressed",
    "QSGD-like, unbiased": "unbiased, no memory",
    "DIANA, unbiased": "DIANA",
    "EF21-SGDM, random": "EF21-SGDM",
    "EF, random": "error feedback",
    "NEOLITHIC, random, both ways": "NEOLITHIC, both ways",
}
FAINT = "#777777"


def spaced(heights: list[float], least: float) -> list[float]:
    """Log heights that are moved apart to at least a distance, in the same order."""
    order = np.argsort(heights)
    found = np.array(heights, float)[order]
    for _ in range(200):
        gaps = np.diff(found)
        close = np.where(gaps < least, (least - gaps) / 2, 0)
        if not close.any():
            break
        found[:-1] -= close
        found[1:] += close
    placed = np.empty_like(found)
    placed[order] = found
    return [float(x) for x in placed]


def panel(axes: Axes, title: str, rows: dict[str, Any]) -> None:
    steps, labels = np.array(rows["steps"]), []
    for name, curve in rows["curves"].items():
        middle, low, high = np.array(curve).T
        axes.fill_between(steps, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
        axes.plot(steps, middle, color=COLORS[name], linewidth=1.8)
        labels.append((NAMES[name], middle[-1], COLORS[name]))
    for key, name, dashes in (
        ("bound", "lower bound, δ = 0.1", (0, (5, 2))),
        ("uncompressed", "the same, δ = 1", (0, (1, 1.5))),
    ):
        axes.plot(steps, rows[key], color=FAINT, linewidth=1.4, linestyle=dashes)
        labels.append((name, rows[key][-1], FAINT))
    axes.set(xscale="log", yscale="log", title=title, xlabel="messages of a worker")
    limits = axes.get_xlim(), axes.get_ylim()
    low, high = np.log10(limits[1])
    places = spaced([float(np.log10(height)) for _, height, _ in labels], (high - low) / 19)
    for (name, height, color), place in zip(labels, places, strict=True):
        axes.annotate(
            name,
            (steps[-1], height),
            (steps[-1] * 1.5, 10**place),
            color=color,
            size=9,
            va="center",
            annotation_clip=False,
        )
        leader = ([steps[-1], steps[-1] * 1.45], [height, 10**place])
        axes.plot(*leader, color=color, linewidth=0.7, clip_on=False)
    axes.set(xlim=limits[0], ylim=limits[1])


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    figure, grid = reporting.panels(1, 1, (8.4, 5.4), layout=None)
    figure.subplots_adjust(0.1, 0.15, 0.74, 0.92)
    for axes, (title, rows) in zip(grid[0], found["problems"].items(), strict=True):
        panel(axes, title, rows)
    grid[0, 0].set_ylabel("mean of ‖∇f‖² so far, best rate for each number")
    figure.text(0.1, 0.02, "Lines are medians over the seeds, bands their range.", size=9)
    reporting.draw(figure, path)


def main() -> None:
    path = pathlib.Path("docs/lower_bounds.png")
    options = reporting.options(__doc__, path.parent)
    found = reporting.read(reporting.RESULTS / "reproductions" / "lower-bounds.json")["numbers"]
    draw(found, options.out / path.name)


if __name__ == "__main__":
    main()

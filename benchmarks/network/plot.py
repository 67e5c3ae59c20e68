"""The pictures of what was measured over the slow wire.

python benchmarks/network/plot.py out/network
"""

import json
import math
import pathlib
import statistics
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import tables
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

OURS, DENSE, TORCH = "#1b6ca8", "#8a8f98", "#d1495b"


def colour(name: str) -> str:
    return TORCH if name.startswith("torch") else DENSE if name.startswith("dense") else OURS


def bars(axes: Axes, cell: dict[str, Any]) -> None:
    """Seconds of every method, with the least that its bytes take on the link."""
    methods = cell["methods"]
    base = statistics.median(methods[tables.BASE]["seconds"]) if tables.BASE in methods else None
    for place, (name, method) in enumerate(methods.items()):
        seconds, least = statistics.median(method["seconds"]), tables.bound(cell, method)
        axes.barh(place, seconds, color=colour(name), height=0.72)
        ratio = "" if base is None else f"  {base / seconds:.1f}×"
        axes.text(seconds, place, f" {seconds:.3g} s{ratio}", va="center", fontsize=7)
        if least:
            axes.plot([least] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
    axes.set_yticks(range(len(methods)), list(methods), fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    least, most = axes.get_xlim()
    axes.set_xlim(least, most * (most / least) ** 0.25)  # Room for the numbers.
    if most < 100 * least:  # Of so few powers of ten, all labels would run into each other.
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("seconds")
    axes.set_title(f"{cell['rate']}, {cell['processes']} processes", fontsize=10)


def curves(axes: Axes, cell: dict[str, Any], names: list[str]) -> None:
    """Bits a byte of held-out text against the seconds of training, of the median run.

    Each method has its own colour, which depends on its place among `names`.
    """
    for name, method in cell["methods"].items():
        _, seconds, bits, _ = zip(*method["curve"], strict=True)
        style, shade = "--" if name.startswith("torch") else "-", f"C{names.index(name)}"
        axes.plot(seconds, bits, style, color=shade, linewidth=1.4, label=name)
        axes.plot(seconds[-1], bits[-1], "o", color=shade, markersize=4)
    axes.axhline(cell["target"], color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("bits a byte, held out")
    axes.set_title(f"{cell['rate']}, {cell['processes']} processes", fontsize=10)
    axes.legend(fontsize=7, frameon=False)


def draw(folder: pathlib.Path) -> None:
    headings = {
        "mean": "One mean: the black mark is bytes ÷ link rate, × is over dense float32",
        "train": "Training over the slow wire: a dot where the target is reached, or not",
    }
    for name, heading in headings.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        cells = json.loads(path.read_text())["cells"]
        names = list(dict.fromkeys(name for cell in cells for name in cell["methods"]))
        columns = min(2, len(cells))
        lines = max(len(cell["methods"]) for cell in cells) if name == "mean" else 18
        rows, height = math.ceil(len(cells) / columns), 1 + 0.21 * lines
        size = (6.4 * columns, height * rows + 0.4)
        # Constrained, since a tight layout puts the heading over the titles of the upper panels.
        panels = {"figsize": size, "squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(rows, columns, **panels)
        for place, cell in zip(axes.flat, cells, strict=False):
            if name == "mean":
                bars(place, cell)
            else:
                curves(place, cell, names)
            place.grid(axis="both", color="#dddddd", linewidth=0.6)
            place.set_axisbelow(True)
            place.spines[["top", "right"]].set_visible(False)
        for place in list(axes.flat)[len(cells) :]:
            place.remove()
        figure.suptitle(heading, fontsize=11)
        figure.savefig(path.with_suffix(".png"), dpi=140)
        plt.close(figure)
        print(f"drawn to {path.with_suffix('.png')}")


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]))

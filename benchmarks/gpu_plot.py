"""The picture of `gpu.py`: the bandwidth of kernels, and of XLA for the same operations."""

import pathlib
from typing import Any

import reporting

WAYS = {
    "kernel": {"label": "kernel", "color": "#1b6ca8"},
    "xla": {"label": "XLA", "color": "#9aa5b1"},
}


def plot(results: Any, path: pathlib.Path) -> None:
    """A pair of bars for each operation on float32, without those that only pack."""
    others = ("pack", "unpack")
    rows = {
        name.removesuffix(", float32"): row
        for name, row in results["kernels"].items()
        if "float16" not in name and not name.startswith(others)
    }
    device = results["environment"]["device"].removeprefix("NVIDIA ")
    figure, ((axes,),) = reporting.panels(1, 1, (8.5, 1.2 + 0.27 * len(rows)))
    for (way, mark), shift in zip(WAYS.items(), (0.2, -0.2), strict=True):
        places = [shift - number for number in range(len(rows))]
        axes.barh(
            places, [row["share_of_copy_bandwidth"][way] for row in rows.values()], 0.4, **mark
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks([-number for number in range(len(rows))], list(rows), fontsize=8)
    axes.set_ylim(0.4 - len(rows), 0.6)
    axes.grid(visible=False, axis="y")
    speed = results["copy_bytes_per_second"] / 1e12
    axes.set_xlabel(f"bandwidth on an {device}, as a fraction of a copy's {speed:.1f} TB/s")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    reporting.draw(figure, path)

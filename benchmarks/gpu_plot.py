"""The picture of `gpu.py`: the bandwidth of kernels, and of XLA for the same operations."""

import pathlib
from typing import Any

import reporting  # noqa: F401  It makes the examples importable.

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

WAYS = {"kernel": pictures.COLORS[0], "XLA": pictures.BASE}
SHOWN = {
    "encode qsgd_inf 4-bit, float32": "encode, qsgd_inf 4-bit",
    "encode qsgd 3-bit, float32": "encode, qsgd 3-bit",
    "encode nuqsgd 4-bit, float32": "encode, nuqsgd 4-bit",
    "encode sign, float32": "encode, sign",
    "encode terngrad, buckets of 640, float32": "encode, terngrad",
    "decode and sum of 8, qsgd_inf 4-bit, float32": "sum of 8, qsgd_inf 4-bit",
    "decode and sum of 8, sign, float32": "sum of 8, sign",
    "rotate, blocks of 4096": "rotate, blocks of 4,096",
}
"""Operations on float32 that are drawn; all others are in the table."""


def plot(results: Any, path: pathlib.Path) -> None:
    """A pair of bars for each operation."""
    kernels = results["kernels"]
    shares = {name: kernels[name]["share_of_copy_bandwidth"] for name in SHOWN if name in kernels}
    rows = {SHOWN[n]: {"kernel": row["kernel"], "XLA": row["xla"]} for n, row in shares.items()}
    device = results["environment"]["device"].removeprefix("NVIDIA ")
    speed = results["copy_bytes_per_second"] / 1e12
    gain = [row["kernel"] / row["XLA"] for row in rows.values()]
    figure, ((axes,),) = pictures.page(
        f"On an {device} these kernels are {min(gain):.1f} to {max(gain):.1f} times as fast as XLA",
        f"Bandwidth of operations on {results['size']:,} float32, as a share of the "
        f"{speed:.1f} TB/s of a copy (line). TernGrad: buckets of 640.",
        height=0.7 + 0.36 * len(rows),
    )
    for (way, color), shift in zip(WAYS.items(), (0.19, -0.19), strict=True):
        for place, row in enumerate(rows.values()):
            share, at = 100 * row[way], shift - place
            axes.barh(at, share, 0.36, color=color)
            axes.text(share + 1, at, f"{share:.0f} %", color=color, va="center")
        axes.text(1, shift, way, color="white", va="center", weight="bold")
    axes.axvline(100, color=pictures.INK, linewidth=1, zorder=0)
    axes.set(yticks=[-place for place in range(len(rows))], ylim=(0.5 - len(rows), 0.5))
    axes.set_yticklabels(list(rows))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="bandwidth, % of a copy's", xlim=(0, 120))
    pictures.save(figure, path)

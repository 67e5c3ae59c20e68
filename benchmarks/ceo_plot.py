"""The picture of `ceo.py`: codecs beside the CEO bound, and the cost of a training."""

import functools
import pathlib
from typing import Any

import numpy as np
import reporting  # noqa: F401  It makes the examples importable.

from jaxcomp.theory import ceo_range, ceo_symmetric_rate, ceo_total_cost, ceo_unbinned_rate

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

WORKERS = 8
NOISES = (0.1, 1.0, 10.0)
"""`σ²`, where the signal has the variance 1."""
ROUNDS, GROWTH, OVERHEAD = 100.0, 2000.0, 2.0
"""`a`, `b`, and the bits an element that a round costs beside its gradients: an illustration."""
MODEL: Any = {"rounds": ROUNDS, "growth": GROWTH, "overhead": OVERHEAD}
COLORS = {
    "ecsq, minimum error": pictures.COLORS[0],
    "eden": pictures.COLORS[1],
    "qsgd_inf": pictures.COLORS[2],
    "sign": pictures.COLORS[3],
    "top_k": pictures.COLORS[4],
}
"""Of the series that are drawn; all others are in the table."""
ABOVE = {
    "ecsq": (0, (-42, -42), "center"),
    "eden": (0, (6, -1), "left"),
    "qsgd_inf": (1, (7, -1), "left"),
    "sign": (0, (6, 5), "center"),
    "top_k": (2, (4, 5), "left"),
}
BESIDE = {
    "ecsq": (0, (-12, -12), "center"),
    "eden": (0, (4, 5), "center"),
    "qsgd_inf": (0, (-4, 6), "center"),
    "sign": (0, (7, -3), "left"),
    "top_k": (1, (-7, -4), "right"),
}
"""Which point of a series has its name, where from there in points, and the side that is there."""
SPAN = (0.2, 150.0)
"""The bits that are drawn."""


def plot(rows: dict[str, Any], path: pathlib.Path) -> None:
    figure, grid = pictures.page(
        message(rows),
        f"{WORKERS} workers see one Gaussian signal through noise. No code is in the grey area "
        "(the CEO bound); dashed: the bound if each message is decoded alone.",
        rows=2,
        columns=2,
        height=4.8,
    )
    for axes, variance in zip(grid.flat, NOISES, strict=False):
        bounds(axes, variance)
        points = {n: (r["bits"], r["distortion"][f"{variance:g}"]) for n, r in rows.items()}
        series(axes, points, rows, ABOVE)
        axes.set_title(f"Noise of {variance:g} times the signal")
        axes.set(xlabel="bits an element, all workers", ylabel="distortion")
    total(grid[1, 1], rows)
    pictures.save(figure, path)


def message(rows: dict[str, Any]) -> str:
    row = rows.get("eden 2")
    if row is None:
        return "Codecs beside the least bits for a signal that workers see through noise"
    small, large = (row["bits"] / row["least"][f"{noise:g}"] for noise in (NOISES[0], NOISES[-1]))
    return (
        f"EDEN of 2 bits sends {small:.1f} times the least bits where workers' noise is small, and "
        f"{large:.1f} times where it is large"
    )


def bounds(axes: Any, variance: float) -> None:
    """The CEO bound, below it grey, and the bound of messages that are decoded alone."""
    low, high = ceo_range(1.0, [variance] * WORKERS)
    at = low + (high - low) * np.geomspace(1e-6, 0.999, 300)
    least = ceo_symmetric_rate(at, 1.0, variance, WORKERS)
    alone = ceo_unbinned_rate(at, 1.0, [variance] * WORKERS)
    bottom = low / (high / low) ** 0.12
    bits, floor = np.append(least[::-1], SPAN[1]), np.append(at[::-1], low)
    axes.fill_between(bits, floor, bottom, color="#ececec", linewidth=0, zorder=0)
    axes.plot(bits, floor, color=pictures.INK, linewidth=1.4)
    axes.plot(alone, at, color=pictures.INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.set(xlim=SPAN, ylim=(bottom, high * (high / low) ** 0.12))
    pictures.log_axis(axes, "x")
    pictures.log_axis(axes, "y")
    if high < 2.5 * low:
        axes.set(yticks=np.arange(6, 11) / 10)
    axes.grid(visible=False)


def series(
    axes: Any, points: dict[str, tuple[float, float]], rows: dict[str, Any], names: Any
) -> None:
    """The points of each series, with its name."""
    for of, color in COLORS.items():
        places = [place for name, place in points.items() if rows[name]["series"] == of]
        if not places:
            continue
        axes.plot(*zip(*places, strict=True), "o-", color=color, linewidth=1.2, markersize=4)
        text = of.partition(",")[0]
        at, offset, side = names[text]
        far = {"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            text, places[min(at, len(places) - 1)], offset, textcoords="offset points",
            color=color, ha=side, arrowprops=far if min(offset) < -20 else None,
        )  # fmt: skip


def total(axes: Any, rows: dict[str, Any]) -> None:
    """The cost of a training over the distortion of its gradients."""
    low, high = ceo_range(1.0, [NOISES[0]] * WORKERS)
    at = low + (high - low) * np.geomspace(1e-3, 0.999, 200)
    cost = functools.partial(ceo_total_cost, 1.0, [NOISES[0]] * WORKERS, **MODEL)
    bits = np.array([cost(distortion=float(d)).bits for d in at])
    best = cost()
    axes.set(xlim=(low * 0.8, 1.3), ylim=(best.bits * 0.5, 2e4))
    axes.fill_between(at, bits, best.bits * 0.5, color="#ececec", linewidth=0, zorder=0)
    axes.plot(at, bits, color=pictures.INK, linewidth=1.4)
    axes.plot(best.distortion, best.bits, "o", color="white", markeredgecolor=pictures.INK)
    axes.annotate(
        f"fewest: D = {best.distortion:.3f}", (best.distortion, best.bits), (0, -15),
        textcoords="offset points", ha="center",
    )  # fmt: skip
    points = {n: (r["distortion"][f"{NOISES[0]:g}"], r["cost"]) for n, r in rows.items()}
    series(axes, points, rows, BESIDE)
    pictures.log_axis(axes, "x")
    pictures.log_axis(axes, "y")
    axes.grid(visible=False)
    axes.set_title(f"Training of {ROUNDS:g} + {GROWTH:g} D rounds")
    axes.set(xlabel=f"distortion D, noise {NOISES[0]:g}", ylabel="bits an element, all rounds")

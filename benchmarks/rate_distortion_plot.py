"""The picture of `rate_distortion.py`: error against bits, with the bounds."""

import itertools
import pathlib
from typing import Any

import numpy as np
import reporting  # noqa: F401  It makes the examples importable.
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from jaxcomp.theory import limits

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

PANELS = {
    "Levels": ("qsgd", "qsgd_inf", "blockwise", "nuqsgd", "alq"),
    "Rotated, or entropy coded": ("ndsc", "eden", "ecsq, minimum error"),
    "Signs, ternary, float formats": ("sign", "terngrad", "mxfp4", "nvfp4", "mxfp6", "mxfp8"),
    "Sparse": ("random_k", "top_k", "sidco", "demo", "fastsgd"),
}
"""Titles with the series that they have; all others are in the table."""
LAWS = ("gaussian", "laplace")
LEAST_BITS, MOST_BITS, LEAST, MOST = 0.02, 9.4, 1e-5, 200.0
FOUR = {"ecsq, minimum error 4": "ECSQ", "eden 4": "EDEN", "qsgd_inf 4": "qsgd_inf"}
"""What the message compares."""
BOUND = (
    "Nothing is in the grey area on average over Gaussian input, and nothing unbiased below the "
    "dashed line. Full dots are unbiased, empty ones biased."
)
GRADIENTS = (
    "Half way through a training. The line is the bound of Gaussian input, which a gradient with a "
    "few large elements may pass. Full dots are unbiased, empty ones biased."
)


def plot(rows: dict[str, Any], path: pathlib.Path, law: str = "gaussian") -> None:
    """A panel a family, of Gaussian input or of a gradient."""
    figure, grid = pictures.page(
        message(rows, law),
        BOUND if law in LAWS else GRADIENTS,
        rows=2,
        columns=2,
        height=5.4,
    )
    drawn = []
    for axes, (title, series) in zip(grid.flat, PANELS.items(), strict=True):
        curves = draw_limits(axes, law)
        drawn.append((axes, draw_codecs(axes, law, rows, series), curves))
        style(axes, title)
    figure.canvas.draw()
    figure.set_layout_engine("none")
    for axes, points, curves in drawn:
        name_points(axes, points, curves, dict(zip(points, pictures.COLORS, strict=False)))
    pictures.save(figure, path)


def message(rows: dict[str, Any], law: str) -> str:
    """How far some codecs of four bits are from the bound."""
    whose = "" if law in LAWS else " for Gaussian input"
    start = "At" if law in LAWS else "On a transformer's gradient at"
    if any(name not in rows or law not in rows[name]["error"] for name in FOUR):
        return "Error and bits of codecs beside the least possible error"
    ratios = [
        rows[name]["error"][law] / float(limits.rate_distortion(rows[name]["bits"][law]))
        for name in FOUR
    ]
    said = [f"{short} {ratio:.2g}" for short, ratio in zip(FOUR.values(), ratios, strict=True)]
    return (
        f"{start} four bits {said[0].replace(' ', ' has ')} times the least error possible{whose}, "
        f"{said[1]} times and {said[2]} times"
    )


def draw_limits(axes: Axes, name: str) -> list[np.ndarray]:
    """The curves of the panel, as `[points, 2]` in bits and error."""
    bits = np.geomspace(LEAST_BITS, MOST_BITS, 400)
    best = limits.rate_distortion(bits, name if name in LAWS else "gaussian")
    axes.plot(bits, best, color=pictures.INK, linewidth=1.4, zorder=1)
    if name not in LAWS:
        return [np.stack([bits, best], 1)]
    unbiased = limits.from_deterministic(best)
    axes.fill_between(bits, best, LEAST, color="#ececec", linewidth=0, zorder=0)
    axes.plot(bits, unbiased, color=pictures.INK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1)
    return [np.stack([bits, curve], 1) for curve in (best, unbiased)]


def draw_codecs(
    axes: Axes, law: str, rows: dict[str, Any], series: tuple[str, ...]
) -> dict[str, list[tuple[float, float]]]:
    """The points of some series, joined by lines, by the names that they get."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name, color in zip(series, pictures.COLORS, strict=False):
        label = name.partition(",")[0]
        for row in rows.values():
            bits, error = row["bits"].get(law, np.inf), row["error"].get(law)
            if row["series"] == name and bits <= MOST_BITS and error is not None:
                points.setdefault(label, []).append((bits, error))
                inside = color if row["aims_unbiased"] else "white"
                axes.plot(bits, error, "o", color=inside, markeredgecolor=color, zorder=4)
        if label in points:
            axes.plot(*zip(*points[label], strict=True), color=color, linewidth=1.2, zorder=3)
    return points


def style(axes: Axes, title: str) -> None:
    axes.set(title=title, yscale="log", ylim=(LEAST, MOST))
    axes.set(xlabel="bits an element", ylabel="relative squared error")
    axes.set_yticks([1e-4, 1e-2, 1, 100])
    axes.set_yticks([], minor=True)
    if title == "Sparse":  # Most of them are below one bit.
        axes.set(xscale="log", xlim=(LEAST_BITS, MOST_BITS))
        axes.set_xticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
        axes.set_xticks([], minor=True)
    else:
        axes.set_xlim(0, MOST_BITS)
        axes.set_xticks(range(0, 10, 2))
    axes.grid(visible=False)


def name_points(
    axes: Axes,
    points: dict[str, list[tuple[float, float]]],
    curves: list[np.ndarray],
    colors: dict[str, str],
) -> None:
    """Places the name of each series close to one of its points, without overlaps."""
    figure: Any = axes.get_figure()
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    dot, frame = figure.dpi / 72, axes.get_window_extent()
    every = [point for series in points.values() for point in series]
    marks = to_pixels(every or np.zeros((0, 2)))
    joined = [_filled(to_pixels(series)) for series in points.values()]
    lines = np.concatenate([to_pixels(curve) for curve in curves] + joined)
    taken: list[tuple[np.ndarray, np.ndarray]] = []

    def cost(low: np.ndarray, high: np.ndarray) -> float:
        """The marks that a label between two corners would cover."""
        outside = (low < frame.min).any() or (high > frame.max).any()
        others = sum((low < b).all() and (high > a).all() for a, b in taken)
        hidden = covered(marks, low - 2.5 * dot, high + 2.5 * dot) + covered(lines, low, high)
        return 3.0 * hidden + 20.0 * others + 1e3 * outside

    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    ways = np.stack([np.cos(angles), np.sin(angles)], 1)
    for label, series in points.items():
        color, mark = colors[label], {"ha": "center", "va": "center", "zorder": 5}
        text = axes.text(0, 0, label, size=pictures.SMALL, color=color, **mark)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white", alpha=0.85)])
        extent = text.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2
        tried = [
            (cost(at - half - dot, at + half + dot) + reach / 10, tuple(at), tuple(home))
            for home in to_pixels(series[:: max(1, len(series) // 2)])
            for reach in range(3, 120, 3)
            for at in home + ways * (half + reach * dot)
        ]
        _, *both = min(tried)
        place, home = (np.array(point) for point in both)
        taken.append((place - half - dot, place + half + dot))
        text.set_position(tuple(to_data(place)))
        edge = place + np.clip(home - place, -half, half)
        if np.linalg.norm(edge - home) > 8 * dot:
            axes.plot(*to_data([edge, home]).T, color=color, linewidth=0.6, zorder=2)


def _filled(corners: np.ndarray) -> np.ndarray:
    """Points along a line through these corners."""
    steps = np.linspace(0, 1, 20)[:, None]
    parts = [a + steps * (b - a) for a, b in itertools.pairwise(corners)]
    return np.concatenate([corners, *parts])


def covered(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    return int(((points > low) & (points < high)).all(axis=1).sum())

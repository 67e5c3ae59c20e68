"""The picture of `rate_distortion.py`: error against bits, with the bounds."""

import itertools
import pathlib
from typing import Any

import numpy as np
import reporting
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from jaxcomp.theory import limits

COLORS = {
    "even levels": "#1b6ca8",
    "powers of two": "#d1495b",
    "adaptive levels": "#e08e1b",
    "signs and ternary": "#7b4fa3",
    "rotated": "#2a7f4f",
    "sparse": "#8a6240",
    "entropy coded": "#0f9d9f",
    "float formats": "#d45fae",
    "composed": "#5f6b76",
}
SHORT = {
    "natural_dithering, natural norm": "natural_dithering,\nnatural norm",
    "threshold_ternary optimal": "threshold_ternary, optimal",
    "threshold_ternary heuristic": "threshold_ternary, heuristic",
    "cast float8_e4m3fn": "float8_e4m3fn",
    "cast float8_e5m2": "float8_e5m2",
    "top_k 1 %, then qsgd_inf 3": "top_k 1 %,\nthen qsgd_inf",
    "top_k, 4-bit values 1 %": "top_k 1 %,\n4-bit values",
    "averaged_ternary 8": "averaged_ternary",
    "qsgd 4, coded": "qsgd, coded",
}
APART = ("sparse", "float formats", "signs and ternary", "composed")
"""Families whose points are named one by one: their settings are no widths."""
TITLES = {
    "gaussian": "What each codec makes of its bits: Gaussian input",
    "middle": "The same on the gradient of a transformer, half way through its training",
}
LAWS = ("gaussian", "laplace")
LEAST_BITS, MOST_BITS, LEAST, MOST = 0.02, 9.4, 1e-5, 200.0
INK, FAINT, CLOUD = "#222222", "#777777", "#d0d0d0"
BOUND = "Nothing is below the black line on average over such input; nothing unbiased is below "
BOUND += "the dashed one."
CAPTIONS = {
    "gaussian": BOUND
    + "\nDotted: a scalar quantizer with an entropy coder; +: the best scalar one "
    "of fixed width (Lloyd–Max).",
    "middle": "The line is the bound of Gaussian input, which is none here: where a few elements "
    "are much of the whole, codes may pass below it.",
}
HOW = "Each panel has one family in colour, and all others in grey. Down and left is better. Full "
HOW += "circles are unbiased, empty ones biased.\nBits are measured, scales and places included; "
HOW += "those of the sparse family have a logarithmic axis."


def plot(rows: dict[str, Any], path: pathlib.Path, law: str = "gaussian") -> None:
    """A panel a family."""
    figure, grid = reporting.panels(3, 3, (13, 13.4), sharey=True, layout=None)
    figure.subplots_adjust(0.06, 0.045, 0.985, 0.877, wspace=0.05, hspace=0.17)
    for axes, family in zip(grid.flat, COLORS, strict=True):
        curves = draw_limits(axes, law)
        points = draw_codecs(axes, law, rows, family)
        style(axes, family)
        figure.canvas.draw()
        name_points(axes, points, curves, dict.fromkeys(points, COLORS[family]))
    for axes in grid[:-1].flat:
        if axes.get_xscale() == "linear":  # It has the same axis as the panel below.
            axes.tick_params(labelbottom=False)
    for axes in grid[-1]:
        axes.set_xlabel("bits an element")
    for axes in grid[:, 0]:
        axes.set_ylabel("relative squared error")
    figure.text(0.06, 0.972, TITLES[law], size=16, weight="bold", color=INK)
    style_ = {"size": 10, "color": INK, "linespacing": 1.4, "va": "top"}
    figure.text(0.06, 0.962, f"{HOW}\n{CAPTIONS[law]}", **style_)
    reporting.draw(figure, path)


def draw_limits(axes: Axes, name: str) -> list[np.ndarray]:
    """The curves of the panel, as `[points, 2]` in bits and error."""
    bits = np.geomspace(LEAST_BITS, MOST_BITS, 400)
    if name not in LAWS:
        gaussian = limits.rate_distortion(bits)
        axes.plot(bits, gaussian, color=FAINT, linewidth=1.2, zorder=1)
        return [np.stack([bits, gaussian], 1)]
    best = limits.rate_distortion(bits, name)
    scalar = limits.entropy_coded_scalar(bits, name)
    unbiased = limits.from_deterministic(best)
    axes.fill_between(bits, best, LEAST, color="#e9e9e9", linewidth=0, zorder=0)
    axes.plot(bits, best, color=INK, linewidth=1.6, zorder=1)
    axes.plot(bits, unbiased, color=INK, linewidth=1.2, linestyle=(0, (5, 2)), zorder=1)
    axes.plot(bits, scalar, color=INK, linewidth=1.2, linestyle=(0, (1, 1.5)), zorder=1)
    widths = range(1, 9)
    lloyd = [limits.lloyd_max(2**width, name)[2] for width in widths]
    axes.scatter(widths, lloyd, marker="+", s=45, color=INK, linewidth=1.1, zorder=2)
    curves = [np.stack([bits, curve], 1) for curve in (best, unbiased, scalar)]
    return [*curves, np.stack([widths, lloyd], 1)]


def draw_codecs(
    axes: Axes, name: str, rows: dict[str, Any], family: str
) -> dict[str, list[tuple[float, float]]]:
    """The family's points, those of a series joined by a line, by the name that they get."""
    points: dict[str, list[tuple[float, float]]] = {}
    for key, row in rows.items():
        bits, error = row["bits"].get(name, np.inf), row["error"].get(name)
        if bits > MOST_BITS:
            continue
        if row["family"] != family:
            axes.scatter(bits, error, s=12, color=CLOUD, linewidth=0, zorder=1.5)
            continue
        label = key if family in APART or key in SHORT else row["series"]
        points.setdefault(SHORT.get(label, label), []).append((bits, error))
        inside = COLORS[family] if row["aims_unbiased"] else "white"
        mark: Any = {"facecolor": inside, "edgecolor": COLORS[family], "linewidth": 1.3}
        axes.scatter(bits, error, s=30, zorder=4, **mark)
    for series in points.values():
        axes.plot(*zip(*series, strict=True), color=COLORS[family], linewidth=0.9, zorder=3)
    return points


def style(axes: Axes, title: str) -> None:
    axes.set_yscale("log")
    axes.set_ylim(LEAST, MOST)
    if title == "sparse":  # Most of them are below one bit.
        axes.set_xscale("log")
        axes.set_xlim(LEAST_BITS, MOST_BITS)
        axes.set_xticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
        axes.set_xticks([], minor=True)
    else:
        axes.set_xlim(0, MOST_BITS)
        axes.set_xticks(range(10))
    axes.set_title(title, loc="left", size=12, weight="bold", color=COLORS[title])


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
        text = axes.text(0, 0, label, size=9.5, color=color, **mark)
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

"""The picture of `rate_distortion.py`: error against bits, with the bounds."""

import itertools
import pathlib
from typing import Any

import numpy as np
import reporting
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
SETTINGS = {
    "qsgd": "4",
    "qsgd mid-rise": "2",
    "qsgd_inf": "4",
    "blockwise": "8",
    "nuqsgd": "4",
    "natural": "9",
    "alq": "3",
    "amq": "3",
    "eden": "2",
    "ecsq": "2",
    "ndsc": "1",
    "dsc": "1.5",
}
"""Of series with one point that is named, the setting of that point."""
LABELS = {
    **{f"{series} {setting}": series for series, setting in SETTINGS.items()},
    **{name: name for name in ("terngrad", "sign", "drive", "mxfp4", "mxfp6", "mxfp8", "nvfp4")},
    **{f"{kind}_k {part} %": f"{kind} {part} %" for kind in ("random", "top") for part in (10, 1)},
    "qsgd_inf subtractive 8": "qsgd_inf\nsubtractive",
    "natural_dithering 4": "natural dithering",
    "threshold_ternary optimal": "threshold\nternary",
    "eden, minimum error 4": "eden, least error",
    "ecsq, minimum error 3": "ecsq, least error",
    "qsgd 4, coded": "qsgd, coded",
    "rotated_uniform 2": "rotated\nuniform",
    "cast float8_e4m3fn": "cast float8",
    "averaged_ternary 8": "averaged ternary",
}
PANELS = {
    "gaussian": "Gaussian",
    "laplace": "Laplace",
    "heavy": "Heavy-tailed: a normal number cubed",
    "middle": "Gradient of a transformer, half way through its training",
}
LAWS = ("gaussian", "laplace")
MOST_BITS, LEAST, MOST = 9.4, 1e-5, 200.0
INK, FAINT = "#222222", "#777777"
CAPTION = """\
Down and left is better: less error, fewer bits. Bits are measured from the payload, scales and \
indices included; bfloat16, at 16 bits, is outside.
The curves are for the average over input of their law. In the lower panels the Gaussian one is no \
bound: where a few elements are much of the whole, codes may pass below it."""


def plot(rows: dict[str, Any], path: pathlib.Path) -> None:
    shared = {"sharex": True, "sharey": True, "layout": None}
    figure, grid = reporting.panels(2, 2, (12, 12.8), **shared)
    figure.subplots_adjust(0.065, 0.06, 0.985, 0.842, wspace=0.04, hspace=0.09)
    for axes, (name, title) in zip(grid.flat, PANELS.items(), strict=True):
        shown = {key: row for key, row in rows.items() if name in row["error"]}
        curves = draw_limits(axes, name)
        points = draw_codecs(axes, name, shown)
        style(axes, title, bool(shown))
        figure.canvas.draw()
        name_points(axes, points, curves)
    for axes in grid[1]:
        axes.set_xlabel("bits an element")
    for axes in grid[:, 0]:
        axes.set_ylabel("relative squared error  ‖x̂ − x‖² / ‖x‖²")
    explain(figure)
    reporting.draw(figure, path)


def draw_limits(axes: Axes, name: str) -> list[np.ndarray]:
    """The curves of the panel, as `[points, 2]` in bits and error."""
    bits = np.linspace(0.02, MOST_BITS, 200)
    note: Any = {"transform": axes.transAxes, "size": 9, "color": FAINT}
    if name not in LAWS:
        gaussian = limits.rate_distortion(bits)
        axes.plot(bits, gaussian, color=FAINT, linewidth=1.2, zorder=1)
        axes.text(0.03, 0.04, "D(R) of a Gaussian is no bound here", **note)
        return [np.stack([bits, gaussian], 1)]
    best = limits.rate_distortion(bits, name)
    scalar = limits.entropy_coded_scalar(bits, name)
    unbiased = limits.from_deterministic(best)
    axes.fill_between(bits, best, LEAST, color="#e9e9e9", linewidth=0, zorder=0)
    axes.text(0.03, 0.04, f"no code is here, on average over {PANELS[name]} input", **note)
    axes.plot(bits, best, color=INK, linewidth=1.6, zorder=1)
    axes.plot(bits, unbiased, color=INK, linewidth=1.2, linestyle=(0, (5, 2)), zorder=1)
    axes.plot(bits, scalar, color=INK, linewidth=1.2, linestyle=(0, (1, 1.5)), zorder=1)
    widths = range(1, 9)
    lloyd = [limits.lloyd_max(2**width, name)[2] for width in widths]
    axes.scatter(widths, lloyd, marker="+", s=45, color=INK, linewidth=1.1, zorder=2)
    curves = [np.stack([bits, curve], 1) for curve in (best, unbiased, scalar)]
    return [*curves, np.stack([widths, lloyd], 1)]


def draw_codecs(axes: Axes, name: str, rows: dict[str, Any]) -> dict[str, tuple[float, float, str]]:
    """Each codec as a point, those of a series joined by a line."""
    points = {}
    for _, group in itertools.groupby(rows.items(), key=lambda item: item[1]["series"]):
        members = [(key, row, row["bits"][name], row["error"][name]) for key, row in group]
        seen = [member for member in members if member[2] <= MOST_BITS]
        color = COLORS[members[0][1]["family"]]
        if members[0][1]["family"] != "sparse":  # Their settings are not widths.
            path = [(bits, error) for *_, bits, error in seen]
            axes.plot(*zip(*path, strict=True), color=color, linewidth=0.7, alpha=0.45, zorder=2)
        for key, row, bits, error in seen:
            points[key] = (bits, error, color)
            inside = color if row["aims_unbiased"] else "white"
            mark: Any = {"facecolor": inside, "edgecolor": color, "linewidth": 1.3}
            axes.scatter(bits, error, s=26, zorder=3, **mark)
    return points


def style(axes: Axes, title: str, measured: bool) -> None:
    axes.set_xlim(0, MOST_BITS)
    axes.set_yscale("log")
    axes.set_ylim(LEAST, MOST)
    axes.set_xticks(range(10))
    axes.set_title(title, loc="left", size=11, weight="bold", color=INK)
    if not measured:
        axes.text(0.5, 0.5, "no gradients were saved", transform=axes.transAxes, ha="center")


def name_points(
    axes: Axes, points: dict[str, tuple[float, float, str]], curves: list[np.ndarray]
) -> None:
    """Places labels close to their points without overlaps."""
    figure: Any = axes.get_figure()
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    dot, frame = figure.dpi / 72, axes.get_window_extent()
    marks = to_pixels([(bits, error) for bits, error, _ in points.values()] or np.zeros((0, 2)))
    lines = np.concatenate([to_pixels(curve) for curve in curves])
    taken: list[tuple[np.ndarray, np.ndarray]] = []

    def cost(low: np.ndarray, high: np.ndarray) -> float:
        """The marks that a label between two corners would cover."""
        outside = (low < frame.min).any() or (high > frame.max).any()
        others = sum((low < b).all() and (high > a).all() for a, b in taken)
        hidden = covered(marks, low - 2.5 * dot, high + 2.5 * dot) + covered(lines, low, high)
        return 3.0 * hidden + 20.0 * others + 1e3 * outside

    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    ways = np.stack([np.cos(angles), np.sin(angles)], 1)
    for key, label in LABELS.items():
        if key not in points:
            continue
        bits, error, color = points[key]
        text = axes.text(0, 0, label, size=8.5, color=color, ha="center", va="center", zorder=5)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white", alpha=0.85)])
        extent = text.get_window_extent()
        half, home = np.array([extent.width, extent.height]) / 2, to_pixels((bits, error))
        tried = [
            (cost(at - half - dot, at + half + dot) + reach / 10, at)
            for reach in range(3, 90, 3)
            for at in home + ways * (half + reach * dot)
        ]
        _, place = min(tried, key=lambda pair: pair[0])
        taken.append((place - half - dot, place + half + dot))
        text.set_position(tuple(to_data(place)))
        edge = place + np.clip(home - place, -half, half)
        if np.linalg.norm(edge - home) > 8 * dot:
            axes.plot(*to_data([edge, home]).T, color=color, linewidth=0.6, zorder=2)


def covered(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    return int(((points > low) & (points < high)).all(axis=1).sum())


def explain(figure: Figure) -> None:
    """The legend above the panels."""

    def dot(color: str, face: str) -> Line2D:
        return Line2D([], [], linestyle="", marker="o", color=color, markerfacecolor=face)

    families = [dot(color, color) for color in COLORS.values()]
    kinds = {
        "unbiased (or on average over rotations)": dot(INK, INK),
        "biased": dot(INK, "white"),
        "rate–distortion: no code is below": Line2D([], [], color=INK, linewidth=1.6),
        "no unbiased code is below": Line2D([], [], color=INK, linestyle=(0, (5, 2))),
        "scalar and entropy coder": Line2D([], [], color=INK, linestyle=(0, (1, 1.5))),
        "best scalar of fixed width (Lloyd–Max)": Line2D(
            [], [], color=INK, linestyle="", marker="+"
        ),
        "D(R) of a Gaussian, no bound here": Line2D([], [], color=FAINT),
    }
    options = {"loc": "upper left", "frameon": False, "fontsize": 9, "handletextpad": 0.4}
    figure.legend(
        families, COLORS, ncols=9, columnspacing=1.1, bbox_to_anchor=(0.055, 0.935), **options
    )
    figure.legend(kinds.values(), kinds, ncols=4, bbox_to_anchor=(0.055, 0.915), **options)
    figure.text(
        0.065, 0.972, "What each codec makes of its bits", size=16, weight="bold", color=INK
    )
    figure.text(0.065, 0.945, CAPTION, size=9, color=INK)

"""Scores and pictures of the runs of `train_digits.py`."""

from collections.abc import Sequence
from typing import Any

import report
from matplotlib.axes import Axes
from matplotlib.figure import Figure

METRIC = report.Metric(
    key="test_accuracy",
    heading="test\naccuracy",
    number="{:.1f} %",
    live="test {:.1f} %",
    verdict="{} right instead of {}",
)


FEW = 5
"""So many runs have their names above the ends of their lines, and more runs a legend."""


def picture(runs: Sequence[report.Run], devices: int, settings: dict[str, Any]) -> Figure:
    """Accuracy against megabytes sent, and the bytes of a step."""
    figure = Figure(figsize=(12, 6), facecolor="white")
    left = figure.add_axes((0.06, 0.1, 0.54, 0.6))
    right = figure.add_axes((0.71, 0.1, 0.2, 0.6))
    rows = draw_curves(left, runs)
    draw_bars(right, runs)

    legend = 0.6 * (len(runs) > FEW)  # Inches, as all heights.
    height = 5.3 + 0.45 * rows + legend  # The labels above the curves get what they need.
    if legend:
        report.name_runs(figure, runs, METRIC, 1 - 0.85 / height)
    figure.set_figheight(height)
    for axes, heading, inches in (
        (left, "Test accuracy", 3.5),
        (right, "Sent by one device in one step", 3.5 + (0 if legend else 0.4 * rows)),
    ):
        place = axes.get_position()
        axes.set_position((place.x0, 0.75 / height, place.width, inches / height))
        top = 1 - (1.15 + legend) / height
        figure.text(place.x0, top, heading, size=12, weight="bold", color=report.INK)
    title = report.headline(runs, METRIC, alone="{} of the digits right")
    subtitle = (
        f"Handwritten digits, {devices} workers, {settings['epochs']} epochs of "
        f"{settings['optimizer']}: {report.alike(runs)}"
    )
    figure.text(0.06, 1 - 0.45 / height, title, size=17, weight="bold", color=report.INK)
    figure.text(0.06, 1 - 0.73 / height, subtitle, size=10.5, color=report.FAINT)
    return figure


def draw_curves(axes: Axes, runs: Sequence[report.Run]) -> int:
    """One line a run, labelled above its end; returns how many rows of labels that took."""
    report.style(axes)
    for run in runs:
        scores = [point.score for point in run.curve]
        report.draw_curve(axes, report.sent_so_far(run), scores, run)
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    if len(runs) > FEW and min(run.score for run in runs) > 90:
        high = [
            x
            for run in runs
            for x, point in zip(report.sent_so_far(run), run.curve, strict=True)
            if point.score > 80
        ]
        axes.set(ylim=(80, 100), xlim=(0.7 * min(high), None))
    axes.grid(axis="y", color=report.GRID, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("megabytes that one device has sent (logarithmic)", color=report.FAINT)
    return label_ends(axes, runs) if len(runs) <= FEW else 1


def label_ends(axes: Axes, runs: Sequence[report.Run]) -> int:
    """Names above the ends of the lines, on as many rows as it takes for none to overlap."""
    above = axes.get_xaxis_transform()
    taken: list[float] = []  # Where the last label of each row ends, in pixels.
    for run in sorted(runs, key=lambda run: run.sent_mb):
        color = report.COLORS[run.name]
        end = axes.transData.transform((run.sent_mb, 0))[0]
        text = axes.text(
            run.sent_mb,
            0,
            f"{run.label}\n{METRIC.number.format(run.score)}",
            ha="center",
            va="bottom",
            size=9.5,
            weight="bold",
            color=color,
            linespacing=1.25,
            transform=above,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # Over a longer leader.
        )
        half = text.get_window_extent().width / 2 + 3
        row = next((n for n, x in enumerate(taken) if x < end - half), len(taken))
        taken[row : row + 1] = [end + half]
        text.set_y(1.02 + 0.13 * row)
        reach = (run.score / 100 + 0.015, 1.01 + 0.13 * row)
        axes.vlines(run.sent_mb, *reach, transform=above, color=color, lw=0.9, clip_on=False)
    return len(taken)


def draw_bars(axes: Axes, runs: Sequence[report.Run]) -> None:
    """The bytes of a step, and their fraction of the dense ones."""
    report.style(axes)
    rows = range(len(runs), 0, -1)
    axes.barh(
        rows,
        [run.bytes_per_step / 1e3 for run in runs],
        color=[report.COLORS[run.name] for run in runs],
        height=0.62,
    )
    for row, run in zip(rows, runs, strict=True):
        axes.annotate(
            f"{run.bytes_per_step / 1e3:,.0f} kB",
            (run.bytes_per_step / 1e3, row),
            xytext=(6, 6),
            textcoords="offset points",
            va="center",
            size=9.5,
            weight="bold",
            color=report.INK,
        )
        axes.annotate(
            report.against_dense(run).replace("x", "×").replace("-", "baseline"),
            (run.bytes_per_step / 1e3, row),
            xytext=(6, -6),
            textcoords="offset points",
            va="center",
            size=8.5,
            color=report.FAINT,
        )
    axes.set_yticks(rows, [run.label for run in runs])
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])

"""Scores and pictures of the runs of `byte_lm.py`."""

from collections.abc import Sequence
from typing import Any

import report
from matplotlib.figure import Figure

METRIC = report.Metric(
    key="bits_per_byte",
    heading="bits\na byte",
    number="{:.3f}",
    live="validation {:.3f} bits a byte",
    verdict="{} bits a byte instead of {}",
)


def picture(runs: Sequence[report.Run], devices: int, settings: dict[str, Any]) -> Figure:
    """Validation loss against steps, and against megabytes sent."""
    figure = Figure(figsize=(12, 6), facecolor="white")
    left = figure.add_axes((0.06, 0.115, 0.42, 0.585))
    right = figure.add_axes((0.55, 0.115, 0.42, 0.585), sharey=left)
    for axes in (left, right):
        report.style(axes)
        axes.grid(axis="y", color=report.GRID, linewidth=0.8)
    right.set_xscale("log")
    for run in sorted(runs, key=lambda run: run.name != "dense"):
        width = 4 if run.name == "dense" else 2  # Visible below a line that overlaps it.
        steps, scores = zip(*((point.step, point.score) for point in run.curve), strict=True)
        report.draw_curve(left, steps, scores, run, width)
        report.draw_curve(right, report.sent_so_far(run), scores, run)
    left.set_xlim(left=0)
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_xlabel("steps", color=report.FAINT)
    right.set_xlabel("megabytes that one device has sent (logarithmic)", color=report.FAINT)

    for x, heading in ((0.06, "Bits a byte, by step"), (0.55, "Bits a byte, by bytes sent")):
        figure.text(x, 0.735, heading, size=12, weight="bold", color=report.INK)
    title = report.headline(runs, METRIC, alone="{} bits a byte")
    subtitle = (
        f"Transformer on Python's own source, {devices} workers, {settings['steps']} "
        f"steps of {settings['optimizer']}: {report.alike(runs)}"
    )
    figure.text(0.06, 0.925, title, size=17, weight="bold", color=report.INK)
    figure.text(0.06, 0.88, subtitle, size=10.5, color=report.FAINT)
    report.name_runs(figure, runs, METRIC)
    return figure

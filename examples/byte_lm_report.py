"""Scores and pictures of the runs of `byte_lm.py`."""

from collections.abc import Sequence
from typing import Any

import pictures
import report
from matplotlib.figure import Figure

METRIC = report.Metric(
    key="bits_per_byte",
    heading="bits\nper byte",
    number="{:.3f}",
    live="validation {:.3f} bits per byte",
    result="reaches {} bits per byte",
    worse=lambda score, base: 100 * (score / base - 1),
    margin=1.0,
    unit="%",
)


def picture(runs: Sequence[report.Run], devices: int, settings: dict[str, Any]) -> Figure:
    """Validation loss against steps, and against megabytes sent."""
    chosen = report.drawn(runs, METRIC)
    message, note = report.headline(runs, METRIC)
    figure, ((left, right),) = pictures.page(
        message,
        f"Transformer on Python's own source, {devices} workers, {settings['steps']} steps of "
        f"{report.alike(runs, settings['optimizer'])}{note}{report.left_out(runs, chosen)}",
        columns=2,
        height=3.1,
        sharey=True,
    )
    colors = report.colors(chosen)
    by_step, by_bytes, sizes = [], [], []
    points = [point for run in chosen for point in run.curve]
    top = 1.03 * max(point.score for point in points if point.step >= settings["steps"] / 10)
    for run in chosen:
        steps, scores = zip(*((point.step, point.score) for point in run.curve), strict=True)
        color, score = colors[run.name], METRIC.number.format(run.score)
        sent = report.sent_so_far(run)
        by_step.append(
            report.curve(left, steps, scores, run.label, color, wide=run.name == "dense")
        )
        by_bytes.append(report.curve(right, sent, scores, score, color))
        sizes += [size for size, score in zip(sent, scores, strict=True) if score <= top]
    lowest = min(point.score for point in points)
    left.set(xlim=(0, 1.03 * settings["steps"]), ylim=(lowest - 0.06 * (top - lowest), top))
    left.set(xlabel="steps", ylabel="bits per byte on held-out text")
    right.set(xscale="log", xlim=(0.65 * min(sizes), 1.65 * max(sizes)))
    right.set_xlabel("megabytes that one device has sent (log)")
    pictures.log_axis(right, "x")
    report.lead(right, by_bytes)
    pictures.name_ends(left, by_step)
    pictures.name_ends(right, by_bytes)
    return figure

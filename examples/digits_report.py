"""Scores and pictures of the runs of `train_digits.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pictures
import report
from matplotlib.axes import Axes
from matplotlib.figure import Figure

METRIC = report.Metric(
    key="test_accuracy",
    heading="test\naccuracy",
    number="{:.1f} %",
    live="test {:.1f} %",
    result="classifies {} of test digits correctly",
    worse=lambda score, base: base - score,
    margin=0.5,
    unit="points",
)


def picture(runs: Sequence[report.Run], devices: int, settings: dict[str, Any]) -> Figure:
    """Accuracy against megabytes sent, and the bytes of a step."""
    chosen = report.drawn(runs, METRIC)
    message, note = report.headline(runs, METRIC)
    heights = [2.6, 0.25 * len(chosen) + 0.2][: len(chosen)]
    figure, axes = pictures.page(
        message,
        f"Handwritten digits, {devices} workers, {settings['epochs']} epochs of "
        f"{report.alike(runs, settings['optimizer'])}{note}{report.left_out(runs, chosen)}"
        f"{with_memory(chosen)}",
        rows=len(heights),
        height=sum(heights) + 1.1,
        height_ratios=heights,
    )
    colors = report.colors(chosen)
    if len(chosen) > 1:
        draw_bytes(axes[1, 0], chosen, colors)
    draw_curves(axes[0, 0], chosen, colors)
    return figure


def with_memory(runs: Sequence[report.Run]) -> str:
    """Costs of the codecs that lose in `byte_lm.py`, which the accuracy on digits does not show."""
    kept = [run.label for run in runs if run.name in ("sign", "top_k")]
    if not kept:
        return ""
    return (
        f" Not free: {' and '.join(kept)} with a residual as large as the model, and a loss far "
        "above dense's before Adam on text (byte_lm)."
    )


def draw_curves(axes: Axes, runs: Sequence[report.Run], colors: Mapping[str, str]) -> None:
    """A line for each run, from the accuracy where runs begin to differ."""
    low = max(0, 5 * int((min(run.score for run in runs) - 20) / 5))
    seen = []
    for run in runs:
        scores = [point.score for point in run.curve]
        sizes = report.sent_so_far(run)
        report.curve(axes, sizes, scores, run.label, colors[run.name])
        seen += [size for size, score in zip(sizes, scores, strict=True) if score >= low]
    high = max(point.score for run in runs for point in run.curve)
    axes.set(ylim=(low, min(100, high + 0.06 * (high - low))), ylabel="test accuracy, %")
    axes.set(xscale="log", xlim=(0.6 * min(seen), 1.6 * max(seen)))
    axes.set_xlabel("megabytes that one device has sent (log)")
    pictures.log_axis(axes, "x")
    pictures.flags(
        axes,
        [
            pictures.Mark(
                run.sent_mb,
                run.score,
                f"{run.label}, {METRIC.number.format(run.score)}",
                colors[run.name],
            )
            for run in runs
        ],
    )


def draw_bytes(axes: Axes, runs: Sequence[report.Run], colors: Mapping[str, str]) -> None:
    """The bytes of a step, and how they compare with the dense ones."""
    pictures.dots(
        axes,
        {run.label: run.bytes_per_step / 1e3 for run in runs},
        {run.label: words(run) for run in runs},
        {run.label: colors[run.name] for run in runs},
    )
    axes.set_xlabel("kilobytes that one device sends per step (log)")


def words(run: report.Run) -> str:
    """A run's bytes, against dense, and the reducer that its collectives tell."""
    size = f"{run.bytes_per_step / 1e3:,.0f} kB"
    if run.name == "dense":
        return size
    ratio = run.times_less_than_dense
    times = report.short(max(ratio, 1 / ratio))
    against = f"{times} times {'fewer' if ratio >= 1 else 'more'}"
    return f"{size}, {against}{reducer(run)}"


def reducer(run: report.Run) -> str:
    """How the payloads travelled, if the collectives of the run say it."""
    ways = {"all-to-all": "two-shot", "all-gather": "gathered", "all-reduce": "all-reduced"}
    way = next((ways[kind] for kind in ways if kind in run.bytes_by_collective), "")
    return f", {way}" if way else ""

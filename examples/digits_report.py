"""How `train_digits.py` shows its runs: live on the terminal, as a table, a picture and JSON."""

import dataclasses
import json
import math
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxcomp

INK, FAINT, GRID = "#22262e", "#6b7280", "#e6e8ec"
COLORS = {
    "dense": "#4b5261",
    "qsgd_inf": "#2274b5",
    "terngrad": "#21936a",
    "sign": "#d17d00",
    "top_k": "#c2304c",
    "qsgd": "#7a5bb5",
    "bf16": "#8a6648",
}


class Point(NamedTuple):
    """How good the model is after so many steps; accuracy in percent."""

    step: int
    loss: float
    test_accuracy: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run reached, and what it cost; bytes are those that one device sends."""

    name: str
    label: str
    test_accuracy: float
    bytes_per_step: int
    bytes_by_collective: dict[str, int]
    times_less_than_dense: float
    bits_per_element: float
    step_ms: float
    sent_mb: float
    curve: list[Point]


def console() -> Console:
    """The terminal; where there is none, wide enough that the table does not wrap."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def progress(console: Console) -> Progress:
    """A bar for each run; nothing where output is not a terminal, which `watcher` makes up for."""
    return Progress(
        TextColumn("{task.description:<15}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def watcher(bars: Progress, label: str) -> Callable[[int, int, float, float], None]:
    """What a run calls after every step: moves its bar, or prints a line every quarter."""
    task = bars.add_task(label, total=None, now="compiling")

    def show(step: int, steps: int, loss: float, accuracy: float) -> None:
        now = f"loss {loss:.3f}  test {accuracy:.1f} %"
        bars.update(task, total=steps, completed=step, now=now)
        if bars.disable and (step == steps or step % math.ceil(steps / 4) == 0):
            bars.console.print(f"{label:<15} step {step:>4} of {steps}  {now}")

    return show


def print_table(console: Console, runs: Sequence[Run], devices: Sequence[Any]) -> None:
    """The runs side by side, and what may not be read into them."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("codec", no_wrap=True)
    facts = ("test\naccuracy", "bytes\na step", "against\ndense", "bits an\nelement")
    for heading in (*facts, "median\nstep", "sent\nin all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.label,
            f"{run.test_accuracy:.1f} %",
            f"{run.bytes_per_step:,}",
            against_dense(run),
            f"{run.bits_per_element:.2f}",
            f"{run.step_ms:.1f} ms",
            f"{run.sent_mb:,.1f} MB",
        )
    console.print(table)
    for note in notes(runs, devices):
        console.print(note)


def notes(runs: Sequence[Run], devices: Sequence[Any]) -> list[str]:
    """What a reader of the table must know."""
    said = [
        "Bytes are what one device sends over a ring, read from the compiled step itself; bits an "
        "element are those of one worker's payload.",
        "There is no slow link inside one machine, so the step times show only what compressing "
        "costs, not what it saves.",
    ]
    dense = next((run for run in runs if run.name == "dense"), None)
    others = [run for run in runs if run is not dense]
    if dense and others:
        times = ", ".join(f"{r.label} {r.step_ms / dense.step_ms:.1f}x" for r in others)
        slower = sum(run.step_ms > dense.step_ms for run in others)
        count = {len(others): "Every", 0: "No"}.get(slower, f"{slower} of {len(others)}")
        said.append(
            f"{count} compressed step was slower here than the dense one. Times its time: {times}."
        )
    more = [run.label for run in others if run.times_less_than_dense < 1]
    if more:
        said.append(
            f"{' and '.join(more)} sent MORE than dense: to gather, each device sends its payload "
            f"to {len(devices) - 1} others."
        )
    return said


def save(folder: pathlib.Path, runs: Sequence[Run], devices: Sequence[Any], settings: dict) -> None:
    """Writes `results.json` and `digits.png`."""
    environment = {
        "jax": jax.__version__,
        "jaxcomp": jaxcomp.__version__,
        "python": platform.python_version(),
        "device_kind": devices[0].device_kind,
        "device_platform": devices[0].platform,
        "device_count": len(devices),
        "cpu_cores": os.cpu_count(),
    }
    results = {
        "environment": environment,
        "settings": settings,
        "runs": [
            {**dataclasses.asdict(run), "curve": [point._asdict() for point in run.curve]}
            for run in runs
        ],
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    picture(runs, len(devices), settings).savefig(folder / "digits.png", dpi=160)


def picture(runs: Sequence[Run], devices: int, settings: dict[str, Any]) -> Figure:
    """Accuracy against megabytes sent, and the bytes of a step."""
    figure = Figure(figsize=(12, 6), facecolor="white")
    left = figure.add_axes((0.06, 0.1, 0.54, 0.6))
    right = figure.add_axes((0.71, 0.1, 0.2, 0.6))
    rows = draw_curves(left, runs)
    draw_bars(right, runs)

    height = 5.3 + 0.45 * rows  # Inches; the labels above the curves get what they need.
    figure.set_figheight(height)
    for axes, heading, inches in (
        (left, "Test accuracy", 3.5),
        (right, "Sent by one device in one step", 3.5 + 0.4 * rows),
    ):
        place = axes.get_position()
        axes.set_position((place.x0, 0.75 / height, place.width, inches / height))
        figure.text(place.x0, 1 - 1.15 / height, heading, size=12, weight="bold", color=INK)
    subtitle = (
        f"Handwritten digits, {devices} workers, {settings['epochs']} epochs of "
        f"{settings['optimizer']}: every codec with the same start, batches and optimizer"
    )
    figure.text(0.06, 1 - 0.45 / height, headline(runs), size=17, weight="bold", color=INK)
    figure.text(0.06, 1 - 0.73 / height, subtitle, size=10.5, color=FAINT)
    return figure


def headline(runs: Sequence[Run]) -> str:
    """What the codec that sent least came to, against dense if that ran too."""
    least = min(runs, key=lambda run: run.bytes_per_step)
    dense = next((run for run in runs if run.name == "dense"), None)
    if dense is None or least is dense:
        return f"{least.test_accuracy:.1f} % of the digits right for {least.sent_mb:,.3g} MB sent"
    return (
        f"{least.label}: {least.times_less_than_dense:.1f}× fewer bytes than dense, "
        f"{least.test_accuracy:.1f} % right instead of {dense.test_accuracy:.1f} %"
    )


def against_dense(run: Run) -> str:
    if run.name == "dense":
        return "-"
    ratio = run.times_less_than_dense
    return f"{ratio:.1f}x less" if ratio >= 1 else f"{1 / ratio:.1f}x MORE"


def draw_curves(axes: Axes, runs: Sequence[Run]) -> int:
    """One line a run, labelled above its end; returns how many rows of labels that took."""
    style(axes)
    for run in runs:
        sent = [point.step * run.bytes_per_step / 1e6 for point in run.curve]
        right = [point.test_accuracy for point in run.curve]
        color = COLORS[run.name]
        axes.plot(sent, right, color=color, linewidth=2, solid_capstyle="round")
        axes.plot(sent[-1], right[-1], "o", color=color, markersize=7, markeredgecolor="white")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("megabytes that one device has sent (logarithmic)", color=FAINT)
    return label_ends(axes, runs)


def label_ends(axes: Axes, runs: Sequence[Run]) -> int:
    """Names above the ends of the lines, on as many rows as it takes for none to overlap."""
    above = axes.get_xaxis_transform()
    taken: list[float] = []  # Where the last label of each row ends, in pixels.
    for run in sorted(runs, key=lambda run: run.sent_mb):
        color = COLORS[run.name]
        end = axes.transData.transform((run.sent_mb, 0))[0]
        text = axes.text(
            run.sent_mb,
            0,
            f"{run.label}\n{run.test_accuracy:.1f} %",
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
        reach = (run.test_accuracy / 100 + 0.015, 1.01 + 0.13 * row)
        axes.vlines(run.sent_mb, *reach, transform=above, color=color, lw=0.9, clip_on=False)
    return len(taken)


def draw_bars(axes: Axes, runs: Sequence[Run]) -> None:
    """The bytes of a step, with what they are of the dense ones."""
    style(axes)
    rows = range(len(runs), 0, -1)
    axes.barh(
        rows,
        [run.bytes_per_step / 1e3 for run in runs],
        color=[COLORS[run.name] for run in runs],
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
            color=INK,
        )
        axes.annotate(
            against_dense(run).replace("x", "×").replace("-", "baseline"),
            (run.bytes_per_step / 1e3, row),
            xytext=(6, -6),
            textcoords="offset points",
            va="center",
            size=8.5,
            color=FAINT,
        )
    axes.set_yticks(rows, [run.label for run in runs])
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])


def style(axes: Axes) -> None:
    """Only the lines that carry something."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", length=0, colors=INK, labelsize=9.5)

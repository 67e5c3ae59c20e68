"""Output of the training examples: live on the terminal, as a table and as JSON."""

import dataclasses
import json
import math
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import options
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
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
    "nuqsgd": "#d95f8d",
    "natural": "#5b8def",
    "eden": "#a3b18a",
    "bf16": "#8a6648",
    "top_k_alone": "#e79aa9",
    "sidco": "#0a8f99",
    "dgc": "#b0539b",
    "powersgd": "#64801a",
    "demo": "#3f45b8",
    "two_ways": "#13795b",
    "sign_bf16": "#b08a2e",
    "sign_int8": "#8c4f2b",
}


class Metric(NamedTuple):
    """The metric of an example, and its formats.

    Attributes:
        key: its name in `results.json`.
        heading: of its column in the table.
        number: format of a score, in the table and the picture.
        live: format of a score while a run goes on.
        verdict: format of a score against the dense one.
    """

    key: str
    heading: str
    number: str
    live: str
    verdict: str


class Point(NamedTuple):
    """The score of the model after the given number of steps."""

    step: int
    loss: float
    score: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a training run, and its cost.

    Bytes are those that one device sends, and those of a step are the last phase's; `phases` has
    the step that each phase starts at and the bytes of its steps.
    """

    name: str
    label: str
    score: float
    bytes_per_step: int
    bytes_by_collective: dict[str, int]
    times_less_than_dense: float
    bits_per_element: float
    step_ms: float
    sent_mb: float
    phases: list[tuple[int, int]]
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


def watcher(bars: Progress, label: str, metric: Metric) -> Callable[[int, int, float, float], None]:
    """The callback after every step: moves the bar, or prints a line every quarter."""
    task = bars.add_task(label, total=None, now="compiling")

    def show(step: int, steps: int, loss: float, score: float) -> None:
        now = f"loss {loss:.3f}  {metric.live.format(score)}"
        bars.update(task, total=steps, completed=step, now=now)
        if bars.disable and (step == steps or step % math.ceil(steps / 4) == 0):
            bars.console.print(f"{label:<15} step {step:>4} of {steps}  {now}")

    return show


def print_table(
    console: Console, runs: Sequence[Run], devices: Sequence[Any], metric: Metric
) -> None:
    """The runs in one table, with its caveats."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("codec", no_wrap=True)
    facts = (metric.heading, "bytes\na step", "against\ndense", "bits an\nelement")
    for heading in (*facts, "median\nstep", "sent\nin all"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.label,
            metric.number.format(run.score),
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
    """Caveats for readers of the table."""
    said = [
        "Bytes are what one device sends over a ring, read from the compiled step itself; bits an "
        "element are those of one worker's payload.",
        "There is no slow link inside one machine, so the step times show only what compressing "
        "costs, not what it saves.",
    ]
    phased = [run.label for run in runs if len(run.phases) > 1]
    if phased:
        said.append(
            f"{' and '.join(phased)} sent more in its first steps: its bytes a step are those of "
            "the last phase, counted from shapes and not read, and those in all are of all phases."
        )
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
            f"{' and '.join(more)} sent MORE than dense, over {len(devices)} devices; "
            "jaxcomp.describe(codec, params, workers) compares the ways to reduce."
        )
    return said


def save(
    folder: pathlib.Path,
    runs: Sequence[Run],
    devices: Sequence[Any],
    metric: Metric,
    settings: dict[str, Any],
) -> None:
    """Writes `results.json`."""
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
            {
                **named(dataclasses.asdict(run), metric),
                "curve": [named(point._asdict(), metric) for point in run.curve],
            }
            for run in runs
        ],
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")


def read(path: pathlib.Path, metric: Metric) -> tuple[list[Run], int, dict[str, Any]]:
    """The runs, the number of devices and the settings, as `save` wrote them."""

    def plain(fields: dict[str, Any]) -> dict[str, Any]:
        return {"score" if name == metric.key else name: value for name, value in fields.items()}

    found = json.loads(path.read_text())
    runs = [
        Run(**{**plain(run), "curve": [Point(**plain(point)) for point in run["curve"]]})
        for run in found["runs"]
    ]
    return runs, found["environment"]["device_count"], found["settings"]


def named(fields: dict[str, Any], metric: Metric) -> dict[str, Any]:
    """The fields with the score under the metric's own name."""
    return {metric.key if name == "score" else name: value for name, value in fields.items()}


def headline(runs: Sequence[Run], metric: Metric, alone: str) -> str:
    """The result of the codec with the fewest bytes, relative to dense if that ran too.

    Args:
        runs: the runs of the picture.
        metric: how their score is written.
        alone: format of a score that stands against none.
    """
    least = min(runs, key=lambda run: run.sent_mb)
    dense = next((run for run in runs if run.name == "dense"), None)
    score = metric.number.format(least.score)
    if dense is None or least is dense:
        return f"{alone.format(score)} for {least.sent_mb:,.3g} MB sent"
    return (
        f"{least.label}: {dense.sent_mb / least.sent_mb:.1f}× fewer bytes than dense, "
        f"{metric.verdict.format(score, metric.number.format(dense.score))}"
    )


def alike(runs: Sequence[Run]) -> str:
    """The settings that the runs have in common."""
    own = [run.label for run in runs if options.METHODS[run.name].optimizer]
    but = f" but {' and '.join(own)}" if own else ""
    return f"the same start, batches and optimizer for all{but}"


def against_dense(run: Run) -> str:
    if run.name == "dense":
        return "-"
    ratio = run.times_less_than_dense
    return f"{ratio:.1f}x less" if ratio >= 1 else f"{1 / ratio:.1f}x MORE"


def sent_so_far(run: Run) -> list[float]:
    """Megabytes that one device has sent at each point of the curve."""
    return [sent(run.phases, point.step) / 1e6 for point in run.curve]


def sent(phases: Sequence[tuple[int, int]], steps: int) -> int:
    """Bytes that one device has sent after so many steps."""
    ends = [start for start, _ in phases[1:]] + [steps]
    return sum(
        size * max(0, min(end, steps) - start)
        for (start, size), end in zip(phases, ends, strict=True)
    )


def draw_curve(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], run: Run, width: float = 2
) -> None:
    """One run's line, with a dot at its end."""
    color = COLORS[run.name]
    axes.plot(xs, ys, color=color, linewidth=width, solid_capstyle="round")
    axes.plot(xs[-1], ys[-1], "o", color=color, markersize=7, markeredgecolor="white")


def style(axes: Axes) -> None:
    """Only the lines that carry something."""
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(which="both", length=0, colors=INK, labelsize=9.5)


def name_runs(figure: Figure, runs: Sequence[Run], metric: Metric, top: float = 0.86) -> None:
    """Rows of names, each with its score, in the colors of the lines."""
    figure.legend(
        [Line2D([], [], color=COLORS[run.name], linewidth=4) for run in runs],
        [f"{run.label}  {metric.number.format(run.score)}" for run in runs],
        loc="upper left",
        bbox_to_anchor=(0.06, top),
        borderpad=0,
        borderaxespad=0.2,
        ncols=len(runs) if len(runs) <= 5 else -(-len(runs) // 2),
        frameon=False,
        handlelength=0.9,
        handletextpad=0.5,
        columnspacing=1.8,
        labelcolor="linecolor",
        prop={"size": 9.5, "weight": "bold"},
    )

"""Output of the training examples: live on the terminal, as a table and as JSON."""

import dataclasses
import json
import math
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import options
import pictures
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jaxcomp

MOST = len(pictures.COLORS)
"""Curves of a panel."""
OPTIMIZERS = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}


class Metric(NamedTuple):
    """The metric of an example, and its formats.

    Attributes:
        key: its name in `results.json`.
        heading: of its column in the table.
        number: format of a score, in the table and the picture.
        live: format of a score while a run goes on.
        result: a verb and its object, with a place for a score.
        worse: by how much the first score is worse than the second one.
        margin: a score that is worse by no more is as good.
        unit: of the margin.
    """

    key: str
    heading: str
    number: str
    live: str
    result: str
    worse: Callable[[float, float], float]
    margin: float
    unit: str


ENOUGH = 50
"""Steps whose median time is compared; fewer vary with what else the machine does."""


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
    facts = (metric.heading, "bytes\nper step", "against\ndense", "bits per\nelement")
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


def times_compared(dense: Run, others: Sequence[Run]) -> str:
    """The times of steps beside those of the dense ones."""
    times = ", ".join(f"{run.label} {run.step_ms / dense.step_ms:.1f}x" for run in others)
    slower = sum(run.step_ms > dense.step_ms for run in others)
    some = f"{slower} of {len(others)} compressed steps {'was' if slower == 1 else 'were'}"
    all_or_none = {len(others): "Every compressed step was", 0: "No compressed step was"}
    said = all_or_none.get(slower, some)
    return f"{said} slower here than the dense one. Times its time: {times}."


def notes(runs: Sequence[Run], devices: Sequence[Any]) -> list[str]:
    """Caveats for readers of the table."""
    said = [
        "Bytes are what one device sends over a ring, read from the compiled step itself; bits per "
        "element are those of one worker's payload.",
        "There is no slow link inside one machine, so the step times show only what compressing "
        "costs, not what it saves.",
    ]
    phased = [run.label for run in runs if len(run.phases) > 1]
    if phased:
        said.append(
            f"{' and '.join(phased)} sent more in its first steps: its bytes per step are those of "
            "the last phase, counted from shapes and not read, and those in all are of all phases."
        )
    dense = next((run for run in runs if run.name == "dense"), None)
    others = [run for run in runs if run is not dense]
    if dense and others:
        steps = min(run.curve[-1].step for run in runs)
        said.append(
            times_compared(dense, others)
            if steps >= ENOUGH
            else f"Medians of {steps} steps say too little to compare times; {ENOUGH} would do."
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


class Scored(Protocol):
    """A run as the title of a picture needs it."""

    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def score(self) -> float: ...
    @property
    def sent_mb(self) -> float: ...


class Compared(NamedTuple):
    """What the title of a picture compares.

    Attributes:
        base: the dense run, or without one the run with the best score.
        found: of runs with fewer bytes, the smallest that is as good, or else the best; or None.
        good: whether that one is as good.
    """

    base: Scored
    found: Scored | None
    good: bool


def unbiased(name: str) -> bool:
    """Whether a codec of the examples needs no residual."""
    method = options.METHODS.get(name)
    return method is not None and getattr(method.mean, "unbiased", False)


def compared(runs: Sequence[Scored], metric: Metric) -> Compared:
    """The runs of the title."""
    dense = next((run for run in runs if run.name == "dense"), None)
    base = dense or min(runs, key=lambda run: metric.worse(run.score, runs[0].score))
    fewer = [run for run in runs if run.sent_mb < base.sent_mb]
    good = [run for run in fewer if metric.worse(run.score, base.score) <= metric.margin]
    if good:  # Without a residual if possible: such codecs need no learning rate of their own.
        steady = [run for run in good if unbiased(run.name)] or good
        return Compared(base, min(steady, key=lambda run: run.sent_mb), True)
    best = min(fewer, key=lambda run: metric.worse(run.score, base.score), default=None)
    return Compared(base, best, False)


def headline(runs: Sequence[Scored], metric: Metric) -> tuple[str, str]:
    """A run with few bytes among those as good as dense, or as the best; and a note."""
    base, found, good = compared(runs, metric)
    score = metric.number.format(base.score)
    if len(runs) == 1:
        size = short(base.sent_mb)
        return f"{base.label} {metric.result.format(score)}; each device sends {size} MB", ""
    if found is None:
        said = f"No run sends fewer bytes than {base.label}, which {metric.result.format(score)}"
        return said, ""
    ratio = f"{short(base.sent_mb / found.sent_mb)} times fewer bytes"
    reached = metric.result.format(metric.number.format(found.score))
    within = f"within {metric.margin:g} {metric.unit} of {base.label}"
    if good:
        said = f"{found.label} sends {ratio} than {base.label} and {reached}"
        kind = "codec without a residual" if unbiased(found.name) else "run"
        note = f" The title names the {kind} with the fewest bytes {within}."
        return f"{said} ({base.label}: {score})", note
    said = f"No run with fewer bytes is {within} ({score}); the closest, {found.label},"
    return f"{said} {reached} with {ratio}", ""


def short(number: float) -> str:
    """Three digits, and all of a larger number."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def drawn(runs: Sequence[Run], metric: Metric) -> list[Run]:
    """The runs of the title, and those that the fewest others beat in both score and bytes."""
    named = compared(runs, metric)

    def beats(one: Run, other: Run) -> bool:
        loss, more = metric.worse(one.score, other.score), one.sent_mb - other.sent_mb
        return max(loss, more) <= 0 and min(loss, more) < 0

    def rank(run: Run) -> tuple[bool, int, float]:
        better = sum(beats(other, run) for other in runs)
        return run not in named, better, metric.worse(run.score, runs[0].score)

    best = sorted(runs, key=rank)[:MOST]
    return [run for run in runs if run in best]


def colors(runs: Sequence[Run]) -> dict[str, str]:
    """The color of each run by its name: gray for the dense one, else that of its place in METHODS.

    Of runs with the same color, those after the first one get colors that are left.
    """
    compressed = [name for name in options.METHODS if name != "dense"]
    own = {name: pictures.COLORS[at % MOST] for at, name in enumerate(compressed)}
    found, others = {"dense": pictures.BASE}, [run.name for run in runs if run.name != "dense"]
    for name in sorted(others, key=compressed.index):
        if own[name] not in found.values():
            found[name] = own[name]
    left = [color for color in pictures.COLORS if color not in found.values()]
    rest = [name for name in others if name not in found]
    return found | dict(zip(rest, left, strict=False))


def left_out(runs: Sequence[Run], chosen: Sequence[Run]) -> str:
    """A sentence on the runs that are not drawn, or nothing."""
    labels = [run.label for run in runs if run not in chosen]
    if not labels:
        return ""
    named = labels[0] if len(labels) == 1 else f"{len(labels)} more"
    return f" The table has {named} too."


def alike(runs: Sequence[Run], optimizer: str) -> str:
    """The optimizer, and the settings that the runs have in common."""
    own = [run.label for run in runs if options.METHODS[run.name].optimizer]
    but = f" but {' and '.join(own)}" if own else ""
    same = f"the same start, batches and optimizer for all{but}, one seed"
    return f"{OPTIMIZERS[optimizer]}; {same}."


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


def curve(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], name: str, color: str, wide: bool = False
) -> Line2D:
    """A line with a dot at its end; a wide one is visible below a line that overlaps it."""
    (line,) = axes.plot(xs, ys, color=color, label=name, solid_capstyle="round")
    if wide:
        line.set(linewidth=3.4, zorder=1.5)
    axes.plot(xs[-1], ys[-1], "o", color=color, markeredgecolor="white", markersize=6, zorder=3)
    return line


def lead(axes: Axes, lines: Sequence[Line2D]) -> None:
    """Dotted lines from the ends of curves to the panel's right, where `name_ends` names them."""
    right = axes.get_xlim()[1]
    axes.set_xlim(right=right)
    for line in lines:
        x, y = np.asarray(line.get_xdata())[-1], np.asarray(line.get_ydata())[-1]
        axes.plot([x, right], [y, y], ":", color=line.get_color(), linewidth=0.9, zorder=1)

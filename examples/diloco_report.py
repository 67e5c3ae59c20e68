"""The table and the picture of `diloco.py`."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import report
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from jaxcomp.theory import local_rounds, units

COLORS = {"dense": "#4b5261", "diloco": "#2274b5", "streaming": "#21936a", "sparseloco": "#c2304c"}


class Run(NamedTuple):
    """A method's run.

    Attributes:
        name: of the method.
        label: of it in the table and the picture.
        scores: bits a byte on held-out text after each round.
        sent: bytes that a worker sends in a round.
        exchanges: in a round.
        delay: the steps that run beside an exchange.
        step: median seconds of a step here, with what it exchanges here.
        digest: of the parameters at the end.
    """

    name: str
    label: str
    scores: list[float]
    sent: float
    exchanges: int
    delay: int
    step: float
    digest: str


def seconds(run: Run, runs: Sequence[Run], every: int, bandwidth: float) -> float:
    """Seconds of a round over a link: all compute the same steps, the fastest of which counts."""
    step, exchange = min(one.step for one in runs), run.sent / run.exchanges / bandwidth
    if run.exchanges > 1:
        return run.exchanges * local_rounds.seconds(1, step, exchange)
    return local_rounds.seconds(every, step, exchange, run.delay)


def table(console: Console, runs: Sequence[Run], bandwidth: float, every: int) -> None:
    found = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    found.add_column("method", no_wrap=True)
    link = units.speed(bandwidth)
    for heading in ("bits a byte", "MB a round", "sent in all", "step here", f"a round, {link}"):
        found.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        found.add_row(
            run.label,
            f"{run.scores[-1]:.3f}",
            f"{run.sent / 1e6:.3f}",
            f"{run.sent * len(run.scores) / 1e6:.2f} MB",
            units.duration(run.step),
            units.duration(seconds(run, runs, every, bandwidth)),
        )
    console.print(found)


def draw(
    runs: Sequence[Run], bandwidth: float, settings: dict[str, Any], path: pathlib.Path
) -> None:
    """Bits a byte against megabytes sent and against seconds."""
    figure = Figure(figsize=(12, 5.6), facecolor="white")
    left = figure.add_axes((0.06, 0.12, 0.42, 0.58))
    right = figure.add_axes((0.55, 0.12, 0.42, 0.58), sharey=left)
    for run in runs:
        count = range(1, len(run.scores) + 1)
        curve(left, [n * run.sent / 1e6 for n in count], run)
        whole = seconds(run, runs, settings["every"], bandwidth)
        curve(right, [n * whole for n in count], run)
    for axes in (left, right):
        report.style(axes)
        axes.grid(axis="y", color=report.GRID, linewidth=0.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_xlabel("megabytes that one worker has sent (logarithmic)", color=report.FAINT)
    right.set_xlabel("seconds, steps here and the link by the model (log.)", color=report.FAINT)
    headings = ("Bits a byte, by bytes sent", f"Bits a byte, by time at {units.speed(bandwidth)}")
    for x, heading in zip((0.06, 0.55), headings, strict=True):
        figure.text(x, 0.735, heading, size=12, weight="bold", color=report.INK)
    figure.text(0.06, 0.93, headline(runs), size=16, weight="bold", color=report.INK)
    figure.text(
        0.06,
        0.88,
        f"Transformer on Python's own source, {settings['workers']} workers, "
        f"{settings['rounds']} rounds of {settings['every']} steps of Adam",
        size=10.5,
        color=report.FAINT,
    )
    for place, run in enumerate(runs):
        figure.text(
            0.06 + 0.23 * place,
            0.82,
            f"{run.label}\n{run.scores[-1]:.3f}",
            size=9.5,
            weight="bold",
            va="center",
            color=COLORS[run.name],
        )
    figure.savefig(path, dpi=140)


def curve(axes: Axes, xs: Sequence[float], run: Run) -> None:
    color = COLORS[run.name]
    axes.plot(xs, run.scores, color=color, linewidth=2, solid_capstyle="round")
    axes.plot(xs[-1], run.scores[-1], "o", color=color, markersize=7, markeredgecolor="white")


def headline(runs: Sequence[Run]) -> str:
    """How many fewer bytes the smallest sends, and to which score."""
    least = min(runs, key=lambda run: run.sent)
    most = max(runs, key=lambda run: run.sent)
    if least is most:
        return f"{least.label}: {least.scores[-1]:.3f} bits a byte"
    return (
        f"{most.sent / least.sent:,.0f} times fewer bytes: {least.scores[-1]:.3f} bits a byte "
        f"instead of {most.scores[-1]:.3f}"
    )

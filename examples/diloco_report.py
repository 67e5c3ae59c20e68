"""The table and the picture of `diloco.py`."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import byte_lm_report
import pictures
import report
from rich import box
from rich.console import Console
from rich.table import Table

from jaxcomp.theory import local_rounds, units

COLORED: Sequence[str] = ("dense", "diloco", "streaming", "sparseloco")


class Run(NamedTuple):
    """A method's run.

    Attributes:
        name: of the method.
        label: of it in the table and the picture.
        scores: bits per byte on held-out text after each round.
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

    @property
    def score(self) -> float:
        """Bits per byte at the end."""
        return self.scores[-1]

    @property
    def sent_mb(self) -> float:
        """Megabytes that a worker has sent in all."""
        return self.sent * len(self.scores) / 1e6


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
    for heading in (
        "bits per byte",
        "MB per round",
        "sent in all",
        "step here",
        f"a round, {link}",
    ):
        found.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        found.add_row(
            run.label,
            f"{run.score:.3f}",
            f"{run.sent / 1e6:.3f}",
            f"{run.sent_mb:.2f} MB",
            units.duration(run.step),
            units.duration(seconds(run, runs, every, bandwidth)),
        )
    console.print(found)


def draw(
    runs: Sequence[Run], bandwidth: float, settings: dict[str, Any], path: pathlib.Path
) -> None:
    """Bits per byte against megabytes sent and against seconds."""
    message, note = report.headline(runs, byte_lm_report.METRIC)
    figure, ((left, right),) = pictures.page(
        message,
        f"Transformer on Python's own source, {settings['workers']} workers, "
        f"{settings['rounds']} rounds of {settings['every']} steps of Adam. Seconds are those of "
        f"the fastest steps here, and of a link of {units.speed(bandwidth)} by the model.{note}",
        columns=2,
        height=3.1,
        sharey=True,
    )
    colors = dict(zip(COLORED, (pictures.BASE, *pictures.COLORS), strict=False))
    by_bytes, by_time = [], []
    for run in runs:
        color, count = colors[run.name], range(1, len(run.scores) + 1)
        sizes = [n * run.sent / 1e6 for n in count]
        by_bytes.append(report.curve(left, sizes, run.scores, run.label, color))
        whole, score = seconds(run, runs, settings["every"], bandwidth), f"{run.score:.3f}"
        times = [n * whole for n in count]
        by_time.append(report.curve(right, times, run.scores, score, color))
    left.set(xscale="log", xlabel="megabytes sent per worker (log)")
    left.set_ylabel("bits per byte on held-out text")
    right.set(xscale="log", xlabel="seconds (log)")
    for axes, lines in ((left, by_bytes), (right, by_time)):
        axes.margins(x=0.06)
        pictures.log_axis(axes, "x")
        report.lead(axes, lines)
        pictures.name_ends(axes, lines)
    pictures.save(figure, path)

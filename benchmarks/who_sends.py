"""Draws which device sends what in sharded training, as one picture of small sequences in time.

python benchmarks/redraw.py --picture sharded_training
"""

import pathlib
from typing import Any, NamedTuple

import reporting  # noqa: F401  # It finds `pictures`.
from matplotlib.axes import Axes

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

FAINT, INK, RULE, SMALL = pictures.FAINT, pictures.INK, "#c9ced6", pictures.SMALL
KINDS = ("weights", "gradients", "activations", "tokens")
COLORS: dict[str, str] = dict(zip(KINDS, pictures.COLORS, strict=False))
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Message(NamedTuple):
    """A message between neighbouring columns of a panel.

    Attributes:
        when: the part of the step.
        kind: the name of its colour.
        text: what it is, and its codec.
        arrow: "<->" if both send one, "->" or "<-" if one does.
        between: the numbers of the columns.
        slow: whether it crosses the slow link.
    """

    when: str
    kind: str
    text: str
    arrow: str = "<->"
    between: tuple[int, int] = (0, 1)
    slow: bool = False


class Panel(NamedTuple):
    """One way to shard; `holds` is below its title, `columns` name those who send."""

    title: str
    holds: str
    columns: tuple[str, ...]
    messages: tuple[Message, ...]


PAIR = ("device 1", "device 2")
PANELS = (
    Panel(
        "ZeRO-1: sharded_optimizer",
        "each has all weights, 1/n of the optimizer",
        PAIR,
        (
            Message(BACKWARD, "gradients", "gradients of the other's part, 4 bits"),
            Message(UPDATE, "weights", "changes of its own part, 4 bits"),
        ),
    ),
    Panel(
        "ZeRO-3: fully_sharded",
        "each has 1/n of all weights and of the optimizer",
        PAIR,
        (
            Message(FORWARD, "weights", "weights of its own part, 8 bits"),
            Message(BACKWARD, "weights", "the same weights again"),
            Message(BACKWARD, "gradients", "gradients of the other's part, 4 bits"),
        ),
    ),
    Panel(
        "ZeRO-3 over two hosts",
        "each has 1/n; weights cross the slow link first",
        ("host A, 1", "host B, 1", "host B, 2"),
        (
            Message(FORWARD, "weights", "8 bits", between=(0, 1), slow=True),
            Message(FORWARD, "weights", "dense", between=(1, 2)),
            Message(BACKWARD, "gradients", "8 bits", between=(1, 2)),
            Message(BACKWARD, "gradients", "4 bits", between=(0, 1), slow=True),
        ),
    ),
    Panel(
        "Tensor parallel: psum, pvary",
        "each has 1/n of every layer, all have all tokens",
        PAIR,
        (
            Message(FORWARD, "activations", "exit: activations, 8 bits"),
            Message(BACKWARD, "activations", "entry: their gradients, 8 bits"),
        ),
    ),
    Panel(
        "Experts: all_to_all",
        "each has an expert, and tokens of its own",
        PAIR,
        (
            Message(FORWARD, "tokens", "tokens for the other's expert, mxfp8"),
            Message(FORWARD, "tokens", "answers, bfloat16 or 8 bits"),
            Message(BACKWARD, "tokens", "gradients of answers, then of tokens"),
        ),
    ),
    Panel(
        "Pipeline: ppermute",
        "each has some layers",
        ("stage 1", "stage 2"),
        (
            Message(FORWARD, "activations", "activations, 8 bits", arrow="->"),
            Message(BACKWARD, "activations", "their gradients, 8 bits", arrow="<-"),
        ),
    ),
)
COLUMNS = 2
MESSAGE = (
    "Each way to shard sends something else between devices, and each message has its own codec"
)
DETAIL = (
    "Time runs down. Blue are weights, orange gradients, green activations, pink tokens; a dashed "
    "line crosses a slow link."
)


def draw(path: pathlib.Path) -> None:
    rows = [PANELS[at : at + COLUMNS] for at in range(0, len(PANELS), COLUMNS)]
    tallest = [max(len(panel.messages) for panel in row) for row in rows]
    heights = [most + 1.6 for most in tallest]
    ratios = {"height_ratios": heights}
    figure, axes = pictures.page(
        MESSAGE, DETAIL, len(rows), COLUMNS, 0.36 * sum(heights), gridspec_kw=ratios
    )
    for row, own, most in zip(axes, rows, tallest, strict=True):
        for one, panel in zip(row, own, strict=True):
            _panel(one, panel, most)
    pictures.save(figure, path)


def _panel(axes: Axes, panel: Panel, longest: int) -> None:
    """Columns are devices, and time runs down, for as many messages as the longest panel has."""
    last = len(panel.columns) - 1
    places = [0.25 + 0.75 * number / last for number in range(last + 1)]
    axes.set(xlim=(0, 1.12), ylim=(-longest - 0.3, 1.3))
    axes.axis("off")
    axes.text(0, 1.3, panel.title, fontsize=9, weight="bold", color=INK, va="top")
    axes.text(0, 0.82, panel.holds, fontsize=SMALL, color=FAINT, va="top")
    middle: Any = {"ha": "center", "va": "center", "fontsize": SMALL}
    for name, x in zip(panel.columns, places, strict=True):
        axes.plot([x, x], [-0.12, -longest - 0.2], color=RULE, linewidth=1.2, zorder=0)
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": FAINT}
        axes.text(x, 0, name, color=INK, bbox=box, **middle)
    before = ""
    for number, message in enumerate(panel.messages):
        y = -0.85 - number
        if message.when != before:
            axes.text(0, y, message.when, fontsize=SMALL, color=FAINT, va="center")
        before = message.when
        _message(axes, message, [places[at] for at in message.between], y, last > 1)


def _message(axes: Axes, message: Message, ends: list[float], y: float, named: bool) -> None:
    """An arrow between two columns, and its text above, with the kind of message if `named`."""
    start, end = ends
    color = COLORS[message.kind]
    arrow = {
        "arrowstyle": {"<->": "<|-|>", "->": "-|>", "<-": "<|-"}[message.arrow],
        "color": color,
        "linewidth": 1.6,
        "linestyle": (0, (4, 2)) if message.slow else "solid",
        "shrinkA": 2,
        "shrinkB": 2,
    }
    axes.annotate("", xy=(end, y), xytext=(start, y), arrowprops=arrow)
    text = f"{message.kind}, {message.text}" if named else message.text
    axes.text((start + end) / 2, y + 0.14, text, fontsize=SMALL, ha="center", color=color)

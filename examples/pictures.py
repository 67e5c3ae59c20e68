"""One style for all pictures: the message as title, names at the curves, 690 pixels wide."""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

mpl.use("Agg")
import matplotlib.pyplot as plt

WIDTH, DPI = 6.9, 200
"""Inches; a page shows a picture 690 pixels wide, and a sharp screen its 1,380."""
INK, FAINT, GRID = "#22262e", "#6b7280", "#e6e8ec"
BASE = "#6b7280"
"""The colour of what the others are compared with."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Six that differ for the colour-blind too, those of Okabe and Ito, 2008: at most six curves."""
SMALL, TITLE = 8, 11.5
_LINE, _NOTE, _MARGIN = 0.21, 0.155, 0.14
STYLE: dict[str, Any] = {
    "font.size": SMALL,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": SMALL,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
}
mpl.rcParams.update(STYLE)


def page(
    message: str, detail: str, rows: int = 1, columns: int = 1, height: float = 3.2, **settings: Any
) -> tuple[Figure, Any]:
    """A figure with its message and a line of detail above, and its axes as rows and columns.

    Args:
        message: what the picture shows, as a sentence.
        detail: the setting, in a line or two.
        rows: of panels.
        columns: of panels.
        height: of all panels together, in inches.
        **settings: of `matplotlib.pyplot.subplots`.
    """
    title, notes = textwrap.wrap(message, 74), textwrap.wrap(detail, 112)
    head = _MARGIN + _LINE * len(title) + _NOTE * len(notes)
    total = height + head
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, total), squeeze=False, **settings)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, height / total))
    line = 1 - 0.06 / total
    for text in title:
        figure.text(0.012, line, text, fontsize=TITLE, weight="bold", color=INK, va="top")
        line -= _LINE / total
    for text in notes:
        figure.text(0.012, line, text, fontsize=SMALL, color=FAINT, va="top")
        line -= _NOTE / total
    return figure, axes


def name_ends(axes: Any, lines: Sequence[Any], gap: float | None = None) -> None:
    """Names each line beside the panel, at the height of its end, in its colour, without overlap.

    Args:
        axes: the panel; its limits are fixed before.
        lines: lines with a label and at least a point.
        gap: the least distance of two names, as a share of the panel's height; None for that of
            the panel's own height.
    """
    lines = [line for line in lines if len(line.get_ydata())]
    if gap is None:
        height = axes.figure.get_size_inches()[1] * axes.get_position().height
        gap = 1.25 * SMALL / 72 / height
    low, high = axes.get_ylim()
    ends = [min(max(line.get_ydata()[-1], low), high) for line in lines]
    places = [axes.transLimits.transform(axes.transScale.transform((1, y)))[1] for y in ends]
    order = sorted(range(len(lines)), key=lambda at: places[at])
    taken: list[float] = []
    for at in order:  # Upwards, then as far down as the panel's top demands.
        taken.append(max(places[at], taken[-1] + gap if taken else 0.0))
    for rank in reversed(range(len(taken))):
        above = taken[rank + 1] if rank + 1 < len(taken) else 1.0 + gap
        taken[rank] = min(taken[rank], above - gap)
    for at, y in zip(order, taken, strict=True):
        line = lines[at]
        axes.text(
            1.015, y, line.get_label(), color=line.get_color(), fontsize=SMALL, va="center",
            transform=axes.transAxes,
        )  # fmt: skip


def log_axis(axes: Any, which: str) -> None:
    """A log axis, "x" or "y", with plain numbers at 1, 2 and 5 of each decade, or at 1 of many."""
    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    low, high = getattr(axes, f"get_{which}lim")()
    few = high < 200 * low
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=20))
    axis.set_minor_locator(NullLocator())
    if low >= 1e-4 and high <= 1e7:
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def dots(
    axes: Any,
    values: Mapping[str, float],
    words: Mapping[str, str],
    colors: Mapping[str, str] | None = None,
    room: float = 0.3,
) -> None:
    """A dot for each name on a log axis, the first on top, with words at its right.

    A bar's length means nothing on a log axis; a dot's place does.

    Args:
        axes: the panel.
        values: what each name has.
        words: what is written at the dot of a name.
        colors: of some of the names; the others have the first colour.
        room: for the words of the rightmost dot, as a power of the range of values.
    """
    places = range(len(values))[::-1]
    for y, (name, value) in zip(places, values.items(), strict=True):
        color = (colors or {}).get(name, COLORS[0])
        axes.plot([value], [y], "o", color=color, markersize=6)
        axes.annotate(
            words.get(name, ""), (value, y), xytext=(7, 0), textcoords="offset points",
            va="center", color=color, fontsize=SMALL,
        )  # fmt: skip
    low, high = min(values.values()), max(values.values())
    axes.set(yticks=list(places), ylim=(-0.6, len(values) - 0.4))
    axes.set_xlim(low / 1.3, high * (high / low * 4) ** room)
    log_axis(axes, "x")
    axes.set_yticklabels(list(values))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes the picture, in the folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    print(f"drawn to {path}")

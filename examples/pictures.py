"""One style for all pictures: the message as title, names at the curves, 690 pixels wide."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import IdentityTransform, Transform, offset_copy

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
mpl.rcParams.update(STYLE)  # pyright: ignore[reportCallIssue, reportArgumentType]


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
    title, notes = wrap(message, TITLE, "bold"), wrap(detail, SMALL)
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


def wrap(text: str, size: float, weight: str = "normal", width: float = WIDTH - 0.2) -> list[str]:
    """The longest lines that are at most `width` inches wide; a no-break space breaks none."""
    font = FontProperties(weight=weight)
    inches = lambda line: TextPath((0, 0), line, size, prop=font).get_extents().width / 72  # noqa: E731
    lines, rest = [], text.replace("\n", " ").split(" ")
    while rest:
        taken = len(rest)
        while taken > 1 and inches(" ".join(rest[:taken])) > width:
            taken -= 1
        lines.append(" ".join(rest[:taken]))
        rest = rest[taken:]
    return lines


def name_ends(
    axes: Any, lines: Sequence[Any], gap: float | None = None, lead: bool = False
) -> None:
    """Names each line beside the panel, at the height of its end, in its colour, without overlap.

    Args:
        axes: the panel; its limits are fixed before.
        lines: lines with a label and at least a point.
        gap: the least distance of two names, as a share of the panel's height; None for that of
            the panel's own height.
        lead: whether a thin line leads from the end of each line to its name.
    """
    lines = [line for line in lines if len(line.get_ydata())]
    height = axes.figure.get_size_inches()[1] * axes.get_position().height
    least = 1.25 * SMALL / 72 / height if gap is None else gap
    low, high = axes.get_ylim()
    ends = [min(max(line.get_ydata()[-1], low), high) for line in lines]
    places = [axes.transLimits.transform(axes.transScale.transform((1, y)))[1] for y in ends]
    order = sorted(range(len(lines)), key=lambda at: places[at])
    taken: list[float] = []
    for at in order:  # Upwards, then as far down as the panel's top demands.
        taken.append(max(places[at], taken[-1] + least if taken else 0.0))
    for rank in reversed(range(len(taken))):
        above = taken[rank + 1] if rank + 1 < len(taken) else 1.0 + least
        taken[rank] = min(taken[rank], above - least)
    for at, y in zip(order, taken, strict=True):
        line = lines[at]
        axes.text(
            1.015, y, line.get_label(), color=line.get_color(), fontsize=SMALL, va="center",
            transform=axes.transAxes,
        )  # fmt: skip
        if lead:
            inside = [x for x, own in line.get_xydata() if low <= own <= high]
            start = inside[-1] if inside else line.get_xdata()[-1], ends[at]
            dotted = {"arrowstyle": "-", "color": line.get_color(), "lw": 0.7, "ls": ":"}
            axes.annotate(
                "", start, xytext=(1.01, y), textcoords="axes fraction",
                arrowprops=dotted | {"shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip


class Mark(NamedTuple):
    """A point with a name above the panel."""

    x: float
    y: float
    name: str
    color: str


def flags(axes: Any, marks: Sequence[Mark]) -> None:
    """Names points above the panel: a thin line up from each, with its name at the line's right.

    Names that would overlap are on several rows, so that no line crosses a name.

    Args:
        axes: the panel; its limits are fixed before.
        marks: the points.
    """
    figure, row = axes.figure, 1.45 * SMALL
    marks = sorted(marks, key=lambda mark: mark.x, reverse=True)

    def above(points: float, right: float = 0.0) -> Transform:
        move = offset_copy(IdentityTransform(), figure, right, points, "points")
        return axes.get_xaxis_transform() + move

    texts = [
        axes.text(
            mark.x, 1, mark.name, color=mark.color, fontsize=SMALL, va="bottom",
            transform=above(4, 3),
        )
        for mark in marks
    ]  # fmt: skip
    figure.draw_without_rendering()  # The layout fixes the panel's width.
    taken: list[tuple[float, int]] = []  # Where a line stands, in pixels, and its row.
    for mark, text in zip(marks, texts, strict=True):
        place = axes.transData.transform((mark.x, mark.y))[0]
        end = text.get_window_extent().x1 + 6
        at = max((height + 1 for x, height in taken if place <= x + 1 and x < end), default=0)
        taken.append((place, at))
        text.set_transform(above(4 + row * at, 3))
        axes.annotate(
            "", (mark.x, mark.y), xytext=(mark.x, 1), textcoords=above(5 + row * (at + 0.7)),
            arrowprops={"arrowstyle": "-", "color": mark.color, "lw": 0.8, "shrinkA": 0},
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


def power(value: float) -> str:
    """A positive number with two digits, and a power of ten where it is small or large."""
    if 1e-2 <= value < 1e4:
        return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"
    digits, exponent = f"{value:.1e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    digits = digits.removesuffix(".0")
    return f"10{raised}" if digits == "1" else f"{digits}·10{raised}"


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes the picture, in the folder that is made for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    print(f"drawn to {path}")

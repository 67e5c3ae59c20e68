"""Diagrams of who sends what: two shots, error feedback, and FSDP between slices.

python benchmarks/redraw.py --picture diagram_two_shot
"""

import itertools
import pathlib
from typing import Any

import reporting  # noqa: F401  # It finds `pictures`.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

COLORS, FAINT, INK = pictures.COLORS, pictures.FAINT, pictures.INK
WORKERS = 4
Point = tuple[float, float]


def canvas(message: str, detail: str, height: float) -> tuple[Figure, Axes]:
    """A figure whose only axes have no frame, and inches as units, from the left bottom corner."""
    figure, axes = pictures.page(message, detail, height=height)
    plain = axes[0, 0]
    plain.axis("off")
    plain.set(xlim=(0, pictures.WIDTH), ylim=(0, height))
    return figure, plain


def box(
    axes: Axes, middle: Point, size: Point, text: str, color: str = FAINT, fill: str = "white"
) -> None:
    """A rectangle with rounded corners around a text, by its middle."""
    corner = (middle[0] - size[0] / 2, middle[1] - size[1] / 2)
    style = "round,pad=0,rounding_size=0.05"
    axes.add_patch(
        FancyBboxPatch(
            corner, *size, boxstyle=style, facecolor=fill, edgecolor=color, linewidth=1.2
        )
    )
    words(axes, middle, text, "white" if fill in COLORS else INK)


def words(axes: Axes, at: Point, text: str, color: str = INK, **style: Any) -> None:
    axes.text(
        *at,
        text,
        **{"ha": "center", "va": "center", "fontsize": pictures.SMALL, "color": color} | style,
    )


def arrow(axes: Axes, start: Point, end: Point, color: str = FAINT, **style: Any) -> None:
    how = {"arrowstyle": "-|>", "linewidth": 1.2, "color": color, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=how | style)


def two_shot(path: pathlib.Path) -> None:
    """Every worker sends part `i` to worker `i`, which sends the mean of the part to all."""
    figure, axes = canvas(
        "Two shots: each worker averages one part, and sends its mean to all",
        "A mean over 4 workers. With P bytes for a compressed gradient a message is P/4; "
        "each worker sends three in each shot, 1.5 P in all. The messages of part 1 are dark, and "
        "a worker's own part stays with it.",
        3.0,
    )
    left, middle, right, cell = 0.85, 3.55, 5.4, 0.3
    rows = [2.3 - 0.68 * worker for worker in range(WORKERS)]
    _headings(axes, (left + 1.5 * cell, middle, right + 1.5 * cell))
    for part in reversed(range(WORKERS)):
        dark = part == 0
        style = {"color": COLORS[part], "alpha": 1 if dark else 0.3, "zorder": 2 if dark else 1}
        style["arrowstyle"] = "-|>" if dark else "-"
        for worker, y in enumerate(rows):
            if worker != part:
                end = rows[part] + 0.07 * (1.5 - worker)
                arrow(axes, (left + 3.6 * cell, y), (middle - 0.53, end), **style)
                end = y + 0.07 * (1.5 - part)
                arrow(axes, (middle + 0.53, rows[part]), (right - 0.6 * cell, end), **style)
    for worker, y in enumerate(rows):
        words(axes, (0.08, y), f"worker {worker + 1}", FAINT, ha="left")
        for part, color in enumerate(COLORS[:WORKERS]):
            box(axes, (left + part * cell, y), (cell - 0.03, 0.28), f"{part + 1}", color, color)
            box(axes, (right + part * cell, y), (cell - 0.03, 0.28), f"{part + 1}", color, color)
        box(axes, (middle, y), (1.0, 0.28), f"mean of part {worker + 1}", COLORS[worker])
    pictures.save(figure, path)


def _headings(axes: Axes, places: tuple[float, float, float]) -> None:
    """Of what the workers have, and of the messages between."""
    left, middle, right = places
    for x, text in ((left, "gradient"), (middle, "averaged part"), (right, "mean")):
        words(axes, (x, 2.8), text, weight="bold")
    words(axes, ((left + middle) / 2 + 0.05, 2.75), "first shot:\npart i to worker i", FAINT)
    words(axes, ((middle + right) / 2 - 0.05, 2.75), "second shot:\nthe means to all", FAINT)


def error_feedback(path: pathlib.Path) -> None:
    """What a message misses is kept, and added to the next gradient."""
    figure, axes = canvas(
        "Error feedback keeps what a message misses for the next gradient",
        "One step of one worker. Only the message crosses the link; the residual stays on the "
        "worker, and later messages send what this one misses.",
        1.75,
    )
    top, low, size = 1.4, 0.35, (1.15, 0.42)
    blue, orange = COLORS[:2]
    places = (0.65, 2.3, 3.95, 5.6)
    names = ("gradient\ng", "sum\nv = g + e", "codec\nC", "message\nC(v)")
    for x, name in zip(places, names, strict=True):
        box(axes, (x, top), size, name, blue if "message" in name else FAINT)
    for start, end in itertools.pairwise(places):
        arrow(axes, (start + 0.6, top), (end - 0.6, top))
    arrow(axes, (places[3] + 0.6, top), (6.85, top), blue)
    words(axes, (6.85, top + 0.15), "to others", blue, ha="right")
    box(axes, (places[1], low), size, "residual\ne", orange)
    box(axes, (4.95, low), (1.8, 0.42), "what the message misses\nv − C(v)", orange)
    arrow(axes, (places[3], top - 0.23), (places[3], low + 0.23), orange)
    arrow(axes, (places[1] + 0.4, top - 0.23), (4.2, low + 0.23), orange)
    arrow(axes, (4.02, low), (places[1] + 0.6, low), orange)
    words(axes, (3.46, low + 0.13), "is kept", orange)
    arrow(axes, (places[1], low + 0.23), (places[1], top - 0.23), orange)
    words(axes, (places[1] - 0.07, (top + low) / 2), "in the next step", orange, ha="right")
    pictures.save(figure, path)


INSIDE = "fast links,\nfull precision:\nweights are\ngathered,\ngradients are\nreduce-\nscattered"


def fsdp_dcn(path: pathlib.Path) -> None:
    """Shards inside a slice over fast links; compressed shards of the gradient between slices."""
    figure, axes = canvas(
        "Between slices a device sends only the compressed shard of its gradient",
        "FSDP over the four devices of a slice, data parallel over two slices. Of a float32 "
        "gradient of G bytes a device sends G/4 over the slow link without compression, and about "
        "G/32 in four bits.",
        2.75,
    )
    rows = [1.95 - 0.5 * device for device in range(4)]
    for name, middle, side in (("A", 1.35, 1), ("B", 5.55, -1)):
        box(axes, (middle, 1.35), (2.5, 2.6), "", pictures.GRID, "#f7f8fa")
        words(axes, (middle, 2.45), f"slice {name}", weight="bold")
        devices, bus = middle + 0.6 * side, middle - 0.2 * side
        arrow(axes, (bus, rows[0]), (bus, rows[-1]), INK, arrowstyle="-")
        words(axes, (middle - 0.73 * side, sum(rows) / 4), INSIDE)
        for device, y in enumerate(rows):
            arrow(axes, (bus, y), (devices - 0.45 * side, y), INK, arrowstyle="-")
            text = f"device {device + 1}"
            box(axes, (devices, y), (0.9, 0.32), text, COLORS[device], COLORS[device])
    words(axes, (3.45, 2.45), "slow link", weight="bold")
    for device, y in enumerate(rows):
        color = COLORS[device]
        arrow(axes, (2.45, y), (4.45, y), color, arrowstyle="<|-|>", linestyle=(0, (4, 2)))
        words(axes, (3.45, y + 0.12), f"shard {device + 1}, compressed", color)
    pictures.save(figure, path)

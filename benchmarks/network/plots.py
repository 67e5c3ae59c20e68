"""Pictures of the results over the slow wire.

python benchmarks/network/plots.py out/network
"""

import pathlib
import statistics
import sys
from typing import Any

import tables
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from tables import reporting

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

OTHERS = ("torch DDP", "torch DDP, fp16_compress_hook", "torch DDP, powerSGD_hook rank 4")
MEAN = (
    "dense bfloat16",
    "dense float32",
    "two shots, 4-bit",
    "two shots, 1-bit",
    "top_k 1 %",
    "PowerSGD rank 4",
    *OTHERS,
)
TRAIN = (
    "dense",
    "two shots, 4-bit",
    "PowerSGD rank 4",
    *OTHERS,
    "torch DDP, powerSGD_hook rank 4, 10 steps dense",
)
SHORT = {
    "torch DDP, fp16_compress_hook": "torch DDP, fp16 hook",
    "torch DDP, powerSGD_hook rank 4": "torch DDP, PowerSGD hook",
    "torch DDP, powerSGD_hook rank 4, 10 steps dense": "the same, 10 dense steps first",
}
DENSE, RATES = ("dense bfloat16", "dense float32", "dense"), ("100mbit", "1gbit", "unshaped")
"""Dense means, the one to compare with first."""
KEY = {"dense": pictures.BASE, "jaxcomp": pictures.COLORS[0], "PyTorch": pictures.COLORS[1]}
SPACE = "\N{NO-BREAK SPACE}"
BOUND = SPACE.join(("bytes", "÷", "link", "rate"))
UNITS = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}


def link(rate: str) -> str:
    """A rate as `tc` writes it, in words."""
    if rate == "unshaped":
        return "No limit"
    return f"{rate[:-4]}{SPACE}{UNITS[rate[-4:]]}"


def median(method: dict[str, Any]) -> float:
    return statistics.median(method["seconds"])


def gains(cell: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    """How many times sooner than the dense mean each of some methods is, where both are known.

    A mean that was measured later is no base without a limit, where the machine is the bottleneck.
    """
    found = [cell["methods"][name] for name in DENSE if name in cell["methods"]]
    base = [median(m) for m in found if "environment" not in m or cell["rate"] != RATES[2]]
    kept = [name for name in names if name in cell["methods"] and base]
    return {name: base[0] / median(cell["methods"][name]) for name in kept}


def times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}"


def digits(number: float) -> str:
    """Three digits."""
    return f"{number:#.3g}".rstrip(".")


def chosen(cells: list[dict[str, Any]], rates: tuple[str, ...]) -> list[dict[str, Any]]:
    """The cells of the most processes at some rates, or of all rates if none is among these."""
    most = max(cell["processes"] for cell in cells)
    cells = [cell for cell in cells if cell["processes"] == most]
    return [cell for cell in cells if cell["rate"] in rates] or cells


def seconds(axes: Axes, cell: dict[str, Any], names: tuple[str, ...]) -> None:
    """A dot for the seconds of each method, and a line to it from the seconds of its bytes."""
    methods = {name: cell["methods"][name] for name in names if name in cell["methods"]}
    methods = methods or cell["methods"]
    found = {label(name, method): median(method) for name, method in methods.items()}
    faster, words, colors = gains(cell, tuple(methods)), {}, {}
    for (name, method), shown in zip(methods.items(), found, strict=True):
        words[shown] = f"{digits(found[shown])} s"
        if name in faster and name not in DENSE:
            words[shown] += f", {times(faster[name])} ×"
        own = pictures.BASE if name in DENSE else pictures.COLORS[0]
        colors[shown] = pictures.COLORS[1] if name.startswith("torch") else own
        least = tables.bound(cell, method)
        if least:
            y = len(methods) - 1 - list(methods).index(name)
            faint = {"color": pictures.FAINT, "linewidth": 0.8, "zorder": 1}
            axes.plot([least, found[shown]], [y, y], **faint)
            axes.plot([least], [y], "|", markersize=8, **faint)
    pictures.dots(axes, found, words, colors)
    axes.set_title(link(cell["rate"]))


def label(name: str, method: dict[str, Any]) -> str:
    return SHORT.get(name, name) + (" *" if "environment" in method else "")


def stacked(
    message: str, detail: str, cells: list[dict[str, Any]], names: tuple[str, ...], path: Any
) -> None:
    """A panel of seconds for each cell, below one another, on one axis."""
    rows = max(len(set(names) & set(cell["methods"])) or len(cell["methods"]) for cell in cells)
    figure, grid = pictures.page(
        message, detail, len(cells), 1, (0.175 * rows + 0.42) * len(cells) + 0.2, sharex=True
    )
    for axes, cell in zip(grid[:, 0], cells, strict=True):
        seconds(axes, cell, names)
    shown = {color for axes in grid[:, 0] for line in axes.lines for color in [line.get_color()]}
    kinds = [
        Line2D([], [], color=c, marker="o", ls="", label=k) for k, c in KEY.items() if c in shown
    ]
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.0}
    grid[0, 0].legend(handles=kinds, ncols=len(kinds), **place)
    points = [x for axes in grid[:, 0] for line in axes.lines for x in line.get_xdata()]
    low, high = min(points), max(points)
    for axes in grid[:, 0]:
        axes.set_xlim(low / 1.3, high * (high / low) ** 0.25)
        pictures.log_axis(axes, "x")
    grid[-1, 0].set_xlabel("seconds")
    pictures.save(figure, path)


def mean(book: dict[str, Any], path: pathlib.Path) -> None:
    """Seconds of a mean over links of several rates, by a few of the ways."""
    cells = chosen(book["cells"], RATES)
    own = tuple(name for name in MEAN if name not in (*DENSE, *OTHERS))
    parts = []
    for cell in cells:
        if found := gains(cell, own).values():
            than = "" if parts else f" as fast as {against(cell)}"
            parts.append(f"{times(min(found))} to {times(max(found))} times{than} {at(cell)}")
    message = f"Compressed means are {', '.join(parts)}" if parts else "Seconds of each mean"
    detail = (
        f"A mean of {cells[0].get('elements', 0) / 1e6:.0f} million float32 elements by "
        f"{workers(book, cells)}; × is over {against(cells[0])}{unlimited(cells)}. Each faint line "
        f"begins at {BOUND}: the rest of the time is work and waiting. {starred(cells, MEAN)}"
    )
    stacked(message, detail, cells, MEAN, path)


def train(book: dict[str, Any], path: pathlib.Path) -> None:
    """Seconds of training to a target over two links."""
    cells = chosen(book["cells"], RATES[:2])
    found = [(cell, gains(cell, TRAIN)) for cell in cells]
    best = max(found[0][1], key=lambda name: found[0][1][name], default="")
    parts = [f"{times(one[best])} times {at(cell)}" for cell, one in found if best in one]
    message = f"{best} reaches the target sooner than a dense mean: {' and '.join(parts)}"
    message = message if parts else "Seconds of each method to the target"
    detail = (
        f"A byte model to {cells[0]['target']:g} bits a byte by {workers(book, cells)}; × is over "
        f"dense. Each faint line begins at {BOUND}. {free(book)}{starred(cells, TRAIN)}"
    )
    stacked(message, detail, cells, TRAIN, path)


def at(cell: dict[str, Any]) -> str:
    return "without a limit" if cell["rate"] == "unshaped" else f"at {link(cell['rate'])}"


def workers(book: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    runs = statistics.mode(
        len(one["seconds"]) for cell in cells for one in cell["methods"].values()
    )
    cores = book["environment"].get("cores")
    return f"{cells[0]['processes']} processes on {cores} cores, medians of {runs}"


def free(book: dict[str, Any]) -> str:
    """The fastest training over a link without a limit."""
    cells = [cell for cell in chosen(book["cells"], RATES[2:]) if cell["rate"] == RATES[2]]
    if not cells:
        return ""
    name, method = min(cells[0]["methods"].items(), key=lambda one: median(one[1]))
    return f"Without a limit {SHORT.get(name, name)} is the first, in {median(method):.3g} s. "


def starred(cells: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    """What the stars of rows from other environments mean."""
    found = [cell["methods"][name] for cell in cells for name in names if name in cell["methods"]]
    return "* measured later, in other runs." if any(map(_elsewhere, found)) else ""


def _elsewhere(method: dict[str, Any]) -> bool:
    return "environment" in method


def against(cell: dict[str, Any]) -> str:
    """The dense mean that others of a cell are compared with."""
    names = [name for name in DENSE if name in cell["methods"]]
    late = [name for name in names if _elsewhere(cell["methods"][name])]
    return next(name for name in names if cell["rate"] != RATES[2] or name not in late)


def unlimited(cells: list[dict[str, Any]]) -> str:
    """The base without a limit, if it is another one."""
    other = [against(cell) for cell in cells if cell["rate"] == RATES[2]]
    return f", without a limit over {other[0]}" if other and other[0] != against(cells[0]) else ""


LOCAL = 6
"""Methods of the picture of local steps, at most."""
LOSSES: dict[str, tuple[int, str, int, int]] = {
    "SparseLoCo with Muon": (-1, "center", 0, -12),
    "streaming DiLoCo, 4-bit": (0, "right", -7, 0),
    "DiLoCo, 4-bit two shots": (0, "right", -7, 0),
}
"""Where a curve has its name: the number of a point, its side, and how far away, in points."""
ENDS: dict[str, tuple[str, int]] = {
    "streaming DiLoCo, 4-bit": ("right", 2),
    "streaming DiLoCo, 4-bit, beside the steps": ("right", -3),
}
"""The side of a name at the dot of an end, and how far up, in points."""


def local(book: dict[str, Any], path: pathlib.Path) -> None:
    """Loss and seconds against megabytes, of methods that one machine ran over one link."""
    cell = max(book["cells"], key=lambda cell: len(cell["methods"]))
    own = {name: one for name, one in cell["methods"].items() if "environment" not in one}
    own = dict(list(own.items())[:LOCAL])
    first, least = (min(own, key=lambda name: key(own[name])) for key in (median, megabytes))
    message = (
        f"With links of {link(cell['rate'])} {first} reaches the target first, in "
        f"{median(own[first]):.0f}{SPACE}s; {least} sends the least, "
        f"{megabytes(own[least]):.1f}{SPACE}MB"
    )
    others = len(cell["methods"]) - len(own)
    detail = (
        f"A byte model to {cell['target']:g} bits a byte by {workers(book, [cell])}. All of them "
        f"ran on one machine; {others} rows of slower machines are left out."
    )
    figure, grid = pictures.page(message, detail, 2, 1, 4.3, sharex=True)
    upper, lower = grid[:, 0]
    seen: list[Any] = []
    for (name, method), color in zip(own.items(), pictures.COLORS, strict=False):
        bits = [point[2] for point in method["curve"]]
        if bits not in seen:
            falling(upper, name, method, color)
        seen.append(bits)
        reached(lower, name, method, color)
    upper.axhline(cell["target"], color=pictures.FAINT, linewidth=0.8, linestyle=":")
    bottom, top = upper.get_ylim()
    upper.set(ylabel="bits a byte, held-out text", ylim=(bottom - 0.1 * (top - bottom), top))
    lower.set(ylabel="seconds to the target", xlabel="megabytes sent by each worker")
    lower.set_ylim(0.8 * median(own[first]), 1.2 * max(map(median, own.values())))
    upper.set_xlim(0.8 * upper.dataLim.x0, 3.6 * upper.dataLim.x1)
    pictures.log_axis(upper, "x")
    pictures.log_axis(lower, "y")
    pictures.save(figure, path)


def megabytes(method: dict[str, Any]) -> float:
    return method["curve"][-1][3] / 1e6


def falling(axes: Axes, name: str, method: dict[str, Any], color: str) -> None:
    """The loss of a training against the megabytes that a worker has sent."""
    points = [(point[3] / 1e6, point[2]) for point in method["curve"]]
    axes.plot(*zip(*points, strict=True), color=color)
    axes.plot(*points[-1], "o", color=color)
    place, side, right, up = LOSSES.get(name, (0, "left", 8, 2))
    _name(axes, name, points[place], color, side, (right, up))


def reached(axes: Axes, name: str, method: dict[str, Any], color: str) -> None:
    """A dot for the seconds and megabytes of a training; a hollow one if it missed the target."""
    end = megabytes(method), median(method)
    axes.plot(*end, "o", color=color, markerfacecolor=color if method["reached"] else "white")
    side, up = ENDS.get(name, ("left", 0))
    _name(axes, name, end, color, side, (-7 if side == "right" else 7, up))


def _name(axes: Axes, name: str, at: Any, color: str, side: Any, offset: Any) -> None:
    axes.annotate(
        name, at, offset, textcoords="offset points", ha=side, va="center", color=color,
        fontsize=pictures.SMALL,
    )  # fmt: skip


JOBS = {"mean": mean, "train": train, "local": local}


def draw(folder: pathlib.Path) -> None:
    """The pictures of a folder's results, beside them."""
    for job, picture in JOBS.items():
        path = folder / f"{job}.json"
        if path.exists():
            picture(reporting.read(path), path.with_suffix(".png"))


if __name__ == "__main__":
    draw(pathlib.Path(sys.argv[1]))

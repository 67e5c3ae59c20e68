"""The picture of docs/reproductions.md: a mark for each claim, by page of details."""

import pathlib
from collections import Counter
from typing import Any

import numpy as np
import reporting  # noqa: F401  It makes the examples importable.
from claims import page, registry
from claims.claim import FAILS, HOLDS, PART, UNDECIDED, WHYS, Judged
from matplotlib.lines import Line2D

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

COLORS = {
    HOLDS: pictures.COLORS[2],
    PART: pictures.COLORS[4],
    UNDECIDED: pictures.COLORS[5],
    FAILS: pictures.COLORS[1],
}
MARKS = {HOLDS: "o", PART: "s", UNDECIDED: "D", FAILS: "X"}
LEFT, RIGHT = 0.02, 50.0
"""Where smaller and larger margins are drawn."""
APART, EACH = 0.12, 0.05
"""Inches between families, and of a claim."""


def plot(path: pathlib.Path) -> None:
    """The margin of each claim, and the colour and the mark of its verdict."""
    found = {c.name: page.judged(c) for _, claims in page.measured() for c in claims}
    homes, families = registry.page_of(), dict[str, list[Judged]]()
    for name, one in found.items():
        families.setdefault(registry.PAGES[homes[name]][0], []).append(one)
    counts, whys = Counter(one.verdict for one in found.values()), page.reasons(found)
    below = "; ".join(f"{why}: {whys[word]}" for word, why in WHYS.items())
    heights = [APART + EACH * len(each) for each in families.values()]
    figure, ((axes,),) = pictures.page(
        f"{counts[HOLDS]} of {counts.total()} published claims hold here, and {counts[PART]} hold "
        "in part",
        "A mark is a claim: the number measured here over the number that the criterion asks for. "
        f"At the left edge: criteria without a number. Why the others do not hold: {below}.",
        height=0.9 + sum(heights),
    )
    middles = [height / 2 - sum(heights[: at + 1]) for at, height in enumerate(heights)]
    for middle, each in zip(middles, families.values(), strict=True):
        marks(axes, middle, [one for one in each if one.verdict in COLORS])
    for at in range(1, len(heights)):
        axes.axhline(-sum(heights[:at]), color=pictures.FAINT, linewidth=0.5, zorder=1)
    axes.axvline(1, color=pictures.INK, linewidth=1, zorder=1)
    axes.set(xscale="log", xlim=(LEFT / 2.6, RIGHT * 1.4), ylim=(-sum(heights), 0))
    axes.set_xticks([LEFT, 0.1, 1, 10, RIGHT], ["≤ 0.02", "0.1", "1", "10", "≥ 50"])
    axes.set_xticks([], minor=True)
    axes.set_yticks(middles, list(families))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("measured number / criterion (line: met exactly)")
    handles = [
        Line2D([], [], linestyle="", marker=MARKS[verdict], color=COLORS[verdict], label=verdict)
        for verdict in COLORS
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    pictures.save(figure, path)


def marks(axes: Any, middle: float, found: list[Judged]) -> None:
    """The claims of a page, below one another so that none hides another."""
    for at, one in enumerate(found):
        where = LEFT / 2 if one.margin is None else float(np.clip(one.margin, LEFT, RIGHT))
        mark: Any = {"color": COLORS[one.verdict], "marker": MARKS[one.verdict]}
        shift = EACH * ((len(found) - 1) / 2 - at)
        axes.plot(where, middle + shift, linestyle="", zorder=3, **mark)

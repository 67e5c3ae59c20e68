"""The picture of docs/reproductions.md: a dot for each claim, by family."""

import pathlib
import re
from collections import Counter
from typing import Any

import numpy as np
import reporting  # noqa: F401  It makes the examples importable.
from claims import page
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


def plot(path: pathlib.Path) -> None:
    """The margin of each claim, and the colour and the mark of its verdict."""
    found_ = {c.name: page.judged(c) for _, claims in page.measured() for c in claims}
    families = [
        (heading, [found_[claim.name] for claim in claims]) for heading, claims in page.measured()
    ]
    counts = Counter(one.verdict for one in found_.values())
    whys = page.reasons(found_)
    below = "; ".join(f"{why}: {whys[word]}" for word, why in WHYS.items())
    figure, ((axes,),) = pictures.page(
        f"{counts[HOLDS]} of {counts.total()} published claims hold here, and {counts[PART]} hold "
        "in part",
        "A mark is a claim: the number measured here over the number that the criterion asks for. "
        f"At the left edge: criteria without a number. Why the others do not hold: {below}.",
        height=0.9 + 0.2 * len(families),
    )
    for row, (_, found) in enumerate(families):
        marks(axes, -row, [one for one in found if one.verdict in COLORS])
    axes.axvline(1, color=pictures.INK, linewidth=1, zorder=1)
    axes.set(xscale="log", xlim=(LEFT / 2.6, RIGHT * 1.4), ylim=(0.5 - len(families), 0.5))
    axes.set_xticks([LEFT, 0.1, 1, 10, RIGHT], ["≤ 0.02", "0.1", "1", "10", "≥ 50"])
    axes.set_xticks([], minor=True)
    axes.set_yticks([-row for row in range(len(families))], [short(name) for name, _ in families])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("measured number / criterion (line: met exactly)")
    handles = [
        Line2D([], [], linestyle="", marker=MARKS[verdict], color=COLORS[verdict], label=verdict)
        for verdict in COLORS
    ]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    pictures.save(figure, path)


def marks(axes: Any, row: float, found: list[Judged]) -> None:
    """The claims of a family, above one another so that none hides another."""
    shifts = np.linspace(0.22, -0.22, len(found)) if len(found) > 1 else [0.0]
    for one, shift in zip(found, shifts, strict=True):
        where = LEFT / 2 if one.margin is None else float(np.clip(one.margin, LEFT, RIGHT))
        mark: Any = {"color": COLORS[one.verdict], "marker": MARKS[one.verdict]}
        axes.plot(where, row + shift, linestyle="", zorder=3, **mark)


def short(heading: str) -> str:
    """The heading of a family up to its first comma or colon."""
    return re.split("[,:]", heading)[0]

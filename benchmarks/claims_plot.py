"""The picture of docs/reproductions.md: a dot for each claim, by family."""

import pathlib
import textwrap
from collections import Counter

import numpy as np
import reporting
from claims import page
from claims.claim import FAILS, HOLDS, PART
from matplotlib.lines import Line2D

COLORS = {HOLDS: "#1b7f5c", PART: "#d98e04", FAILS: "#b3261e"}
MARKS = {HOLDS: "o", PART: "s", FAILS: "X"}
LEFT, RIGHT = 0.02, 50.0
"""Where smaller and larger margins are drawn."""


def plot(path: pathlib.Path) -> None:
    """The margin of each claim, and the colour and the mark of its verdict."""
    families = page.measured()
    figure, ((axes,),) = reporting.panels(1, 1, (9, 1.2 + 0.34 * len(families)))
    for row, (_, claims) in enumerate(families):
        found = [page.judged(claim) for claim in claims]
        shown = [one for one in found if one.verdict in COLORS]
        shifts = np.linspace(-0.25, 0.25, len(shown)) if len(shown) > 1 else [0.0]
        for one, shift in zip(shown, shifts, strict=True):
            where = LEFT / 2 if one.margin is None else float(np.clip(one.margin, LEFT, RIGHT))
            axes.scatter(
                where,
                shift - row,
                s=34,
                color=COLORS[one.verdict],
                marker=MARKS[one.verdict],
                zorder=3,
            )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(LEFT / 2.6, RIGHT * 1.3)
    axes.set_yticks(
        [-row for row in range(len(families))],
        [textwrap.shorten(heading, 58, placeholder=" …") for heading, _ in families],
        fontsize=8,
    )
    axes.set_ylim(-len(families) + 0.4, 0.6)
    axes.set_xlabel("measured number over criterion; left edge: criteria without a number")
    axes.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
    counts = Counter(page.judged(claim).verdict for _, claims in families for claim in claims)
    marks = [
        Line2D([], [], linestyle="", marker=MARKS[verdict], color=COLORS[verdict], label=verdict)
        for verdict in COLORS
    ]
    axes.legend(handles=marks, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    figure.suptitle(
        f"{counts[HOLDS]} of {counts.total()} published claims hold here, {counts[PART]} in part",
        x=0.02,
        ha="left",
        weight="bold",
    )
    reporting.draw(figure, path)

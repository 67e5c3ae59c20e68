"""The tables and the picture of `weights.py`, and the entropy of its patches."""

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pictures
from rich import box
from rich.console import Console
from rich.table import Table

READER_COLORS = (pictures.COLORS[0], pictures.COLORS[1])
PATCH, BOUND = pictures.COLORS[2], pictures.COLORS[3]


def sizes(entry: Any) -> dict[str, Any]:
    """The bytes of a version of `Reader.versions`: of its patches by their base, and snapshot."""
    patches = {entry.id.number - base.number: size for base, size in entry.ways if base}
    whole = next((size for base, size in entry.ways if base is None), None)
    return {
        "version": entry.id.number,
        "step": entry.step,
        "time": entry.time,
        "patch": patches.pop(1, None),
        "long_patches": patches,
        "snapshot": whole,
    }


def bound(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, float]:
    """The entropy of the steps, zero for unchanged weights, given the old weight's exponent."""
    counts: dict[tuple[int, int], int] = {}
    for name, old in before.items():
        bits = old.view(np.uint16)
        pairs = np.stack([bits >> 7 & 0xFF, _order(after[name].view(np.uint16)) - _order(bits)])
        found, numbers = np.unique(pairs.reshape(2, -1), axis=1, return_counts=True)
        for exponent, step, number in zip(*found.tolist(), numbers.tolist(), strict=True):
            counts[exponent, step] = counts.get((exponent, step), 0) + number
    totals: dict[int, int] = {}
    for (exponent, _), number in counts.items():
        totals[exponent] = totals.get(exponent, 0) + number
    bits = sum(n * np.log2(totals[exponent] / n) for (exponent, _), n in counts.items())
    changed = sum(number for (_, step), number in counts.items() if step)
    return {"bytes": float(bits / 8), "changed": changed / sum(totals.values())}


def _order(bits: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 as integers in the order of the numbers."""
    size = (bits & 0x7FFF).astype(np.int32)
    return np.where(bits >> 15, -size, size)


def patches(found: dict[str, Any]) -> list[tuple[int, int]]:
    """The steps and bytes of patches from the version before."""
    return [(one["step"], one["patch"]) for one in found["versions"] if one["patch"]]


def print_tables(console: Console, found: dict[str, Any]) -> None:
    """Bytes of a version, and what the readers got."""
    dense, link = 2 * found["parameters"], found["link"]
    parts = [size for _, size in patches(found)]
    whole = [one["snapshot"] for one in found["versions"] if one["snapshot"]]
    ideal = [one["bytes"] for one in found["bounds"].values()]
    table = _table("a version", "bytes", "of dense", "seconds on the link")
    for name, values in (
        ("dense bfloat16", [dense]),
        ("snapshot", whole),
        ("patch, median", parts),
        ("patch, largest", [max(parts)]),
        ("entropy bound, median", ideal),
    ):
        size = statistics.median(values)
        table.add_row(name, f"{size:,.0f}", f"1/{dense / size:.1f}", f"{size / link:.3f}")
    console.print(table)
    table = _table("reader", "versions", "bytes", "age, median", "age, largest", "first", "last")
    for number, rows in enumerate(found["readers"]):
        ages = [row["age"] for row in rows]
        first, last = quarters([row["reward"] for row in rows])
        table.add_row(
            f"{number}{', killed once' if number == 1 else ''}",
            str(sum(row["checked"] for row in rows)),
            f"{fetched(rows):,}",
            *(f"{age:.2f} s" for age in (statistics.median(ages), max(ages))),
            *(f"{reward:.3f}" for reward in (first, last)),
        )
    first, last = quarters([row["reward"] for row in found["steps"]])
    table.add_row("trainer", str(len(found["versions"])), *[""] * 3, f"{first:.3f}", f"{last:.3f}")
    console.print(table)
    changed = statistics.median(one["changed"] for one in found["bounds"].values())
    seconds = statistics.median(row["seconds"] for row in found["steps"])
    console.print("First and last: the mean reward of the first and last quarter.")
    console.print(
        f"A version changes {100 * changed:.1f} % of the weights. A step: {seconds:.2f} s"
    )
    console.print(f"bit for bit: {checked(found)} versions checked")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def checked(found: dict[str, Any]) -> int:
    """Versions that readers compared with the trainer's, each with all its leaves."""
    return sum(row["checked"] for rows in found["readers"] for row in rows)


def fetched(rows: Sequence[Any]) -> int:
    """Bytes of all processes of a reader: each counts from zero."""
    ends = [*(at - 1 for at in _gaps(rows)), len(rows) - 1]
    return sum(rows[at]["bytes"] for at in ends)


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and the last quarter."""
    quarter = max(len(values) // 4, 1)
    return statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])


def smooth(times: Sequence[float], values: Sequence[float], seconds: float) -> list[float]:
    """Means over a window around each time."""
    at, found = np.asarray(times), np.asarray(values)
    return [float(found[np.abs(at - time) <= seconds / 2].mean()) for time in at]


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """Bytes of versions, age of the readers' weights, and reward."""
    dense, link = 2 * found["parameters"], found["link"]
    size = statistics.median(size for _, size in patches(found))
    ideal = statistics.median(one["bytes"] for one in found["bounds"].values())
    figure, ((by_bytes,), (by_age,), (by_reward,)) = pictures.page(
        f"A patch has 1/{dense / size:.0f} of the bytes of the weights, and readers get every bit",
        f"{found['parameters'] / 1e6:.1f} million weights, REINFORCE by Adam at "
        f"{found['rate']:g}, a version after each step; two readers over HTTP, each behind a link "
        f"of {8e-6 * link:g} Mbit/s. The entropy of the changes given the old exponents is 1/"
        f"{dense / ideal:.0f}. {checked(found)} versions were checked bit for bit. Dashed: the "
        "seconds that all weights would take on the link. All processes share two cores.",
        rows=3,
        height=6.6,
    )
    _bytes(by_bytes, found)
    begin = found["begun"]
    end = found["steps"][-1]["time"] - begin
    for axes in (by_age, by_reward):
        axes.set(xlim=(0, end), xlabel="seconds")
    _ages(by_age, found, begin, end)
    _rewards(by_reward, found, begin, end)
    figure.draw_without_rendering()  # The layout fixes the panels' heights.
    for axes in (by_bytes, by_age, by_reward):
        pictures.name_ends(axes, [x for x in axes.get_lines() if x.get_label()[0] != "_"])
    events = [(event["time"] - begin, event["text"]) for event in found["events"]]
    low = by_age.get_ylim()[0]
    pictures.flags(
        by_age,
        [pictures.Mark(x, low, f"reader 1 {text}", READER_COLORS[1]) for x, text in events],
    )
    pictures.save(figure, path)


def _bytes(axes: Any, found: dict[str, Any]) -> None:
    dense, parts = 2 * found["parameters"], patches(found)
    whole = [(one["step"], one["snapshot"]) for one in found["versions"] if one["snapshot"]]
    steps = {one["version"]: one["step"] for one in found["versions"]}
    ideal = [(steps[int(version)], one["bytes"]) for version, one in found["bounds"].items()]
    last = found["steps"][-1]["step"]
    axes.plot([0, last], [dense, dense], color=pictures.BASE, label="all weights")
    axes.plot(*zip(*whole, strict=True), "s", color=pictures.COLORS[4], label="snapshot")
    axes.plot(*zip(*parts, strict=True), color=PATCH, label="patch")
    axes.plot(*zip(*ideal, strict=True), "x", color=BOUND, label="entropy")
    axes.set(xlim=(-1, last), xlabel="step", ylabel="bytes a version")
    smallest = min(size for _, size in [*parts, *ideal])
    axes.set_ylim(smallest / 2, 2 * dense)
    pictures.log_axis(axes, "y")


def _ages(axes: Any, found: dict[str, Any], begin: float, end: float) -> None:
    wait = 2 * found["parameters"] / found["link"]
    axes.plot([0, end], [wait, wait], "--", color=pictures.BASE, label="all weights")
    for number, rows in enumerate(found["readers"]):
        xs = [row["time"] - begin for row in rows]
        ys = [row["age"] for row in rows]
        for at in _gaps(rows)[::-1]:
            xs, ys = [*xs[:at], xs[at], *xs[at:]], [*ys[:at], np.nan, *ys[at:]]
        axes.plot(xs, ys, color=READER_COLORS[number], linewidth=1.1, label=f"reader {number}")
    top = max(row["age"] for rows in found["readers"] for row in rows if row["time"] < begin + end)
    axes.set(ylim=(0, 1.1 * max(top, wait)), ylabel="age of weights, s")


def _gaps(rows: Sequence[Any]) -> list[int]:
    """Where a new process of a reader begins."""
    return [at for at in range(1, len(rows)) if rows[at]["bytes"] < rows[at - 1]["bytes"]]


def _rewards(axes: Any, found: dict[str, Any], begin: float, end: float) -> None:
    runs = [("trainer", pictures.INK, found["steps"])]
    runs += [
        (f"reader {number}", READER_COLORS[number], rows)
        for number, rows in enumerate(found["readers"])
    ]
    for name, color, rows in runs:
        inside = [row for row in rows if 0 <= row["time"] - begin <= end]
        at = [row["time"] - begin for row in inside]
        means = smooth(at, [row["reward"] for row in inside], end / 8)
        for gap in _gaps(inside)[::-1] if name != "trainer" else []:
            at, means = [*at[:gap], at[gap], *at[gap:]], [*means[:gap], np.nan, *means[gap:]]
        axes.plot(at, means, color=color, label=name)
    axes.set(ylabel=f"reward, means of {end / 8:.0f} s")

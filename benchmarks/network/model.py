"""Holds the link model against what was measured, and looks beyond it.

    python benchmarks/network/model.py out/network

Of each group of processes three things are known beside the means: how long an all-gather and a sum
of a few bytes take, how fast large ones are (an all-gather of 4 MiB, a sum of 8), and how long each
codec takes when all workers encode or decode at the same time. From these and from the bytes of the
program, the model of `jaxcomp.theory.cost` says what every mean should take, and which way to
choose; both are compared with the clock. `beyond.py` carries it on to more workers.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
from typing import Any

import mean
import tables
from rich.console import Console

import jaxcomp
from jaxcomp.planning import planner, timing
from jaxcomp.theory import cost, plan as plan_, units

WITHIN = 0.2
COLUMNS = ("rate", "processes", "method", "measured", "predicted", "off by", "links", "work")


def network_of(
    cell: dict[str, Any], kind: str = "all_gather", *, nominal: bool = False
) -> cost.Network:
    """What the micro-benchmarks of the wire say of a link, by all-gathers or by all-reduces.

    With `nominal`, its speed is what the shaper was told instead, if there was one.
    """
    n, wire = cell["processes"], cell["wire"]
    ideal = cost.all_gather if kind == "all_gather" else cost.ring
    small = statistics.median(wire[f"{kind}, small"]["seconds"])
    large = wire[f"{kind}, large"]
    moved = ideal(large["size"], n)
    seconds = statistics.median(large["seconds"]) - small
    told = tables.bytes_a_second(cell["rate"]) if nominal else None
    return cost.Network(told or moved.bytes / seconds, small / moved.rounds)


def clock_of(cells: list[dict[str, Any]], cell: dict[str, Any]) -> planner.Clock:
    """What the third one says of codecs, for as many processes over any wire."""
    (work,) = (
        other["work"]
        for other in cells
        if "work" in other and other["processes"] == cell["processes"]
    )

    def clock(way: Any) -> timing.Measured:
        return timing.Measured(**work[repr(way)])

    return clock


def price_of(
    cells: list[dict[str, Any]], cell: dict[str, Any], name: str, *, nominal: bool = False
) -> cost.Price:
    """What a mean asks of a worker, in bytes and messages of an all-gather.

    Bytes are those of the program that was run.
    """
    n, like = cell["processes"], mean.like(cell["elements"])
    reducer = mean.picked(mean.METHODS[name], like, n)
    price, _ = planner.price(reducer, like, (n,), clock_of(cells, cell))
    moved = cell["methods"][name]["collective_bytes"]
    sums = moved.get("all-reduce", 0)
    gathered = sum(moved.values()) - sums
    # A sum is timed as sums are: between two, gloo's all-gather waits where its sum does not.
    known, own = (network_of(cell, kind, nominal=nominal) for kind in ("all_gather", "psum"))
    bytes_ = gathered + sums * known.bandwidth / own.bandwidth
    rounds = price.rounds * (own.latency / known.latency if sums > gathered else 1)
    return dataclasses.replace(price, bytes=bytes_, rounds=rounds)


def without(cell: dict[str, Any]) -> float:
    """Seconds of a step that takes no mean."""
    return statistics.median(cell["step"]["seconds"])


def compare(
    cells: list[dict[str, Any]], *, nominal: bool = False
) -> tuple[list[tuple[str, ...]], list[float]]:
    """A row for each mean, and by what fraction each prediction of a shaped one is off."""
    rows, errors = [], []
    for cell in cells:
        for name, found in cell["methods"].items():
            if name not in mean.METHODS:
                continue
            measured = statistics.median(found["seconds"])
            price = price_of(cells, cell, name, nominal=nominal)
            work = price.work + without(cell)
            network = network_of(cell, nominal=nominal)
            predicted = price.seconds(network) + without(cell)
            links = predicted - work
            error = predicted / measured - 1
            if tables.bytes_a_second(cell["rate"]) is not None:
                errors.append(abs(error))
            times = (f"{t:.3f}" for t in (measured, predicted))
            parts = (f"{t:.3f}" for t in (links, work))
            where = (cell["rate"], str(cell["processes"]), name)
            rows.append((*where, *times, f"{100 * error:+.0f} %", *parts))
    return rows, errors


def advise(cells: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What the plan takes for each group, and how that compares with the best that was measured."""
    rows = []
    for cell in cells:
        names = [name for name in cell["methods"] if name in mean.METHODS]
        ways = [
            plan_.Way(
                name,
                price_of(cells, cell, name),
                dense=isinstance(mean.METHODS[name], jaxcomp.Dense),
            )
            for name in names
        ]
        planned = plan_.forecast(ways, network_of(cell), compute=without(cell))
        times = {name: statistics.median(cell["methods"][name]["seconds"]) for name in names}
        best = min(times, key=times.__getitem__)
        taken = planned.best.way.name
        rows.append(
            (
                cell["rate"],
                str(cell["processes"]),
                taken,
                f"{times[taken]:.3f}",
                best,
                f"{times[best]:.3f}",
                f"{times[taken] / times[best]:.2f}",
            )
        )
    return rows


def _within(errors: list[float]) -> str:
    good, middle = sum(error <= WITHIN for error in errors), statistics.median(errors or [0.0])
    return (
        f"{good} of {len(errors)} means over shaped links are predicted within "
        f"{100 * WITHIN:.0f} %, and the median is off by {100 * middle:.0f} %"
    )


def write(folder: pathlib.Path) -> None:
    book = json.loads((folder / "mean.json").read_text())
    console = Console(width=max(140, Console().width))
    rows, errors = compare(book["cells"])
    _, others = compare(book["cells"], nominal=True)
    said = (
        f"{_within(errors)}. With the rate that the shaper was told, in place of the speed of each "
        f"link as measured, {_within(others)}."
    )
    links = [
        (
            cell["rate"],
            str(cell["processes"]),
            units.speed(network_of(cell).bandwidth),
            units.duration(network_of(cell).latency),
            units.duration(without(cell)),
        )
        for cell in book["cells"]
    ]
    advice = ("rate", "processes", "the plan takes", "measured", "best", "measured", "of the best")
    columns = ("rate", "processes", "link as measured", "a message", "a step without a mean")
    parts = [
        tables.show("Links, by micro-benchmarks", columns, links, console),
        tables.show("The model and the clock, seconds", COLUMNS, rows, console),
        said,
        tables.show("What the plan would take", advice, advise(book["cells"]), console),
    ]
    console.print(said)
    (folder / "model.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))

"""Compares the link model with the measured means.

    python benchmarks/network/model.py out/network

Of each group of processes three things are known beside the means: how long an all-gather and a sum
of a few bytes take, how fast large ones are (an all-gather of 4 MiB, a sum of 8), and how long each
codec takes when all workers encode or decode at the same time. From these and from the bytes of the
program, the model of `jaxcomp.theory.cost` says what every mean should take, and which way to
choose; both are compared with the clock. `beyond.py` carries it on to more workers.
"""

import dataclasses
import pathlib
import statistics
import sys
from typing import Any

import mean
import namespaces
from tables import Table, reporting

from jaxcomp.planning import kept, planner, timing
from jaxcomp.theory import comparison, cost, local_rounds, units
from jaxcomp.theory.candidates import Way

WITHIN = 0.2
EXCHANGED = {"dense": "dense float32", "4-bit two shots": "two shots, 4-bit"}
"""The mean of `mean.py` that an exchange of `overlapped.py` takes."""
WHERE = "rate {rate} | processes {processes} | "
LINKS = WHERE + "link as measured {link} | a message {message} | a step without a mean {step}"
COLUMNS = WHERE + (
    "method {method} | measured {measured:.3f} | predicted {predicted:.3f} | "
    "off by {off:+.0f} % | links {links:.3f} | work {work:.3f}"
)
ADVICE = WHERE + (
    "the plan takes {taken} | measured {took:.3f} | best {best} | measured {least:.3f} | "
    "of the best {ratio:.2f}"
)
EXCHANGES = WHERE + (
    "exchange {exchange} | steps of a round {every} | delay {delay} | "
    "an exchange, forecast, s {forecast:.2f} | measured {measured:.2f} | "
    "a round, forecast, s {round_forecast:.2f} | measured {round:.2f} | off by {off:+.0f} %"
)


def network_of(
    cell: dict[str, Any], kind: str = "all_gather", *, nominal: bool = False
) -> cost.Network:
    """The speed and latency of a link, from micro-benchmarks of all-gathers or all-reduces.

    With `nominal`, its speed is what the shaper was told instead, if there was one.
    """
    n, wire = cell["processes"], cell["wire"]
    ideal = cost.all_gather if kind == "all_gather" else cost.ring
    small = statistics.median(wire[f"{kind}, small"]["seconds"])
    large = wire[f"{kind}, large"]
    moved = ideal(large["size"], n)
    seconds = statistics.median(large["seconds"]) - small
    told = namespaces.bytes_a_second(cell["rate"]) if nominal else None
    return cost.Network(told or moved.bytes / seconds, small / moved.rounds)


def _name(way: str) -> str:
    """The name of a reducer in results, of which some were measured before it had a delay."""
    return way.replace(", delay=None", "")


def clock_of(cells: list[dict[str, Any]], cell: dict[str, Any]) -> kept.Clock:
    """Times of codecs with the same number of processes, over any network."""
    (work,) = (
        other["work"]
        for other in cells
        if "work" in other and other["processes"] == cell["processes"]
    )

    times = {_name(way): measured for way, measured in work.items()}

    def clock(way: Any) -> timing.Measured:
        return timing.Measured(**times[_name(repr(way))])

    return clock


def price_of(
    cells: list[dict[str, Any]], cell: dict[str, Any], name: str, *, nominal: bool = False
) -> cost.Price:
    """The price of a mean, in bytes and messages of an all-gather.

    The bytes are those of the compiled program.
    """
    n, like = cell["processes"], mean.like(cell["elements"])
    reducer = mean.picked(mean.METHODS[name], like, n)
    price, _ = planner.price(reducer, like, (n,), clock_of(cells, cell))
    moved = cell["methods"][name]["collective_bytes"]
    sums = moved.get("all-reduce", 0)
    gathered = sum(moved.values()) - sums
    # A sum has the speed of sums: between two processes gloo's all-gather waits, its sum does not.
    known, own = (network_of(cell, kind, nominal=nominal) for kind in ("all_gather", "psum"))
    bytes_ = gathered + sums * known.bandwidth / own.bandwidth
    rounds = price.rounds * (own.latency / known.latency if sums > gathered else 1)
    return dataclasses.replace(price, bytes=bytes_, rounds=rounds)


def without(cell: dict[str, Any]) -> float:
    """Seconds of a step without a mean."""
    return statistics.median(cell["step"]["seconds"])


def compare(
    cells: list[dict[str, Any]], *, nominal: bool = False
) -> tuple[list[dict[str, Any]], list[float]]:
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
            if namespaces.bytes_a_second(cell["rate"]) is not None:
                errors.append(abs(error))
            times = {"measured": measured, "predicted": predicted, "links": links, "work": work}
            rows.append({**place(cell), "method": name, **times, "off": 100 * error})
    return rows, errors


def place(cell: dict[str, Any]) -> dict[str, Any]:
    return {"rate": cell["rate"], "processes": cell["processes"]}


def advise(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choice of the plan for each group, beside the best measured one."""
    rows = []
    for cell in cells:
        times = {
            name: statistics.median(found["seconds"])
            for name, found in cell["methods"].items()
            if name in mean.METHODS
        }
        ways = [
            Way(name, price_of(cells, cell, name), dense=name.startswith("dense")) for name in times
        ]
        conditions = comparison.Conditions(compute=without(cell))
        planned = comparison.compare(ways, network_of(cell), conditions)
        best, taken = min(times, key=times.__getitem__), planned.best.way.name
        row = {**place(cell), "taken": taken, "took": times[taken], "best": best}
        rows.append({**row, "least": times[best], "ratio": times[taken] / times[best]})
    return rows


def exchanges(
    cells: list[dict[str, Any]], overlapped: list[dict[str, Any]], parameters: int
) -> list[dict[str, Any]]:
    """A row for each measured round: its exchange and its length by the link model alone.

    Bytes and work of the mean of `mean.py` are scaled to the number of parameters. Only the seconds
    of a step are measured, as `jaxcomp plan --step` is given them.
    """
    rows = []
    for group in overlapped:
        (cell,) = (cell for cell in cells if place(cell) == place(group))
        for found in group["methods"].values():
            price = price_of(cells, cell, EXCHANGED[found["codec"]])
            size = parameters / cell["elements"]
            price = dataclasses.replace(price, bytes=price.bytes * size, work=price.work * size)
            forecast = price.seconds(network_of(cell))
            step, every, delay = found["step"], found["every"], found["delay"]
            predicted = local_rounds.seconds(every, step, forecast, delay)
            row = {"forecast": forecast, "measured": found["exchange"], "round": found["round"]}
            off = 100 * (predicted / found["round"] - 1)
            row |= {"round_forecast": predicted, "off": off, "exchange": found["codec"]}
            rows.append({**place(cell), **row, "every": every, "delay": delay})
    return rows


def _within(errors: list[float]) -> str:
    good, middle = sum(error <= WITHIN for error in errors), statistics.median(errors or [0.0])
    return (
        f"{good} of {len(errors)} means over shaped links are predicted within "
        f"{100 * WITHIN:.0f} %, and the median is off by {100 * middle:.0f} %"
    )


def write(folder: pathlib.Path, *, quiet: bool = False) -> None:
    cells = reporting.read(folder / "mean.json")["cells"]
    rows, errors = compare(cells)
    _, others = compare(cells, nominal=True)
    said = (
        f"{_within(errors)}. With the rate that the shaper was told, in place of the speed of each "
        f"link as measured, {_within(others)}."
    )
    links = [
        {
            **place(cell),
            "link": units.speed(network_of(cell).bandwidth),
            "message": units.duration(network_of(cell).latency),
            "step": units.duration(without(cell)),
        }
        for cell in cells
    ]
    parts = [
        Table("Links, by micro-benchmarks", LINKS, links),
        Table("The model and the clock, seconds", COLUMNS, rows),
        said,
        Table("What the plan would take", ADVICE, advise(cells)),
    ]
    if (folder / "overlap.json").exists():
        beside = reporting.read(folder / "overlap.json")["cells"]
        trained = reporting.read(folder / "local.json")["cells"][0]["methods"]["SparseLoCo"]
        forecasts = exchanges(cells, beside, trained["parameters"])
        parts.append(Table("Rounds of local steps", EXCHANGES, forecasts))
    reporting.sections(parts, folder / "model.md", quiet=quiet)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))

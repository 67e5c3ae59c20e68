"""The tables of what was measured over the slow wire, printed and as Markdown.

python benchmarks/network/tables.py out/network
"""

import json
import pathlib
import re
import statistics
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

BASE = "dense float32"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MEAN = (
    *("method", "seconds", "from", "to", "link bytes, MB", "sent, MB"),
    *("time ÷ (bytes ÷ rate)", "times faster than dense"),
)
TRAIN = (
    *("method", "bits a byte", "steps", "runs", "seconds", "from", "to", "sent, MB"),
    "times faster than dense",
)

Rows = list[tuple[str, ...]]


def bytes_a_second(rate: str) -> float | None:
    """Of a rate as `tc` writes it; None without one."""
    if rate == "unshaped":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found:
        raise ValueError(f"must be like 100mbit or 1gbit, or unshaped, got {rate!r}")
    return float(found[1]) * UNITS[found[2]] / 8


def bound(cell: dict[str, Any], method: dict[str, Any]) -> float | None:
    """Seconds that the bytes of a mean take on the link; of peers, the bytes that were counted."""
    speed = bytes_a_second(cell["rate"])
    return None if speed is None else method.get("link_bytes", method["sent"]) / speed


def mean_rows(cell: dict[str, Any]) -> Rows:
    base = cell["methods"].get(BASE)
    rows = []
    for name, method in cell["methods"].items():
        seconds, least = statistics.median(method["seconds"]), bound(cell, method)
        known = "link_bytes" in method
        rows.append(
            (
                name,
                *(f"{t:.3f}" for t in (seconds, min(method["seconds"]), max(method["seconds"]))),
                f"{method['link_bytes'] / 1e6:.2f}" if known else "–",
                f"{method['sent'] / 1e6:.2f}",
                f"{seconds / least:.2f}" if least else "–",
                f"{statistics.median(base['seconds']) / seconds:.2f}" if base else "–",
            )
        )
    return rows


def train_rows(cell: dict[str, Any]) -> Rows:
    base = cell["methods"].get("dense")
    rows = []
    for name, method in cell["methods"].items():
        steps, _, bits, sent = method["curve"][-1]
        runs = method["seconds"]
        seconds = statistics.median(runs)
        both = base and base["reached"] and method["reached"]
        ratio = f"{statistics.median(base['seconds']) / seconds:.2f}" if both else "not reached"
        times = (f"{t:.1f}" for t in (seconds, min(runs), max(runs)))
        row = (name, f"{bits:.3f}", f"{steps}", f"{len(runs)}", *times, f"{sent / 1e6:.0f}", ratio)
        rows.append(row)
    return rows


def title(cell: dict[str, Any]) -> str:
    what = "One mean"
    if "target" in cell:
        what = f"Training to {cell['target']:g} bits a byte, at most {cell['steps']} steps"
    else:
        what += f" of {cell['elements']:,} floats" if "elements" in cell else ""
    return f"{what}, {cell['processes']} processes, {cell['rate']}"


def settings(environment: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def elsewhere(cells: list[dict[str, Any]]) -> list[str]:
    """What was measured in another environment than the rest, and how that one differs."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for name, method in cell["methods"].items():
            if "environment" in method:
                where = f"{name} ({cell['rate']}, {cell['processes']} processes)"
                found.setdefault(settings(method["environment"]), []).append(where)
    return [f"With {other}: {'; '.join(names)}." for other, names in found.items()]


def show(heading: str, columns: tuple[str, ...], rows: Rows, console: Console) -> str:
    """Prints a table, and returns it as Markdown."""
    table = Table(title=heading)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [f"## {heading}", "", "| " + " | ".join(columns) + " |"]
    lines += ["|---" + "|---:" * (len(columns) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write(folder: pathlib.Path) -> None:
    console = Console(width=max(140, Console().width))
    for name, columns, rows_of in (("mean", MEAN, mean_rows), ("train", TRAIN, train_rows)):
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        book = json.loads(path.read_text())
        parts = [f"{settings(book['environment'])}.", *elsewhere(book["cells"])]
        parts += [show(title(cell), columns, rows_of(cell), console) for cell in book["cells"]]
        path.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
        console.print(f"written to {path.with_suffix('.md')}, from {path}")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))

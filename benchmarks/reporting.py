"""Options, the environment, tables and JSON files of all benchmarks."""

import argparse
import datetime
import json
import os
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table as Printed

import jaxcomp

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
sys.path.append(str(HERE.parent / "examples"))  # The benchmarks use their models and data.


def options(doc: str | None, out: str | pathlib.Path, **given: Any) -> argparse.Namespace:
    """Reads the command line of a program.

    Args:
        doc: the program's docstring, which begins with its description.
        out: the default folder of the results.
        **given: an option each, as (default, help). A list takes several values. A dictionary
            takes some of its keys, and all by default.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, (default, text) in {**given, "out": (pathlib.Path(out), "folder")}.items():
        flag, several = f"--{name.replace('_', '-')}", isinstance(default, list | tuple | Mapping)
        values = list(default) if several else [default]
        kind: Any = {"type": type(values[0]), "default": values if several else default}
        if isinstance(default, bool):
            kind = {"action": "store_true"}
        elif isinstance(default, Mapping):
            kind |= {"choices": default, "metavar": "NAME"}
        if several:
            kind["nargs"] = "+"
        parser.add_argument(flag, help=text, **kind)
    found = parser.parse_args()
    for name, (default, _) in given.items():
        value = getattr(found, name)
        numbers = [x for x in np.ravel(value).tolist() if type(x) in (int, float)]
        if any(x < 0 or (x == 0 and default != 0) for x in numbers):
            parser.error(f"argument --{name}: must be positive, got {value}")
    return found


def environment() -> dict[str, Any]:
    """The environment of a result; `malloc` if JAX's buffers are in huge pages, as numpy's are."""
    device = jax.devices()[0]
    tuned = [part for part in os.environ.get("GLIBC_TUNABLES", "").split(":") if "malloc" in part]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "jaxcomp": jaxcomp.__version__,
        **({"malloc": ", ".join(tuned)} if tuned else {}),
    }


def now() -> str:
    """The time in UTC, as in `Claim.fixed`."""
    return datetime.datetime.now(datetime.UTC).replace(tzinfo=None).isoformat(timespec="seconds")


def line(environment: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


class Table(NamedTuple):
    """A table of records; a cell is empty where its record lacks a value.

    Attributes:
        title: above it.
        columns: headings with the formats of their cells, as in `"codec {name} | bits {bits:.2f}"`.
        records: a dictionary for each row.
    """

    title: str
    columns: str
    records: Sequence[Mapping[str, Any]]

    def rows(self) -> list[list[str]]:
        """The headings, and the cells of each record."""
        columns = [part.strip().partition("{") for part in self.columns.split("|")]
        forms = ["".join(part[1:]) for part in columns]
        cells = [[cell(form, record) for form in forms] for record in self.records]
        return [[heading.strip() for heading, _, _ in columns], *cells]

    def markdown(self) -> str:
        first, *others = (f"| {' | '.join(row)} |" for row in self.rows())
        return "\n".join([first, "|---" + "|---:" * self.columns.count("|") + "|", *others])

    def section(self) -> str:
        """The table as a section in Markdown."""
        return f"## {self.title}\n\n{self.markdown()}"

    def print(self) -> None:
        headings, *cells = self.rows()
        printed = Printed(title=self.title)
        for number, heading in enumerate(headings):
            printed.add_column(heading, justify="right" if number else "left")
        for row in cells:
            printed.add_row(*row)
        needed = Console(width=1000).measure(printed).maximum  # In a narrower one, cells are cut.
        Console(width=max(needed, Console().width)).print(printed)


def cell(form: str, record: Mapping[str, Any]) -> str:
    try:
        return form.format(**record)
    except (KeyError, IndexError):
        return ""


def show(
    table: Table,
    results: Mapping[str, Any],
    path: pathlib.Path,
    *,
    before: str = "",
    after: str = "",
) -> None:
    """Prints a table, and writes it as Markdown, with all results as JSON beside it."""
    table.print()
    parts = [f"# {table.title}", f"{line(environment())}.", before, table.markdown()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(filter(None, parts)) + "\n" + after)
    keep(path.with_suffix(".json"), {"environment": environment(), **results})
    print(f"written to {path} and {path.with_suffix('.json')}")


def sections(parts: Sequence[str | Table], path: pathlib.Path, *, quiet: bool = False) -> None:
    """Writes texts and tables below one another, and prints them unless `quiet`."""
    for part in () if quiet else parts:
        print(part) if isinstance(part, str) else part.print()
    texts = (part if isinstance(part, str) else part.section() for part in parts)
    path.write_text("\n\n".join(texts) + "\n")


def keep(path: pathlib.Path, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def read(path: pathlib.Path) -> Any:
    return json.loads(path.read_text())


def moments(steps: int, number: int) -> np.ndarray:
    """Indices of the steps that are drawn and written down, evenly spaced on a log scale."""
    return np.unique(np.geomspace(1, steps, number).astype(int)) - 1

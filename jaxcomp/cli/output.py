"""How the commands print: a table or JSON, and their progress."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomp import tables
from jaxcomp.tables import Column


def progress(said: str) -> None:
    """Prints progress if the output is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[Kmeasured {said}", end="", file=sys.stderr, flush=True)


def show(
    args: argparse.Namespace,
    found: Any,
    columns: Sequence[Column],
    rows: Iterable[Any],
    about: str = "",
) -> None:
    """Prints what was found as JSON, or its rows as a table."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print(tables.to_json(found))
        return
    if about:
        print(about, end="\n\n")
    print(tables.text(columns, rows))

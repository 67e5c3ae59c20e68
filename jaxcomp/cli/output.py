"""How the commands print: a table or JSON, and their progress."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomp import tables
from jaxcomp.tables import Column


def progress(said: str, lines: bool = False) -> None:
    """Prints progress to standard error: in place on a terminal, or as a line of its own.

    Args:
        said: the progress.
        lines: whether to print a line where there is no terminal.
    """
    if sys.stderr.isatty():
        print(f"\r\033[K{said}", end="", file=sys.stderr, flush=True)
    elif lines:
        print(said, file=sys.stderr, flush=True)


def clear() -> None:
    """Removes the last progress from a terminal."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def show(
    args: argparse.Namespace,
    found: Any,
    columns: Sequence[Column],
    rows: Iterable[Any],
    about: str = "",
) -> None:
    """Prints what was found as JSON, or its rows as a table."""
    clear()
    if args.json:
        print(tables.to_json(found))
        return
    if about:
        print(about, end="\n\n")
    print(tables.text(columns, rows))

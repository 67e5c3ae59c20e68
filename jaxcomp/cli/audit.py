"""`jaxcomp audit`: the bytes that a compiled program sends, from its saved text."""

import argparse
import pathlib
from operator import itemgetter
from typing import Any

from jaxcomp.cli import output
from jaxcomp.tables import Column
from jaxcomp.wire import hlo


def audit(args: argparse.Namespace) -> None:
    """Prints the bytes that one device sends in each program, by kind of collective or by axis."""
    found: dict[str, dict[str, Any]] = {}
    rows, about = [], "Bytes that one device sends in one run."
    for file in args.file:
        path, counted = str(file), hlo.collective_bytes(_text(file), args.mesh)
        sent = {_name(key): size for key, size in counted.items()}
        lines = [*sorted(sent.items()), ("in all", sum(sent.values()))]
        found[path] = sent
        if counted.at_least:
            lines[-1] = ("in all, at least", lines[-1][1])
            found[path] = {**sent, "at_least": True}
            about = (
                "Bytes that one device sends in one run; at least, if a loop has an unknown number "
                "of iterations, of which one is counted."
            )
        rows += [(path, name, size) for name, size in lines]
    columns = (
        Column("program", itemgetter(0)),
        Column("axes" if args.mesh else "collective", itemgetter(1)),
        Column("bytes", itemgetter(2), ",", right=True),
    )
    output.show(args, found, columns, rows, about)


def _name(key: str | tuple[str, ...]) -> str:
    """A kind of collective, or axes as in `data, fsdp`."""
    return key if isinstance(key, str) else ", ".join(key)


def _text(path: pathlib.Path) -> str:
    """The text of a compiled program.

    Raises:
        ValueError: if the file cannot be read, or is not the text of a compiled program.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} must be text, as compiled.as_text() returns it, and it is binary"
        ) from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if text.lstrip().startswith("HloModule"):
        return text
    kind = "a lowered program" if "stablehlo." in text or "mhlo." in text else "no HLO"
    raise ValueError(
        f"{path} must be the HLO of a compiled program, whose text begins with HloModule, and is "
        f"{kind}: save step.lower(...).compile().as_text()"
    )

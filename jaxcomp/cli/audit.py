"""`jaxcomp audit`: the bytes that a compiled program sends, from its saved text."""

import argparse
import pathlib
from operator import itemgetter

from jaxcomp.cli import output
from jaxcomp.tables import Column
from jaxcomp.wire import hlo

_COLUMNS = (
    Column("program", itemgetter(0)),
    Column("collective", itemgetter(1)),
    Column("bytes", itemgetter(2), ",", right=True),
)


def audit(args: argparse.Namespace) -> None:
    """Prints the bytes that one device sends in each program, by kind of collective."""
    found = {str(path): hlo.collective_bytes(_text(path)) for path in args.file}
    rows = []
    for path, sent in found.items():
        lines = [*sorted(sent.items()), ("in all", sum(sent.values()))]
        rows += [(path, op, size) for op, size in lines]
    about = "Bytes that one device sends in one run; a collective in a loop counts once."
    output.show(args, found, _COLUMNS, rows, about)


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

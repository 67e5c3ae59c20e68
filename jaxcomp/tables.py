"""Tables: columns are data, and one function prints rows; results as JSON."""

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its head.
        value: the value of a row: an attribute, such as "way.name", or a function.
        format: a format of the value, such as ".2f", or a function that returns its text. None is
            an empty cell.
        right: whether it is aligned to the right.
    """

    title: str
    value: str | Callable[[Any], Any]
    format: str | Callable[[Any], str] = ""
    right: bool = False

    def cell(self, row: Any) -> str:
        """The text of a row's value."""
        found = operator.attrgetter(self.value) if isinstance(self.value, str) else self.value
        value = found(row)
        if value is None:
            return ""
        return format(value, self.format) if isinstance(self.format, str) else self.format(value)


def text(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """A line for each row in aligned columns, below their titles and a rule."""
    cells = [[column.title for column in columns]]
    cells += [[column.cell(row) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def attributes(row: Any, *paths: str) -> dict[str, Any]:
    """Attributes by the last part of their paths, as for JSON: `name` of "way.name"."""
    return {path.rpartition(".")[2]: operator.attrgetter(path)(row) for path in paths}


def to_json(found: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Strict JSON, which has no infinities and NaN: they become `null`.

    Args:
        found: dicts, sequences, texts and numbers.
        default: a function that replaces any other object.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(found), indent=1, default=default, allow_nan=False)

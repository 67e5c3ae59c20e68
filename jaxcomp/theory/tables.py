"""Tables as plain text, and results as JSON."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any


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


def text(rows: Sequence[Sequence[str]], *, right: Sequence[bool] = ()) -> list[str]:
    """Lines of aligned columns, with a rule below the first one.

    Args:
        rows: cells, the heads first; all rows have as many.
        right: which columns are aligned to the right; none by default.
    """
    sides = [*right, *[False] * (len(rows[0]) - len(right))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]

"""Tables as plain text."""

from collections.abc import Sequence


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

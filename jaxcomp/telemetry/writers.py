"""Writers of records: a file of comma-separated values, and TensorBoard through any of its writers.

A writer is anything that can be called with the number of the step and a record, for instance
`lambda step, record: wandb.log(record, step=step)`.
"""

import csv
import io
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxcomp import checks
from jaxcomp.telemetry.records import Record


class Csv:
    """Appends each record to a file as a line of comma-separated values.

    The first record gives the columns. A file that exists is continued, so that a resumed run has
    one file. A last line that a kill cut is removed before.

    Args:
        path: the file.

    Raises:
        ValueError: for a record with other names than the columns, such as a file of another run.

    Example:
        >>> import tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
        >>> Csv(path)(1, {"step": 1.0, "loss": 0.5})
        >>> print(path.read_text())
        step,loss
        1,0.5
    """

    def __init__(self, path: str | os.PathLike):
        checks.path("path", path)
        self.path = pathlib.Path(path)

    def __call__(self, step: int, record: Record) -> None:
        """Appends a record."""
        del step  # It is in the record.
        columns = list(record)
        with self.path.open("a+", newline="") as file:
            file.seek(0)
            first = file.readline()
        old = bool(first) and not (first[-1] != "\n" and _line(columns).startswith(first))
        if old:
            columns = next(csv.reader([first]))
        if set(columns) != set(record):
            other = ", ".join(sorted(set(columns) ^ set(record)))
            raise ValueError(
                f"`record` must have the columns of {self.path}, which differ in {other}: write "
                "another file, or the same values in every step"
            )
        _remove_cut_line(self.path)
        with self.path.open("a", newline="") as file:
            if not old:
                file.write(_line(columns))
            file.write(_line([f"{record[name]:.9g}" for name in columns]))


def _line(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _remove_cut_line(path: pathlib.Path) -> None:
    """Removes a last line without an end, which the next one would continue."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def read_csv(path: str | os.PathLike) -> list[Record]:
    """The records of a file that `Csv` wrote; a last line without an end is left out.

    Raises:
        ValueError: if there is no such file, or it is another one.
    """
    checks.path("path", path)
    try:
        with pathlib.Path(path).open(newline="") as file:
            # A number that was cut may be another number.
            lines = [line for line in file if line[-1] == "\n"]
        columns, *rows = list(csv.reader(lines)) or [[]]
        found = [
            {name: float(value) for name, value in zip(columns, row, strict=True)} for row in rows
        ]
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, csv.Error):
        raise ValueError(f"{path} must be a file of jaxcomp.telemetry.Csv, and is not") from None
    if "step" not in columns or not found:
        raise ValueError(f"{path} must be a file of jaxcomp.telemetry.Csv with a record, got none")
    return found


class TensorBoard:
    """Writes each number of a record as a scalar, by the writer of any library.

    Args:
        writer: an object with `add_scalar(tag, value, step)` (`torch.utils.tensorboard`,
            tensorboardX), `scalar(tag, value, step)` (`flax.metrics.tensorboard`) or
            `write_scalars(step, scalars)` (clu).
        prefix: comes before each tag.

    Raises:
        ValueError: for another writer.
    """

    def __init__(self, writer: Any, prefix: str = "jaxcomp/"):
        if not any(callable(getattr(writer, name, None)) for name in _METHODS):
            raise ValueError(
                f"`writer` must have one of the methods {', '.join(_METHODS)}, got {writer!r}"
            )
        self.writer, self.prefix = writer, prefix

    def __call__(self, step: int, record: Record) -> None:
        """Writes a record."""
        tags = {
            self.prefix + name: value
            for name, value in record.items()
            if name != "step" and not math.isnan(value)
        }
        method = next(name for name in _METHODS if callable(getattr(self.writer, name, None)))
        if method == "write_scalars":
            self.writer.write_scalars(step, tags)
            return
        for tag, value in tags.items():
            getattr(self.writer, method)(tag, value, step)


_METHODS = ("add_scalar", "scalar", "write_scalars")

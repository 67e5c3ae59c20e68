"""Files of lines that are appended one by one; a kill leaves at most a cut last line."""

import os
import pathlib
from typing import Any

_BLOCK = 1 << 16


def append(path: "str | os.PathLike[str]", line: bytes, mode: int = 0o600) -> None:
    """Appends a line, which readers see when it is whole; removes a cut line before it.

    The line survives a kill of the process. It is not synchronized: a loss of power may cut it.

    Raises:
        OSError: if it cannot be written, for instance because the disk is full.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags, mode), "rb+", buffering=0) as file:
        remove_cut(file)
        rest = memoryview(line + b"\n")
        while rest:  # A disk with little room takes a part of it, and then raises.
            rest = rest[file.write(rest) :]


def remove_cut(file: Any) -> None:
    """Removes a last line without an end from an open file, which the next one would continue."""
    end = size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    if file.read(1) in (b"", b"\n"):
        return
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    file.truncate(end)
    file.seek(end)


def read(path: "str | os.PathLike[str]", start: int = 0) -> tuple[list[bytes], int]:
    """The whole lines of a file from a byte on, and where the next one will begin.

    A last line without an end is left: it may be under way.
    """
    with pathlib.Path(path).open("rb") as file:
        file.seek(start)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return data[:end].split(b"\n")[:-1], start + end

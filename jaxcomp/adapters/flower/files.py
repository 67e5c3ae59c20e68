"""Flower's records in a file, which outlives Flower's runs and the processes of a node."""

import os
import pathlib
from typing import Any

from jaxcomp.adapters.flower import extra
from jaxcomp_site.packing import packed, unpacked


def write(path: pathlib.Path, state: Any) -> None:
    """Writes a `RecordDict`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(packed(state))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def read(path: pathlib.Path) -> Any:
    """The `RecordDict` that `write` has written; an empty one without a file.

    Raises:
        ValueError: if the file holds something else.
    """
    if not path.exists():
        return extra.RecordDict()
    try:
        return unpacked(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"`memory` must give a file that a client has written, got {path}: {error}"
        ) from error

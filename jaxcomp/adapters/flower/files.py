"""Flower's records in a folder, which outlives Flower's runs and the processes of a node."""

import os
from typing import Any

from jaxcomp.adapters.flower import extra
from jaxcomp_files.versions import PATIENCE, Versions
from jaxcomp_site.packing import pieces, unpacked

_RECORDS = "records"


def folder_of(
    folder: "str | os.PathLike[str]", name: str = "memory", patience: float = PATIENCE
) -> Versions:
    """The memory in a folder, the argument of this name."""
    return Versions(folder, "memory", name, patience)


def write(memory: Versions, state: Any) -> None:
    """Writes a `RecordDict`, whole or not at all."""
    memory.write({_RECORDS: pieces(state)})


def read(memory: Versions) -> Any:
    """The `RecordDict` that was written last; an empty one before the first.

    Raises:
        ValueError: if the folder holds something else, or nothing that is whole.
    """
    found = memory.newest()
    return extra.RecordDict() if found is None else unpacked((found.path / _RECORDS).read_bytes())

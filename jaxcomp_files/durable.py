"""Files and folders, on the disk when a function returns; only their user reads them by default."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO


def make_folder(folder: pathlib.Path, mode: int = 0o700) -> None:
    """Makes a folder, and those above it that are missing."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):  # Another process was faster.
            os.mkdir(path, mode)
        sync(path.parent)


def sync(folder: pathlib.Path) -> None:
    """Puts the names in a folder on the disk."""
    if os.name == "nt":  # Windows opens no folders.
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_new(path: pathlib.Path, chunks: Iterable[Any], mode: int = 0o600) -> tuple[int, str]:
    """Writes a file that must not exist; returns its size and its SHA-256."""
    size, summed = 0, hashlib.sha256()
    with _opened(path, "xb", mode) as file:
        for chunk in chunks:
            size += file.write(chunk)
            summed.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, summed.hexdigest()


def replace(path: pathlib.Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file in place of the one that has its name: at any time one of them is there."""
    draft = draft_of(path)
    with _opened(draft, "wb", mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync(path.parent)


def draft_of(path: pathlib.Path) -> pathlib.Path:
    """The name under which `replace` writes; a kill may leave it."""
    return path.with_name(f".{path.name}.jaxcomp")


def seal(content: Mapping[str, Any]) -> bytes:
    """Fields as JSON, with a checksum."""
    text = json.dumps(content, sort_keys=True).encode()
    return b"%s\n%s\n" % (text, hashlib.sha256(text).hexdigest().encode())


def unseal(data: bytes) -> dict[str, Any]:
    """The fields that `seal` has written.

    Raises:
        ValueError: if a bit of them has changed.
    """
    text = data.partition(b"\n")[0]
    if data != b"%s\n%s\n" % (text, hashlib.sha256(text).hexdigest().encode()):
        raise ValueError(f"its checksum is not that of its content, {len(data)} bytes")
    return json.loads(text)


def _opened(path: pathlib.Path, way: str, mode: int) -> BinaryIO:
    return open(path, way, opener=lambda name, flags: os.open(name, flags, mode))  # type: ignore[return-value]

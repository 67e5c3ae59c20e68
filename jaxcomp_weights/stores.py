"""Files under a URL, by fsspec: a folder, memory, HTTP, S3, GCS.

On a local file system a file is on the disk when a function returns, and appears under its name at
once and whole. Object stores have this property by themselves.
"""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxcomp_files import durable
from jaxcomp_weights.errors import Damaged

_WHOLE = 1 << 22
"""Files of up to so many bytes are read at once; longer ones in blocks of this size."""
_MODE = 0o666
"""Readers may be other users: the process's umask decides."""


class Store:
    """The files under a URL.

    Args:
        url: a path, or a URL that fsspec knows.
        options: keyword arguments of its file system, such as `{"key": ..., "secret": ...}`.

    Raises:
        ValueError: for a URL that no installed package can open.
    """

    def __init__(self, url: "str | os.PathLike[str]", options: dict[str, Any] | None = None):
        self.url = os.fspath(url)
        if not isinstance(self.url, str) or not self.url:
            raise ValueError(f"`url` must be a path or a URL, got {url!r}")
        import fsspec  # Here: few programs of jaxcomp need it.

        try:
            self._fs, path = fsspec.core.url_to_fs(self.url, **(options or {}))
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"`url` must be a path or a URL that fsspec can open, got {self.url!r}: {error}"
            ) from None
        self._root = path.rstrip("/") or path
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else self._fs.protocol
        self.folder = pathlib.Path(path) if {"file", "local"} & set(protocols) else None

    def read(self, name: str, most: int) -> bytes | None:
        """A file of at most so many bytes; None if there is none.

        Raises:
            Damaged: if it is longer.
            OSError: if it cannot be read.
        """
        try:
            data = self._read(name, most + 1)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        if len(data) > most:
            raise Damaged(f"{name} has more than {most:,} bytes")
        return data

    def _read(self, name: str, most: int) -> bytes:
        if self.folder is None:
            # In one request: a pointer or an index may be replaced between two.
            return self._fs.cat_file(self._path(name), end=most)
        with open(self.folder / name, "rb") as file:
            # Python takes as much memory as it is asked to read.
            return file.read(min(os.fstat(file.fileno()).st_size + 1, most))

    @contextlib.contextmanager
    def stream(self, name: str, size: int, sha256: str) -> "Iterator[Stream]":
        """Reads a file from its begin to its end.

        Raises:
            Damaged: if it is missing. `Stream.end` raises for other bytes.
        """
        with self._open(name) as file:
            if file is None:
                raise Damaged(f"{name} is missing")
            there = getattr(file, "size", None)  # Some servers do not say.
            if there is not None and there != size:
                raise Damaged(f"{name} was truncated or altered: it has {there} bytes, not {size}")
            yield Stream(name, file, size, sha256)

    def write(self, name: str, data: bytes) -> None:
        """Writes a short file in place of the one that has this name."""
        if self.folder is not None:
            path = self.folder / name
            self._make_parent(path)
            durable.replace(path, data, mode=_MODE)
        else:
            self._fs.pipe_file(self._path(name), data)

    def write_new(self, name: str, parts: Iterable[bytes]) -> tuple[int, str]:
        """Writes a file; returns its size and SHA-256."""
        if self.folder is not None:
            path = self.folder / name
            self._make_parent(path)
            found = durable.write_new(path, parts, mode=_MODE)
            durable.sync(path.parent)
            return found
        size, summed = 0, hashlib.sha256()
        with self._fs.open(self._path(name), "wb") as file:
            for part in parts:
                file.write(part)
                summed.update(part)
                size += len(part)
        return size, summed.hexdigest()

    def create(self, name: str, data: bytes) -> bool:
        """Writes a short file if there is none of this name; False if there is one.

        Two processes cannot both succeed, where the store has conditional writes.
        """
        if self.folder is not None:
            path = self.folder / name
            self._make_parent(path)
            try:
                durable.write_new(path, [data], mode=_MODE)
            except FileExistsError:
                return False
            durable.sync(path.parent)
            return True
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Removes a file; nothing happens if it is gone."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        try:
            self._fs.invalidate_cache()
            file = self._fs.open(self._path(name), "rb", block_size=_WHOLE, cache_type="readahead")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            file = None
        if file is None:
            yield None
            return
        with file:
            try:
                yield file
            except FileNotFoundError:  # Some file systems look only when they read.
                raise Damaged(f"{name} is missing") from None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @staticmethod
    def _make_parent(path: pathlib.Path) -> None:
        if not path.parent.exists():
            durable.make_folder(path.parent, mode=0o777)


class Stream:
    """A file that is read from begin to end, with its checksum."""

    def __init__(self, name: str, file: Any, size: int, sha256: str):
        self._name, self._file, self._sha256 = name, file, sha256
        self._left, self._summed = size, hashlib.sha256()

    @property
    def left(self) -> int:
        """The bytes that were not taken yet."""
        return self._left

    def take(self, count: int) -> bytes:
        """The next bytes.

        Raises:
            Damaged: if there are fewer.
        """
        if count > self._left:
            raise Damaged(f"{self._name} ends early: {count} bytes are missing of {self._left}")
        parts, left = [], count
        while left:
            part = self._file.read(min(left, _WHOLE))
            if not part:
                raise Damaged(f"{self._name} was truncated by {left} bytes or more")
            self._summed.update(part)
            parts.append(part)
            left -= len(part)
        self._left -= count
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> None:
        """Raises `Damaged` unless all bytes were read, and are those that were published."""
        if self._left:
            raise Damaged(f"{self._name} has {self._left} bytes too many")
        if self._summed.hexdigest() != self._sha256:
            raise Damaged(f"{self._name} was altered: its SHA-256 is another")

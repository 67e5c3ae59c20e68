"""Numbered versions of a few files, such as checkpoints: each is whole, or does not count.

    folder/
      jaxcomp.txt        says that the library wrote this folder
      newest             the number of the last version that was completed
      lock, owner        who may write
      0000000041/        a version: its files, and
        manifest         their sizes and checksums
      0000000042/

A version is written into a new folder and never changed. It counts from the moment at which its
manifest gets the checksums, which is after all of its files are on the disk. So a kill, or a loss
of power, at any moment leaves the version before as it was. The last two are kept. Only the files
that a manifest names are ever removed.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import socket
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxcomp_files import durable, locks

PATIENCE = 90.0
"""Seconds for which a process that was killed may live on, such as the app of a server of Flower,
which ends a minute after its SuperLink is gone."""

_MARK, _NEWEST, _LOCK, _OWNER, _MANIFEST = "jaxcomp.txt", "newest", "lock", "owner", "manifest"
_TEXT = b"Versions that jaxcomp wrote. The files of each must stay as they are; see `manifest`.\n"
_DRAFT = durable.draft_of(pathlib.Path(_MANIFEST)).name
_KEPT = 2


class Version(NamedTuple):
    """A version that is whole.

    Attributes:
        path: the folder of its files.
        about: what `Versions.write` was told about it.
        sizes: bytes of each file.
    """

    path: pathlib.Path
    about: dict[str, Any]
    sizes: dict[str, int]


class _Manifest(NamedTuple):
    """The manifest of a version; `sums` is None until all files are written."""

    kind: str
    files: list[str]
    sums: list[list[Any]] | None
    about: dict[str, Any]


class Versions:
    """The versions in one folder.

    Args:
        folder: the folder, which is made by the first `write`. It may be empty.
        kind: what the versions are, such as "memory"; those of another kind are not read.
        name: the name of the folder's argument, for errors.
        patience: seconds to wait for another process to end that may write.
    """

    def __init__(
        self,
        folder: "str | os.PathLike[str]",
        kind: str,
        name: str = "folder",
        patience: float = PATIENCE,
    ):
        self.folder = pathlib.Path(folder)
        self._kind, self._name, self._patience = kind, name, patience
        self._held: locks.Held | None = None
        self._generation: int | None = None
        self._damaged: set[pathlib.Path] = set()

    def own(self) -> None:
        """Makes this object the only one that may write, until the process ends.

        Another one that owned the folder before cannot write any more, even if the system has no
        locks, or if it is in this process.

        Raises:
            ValueError: if another process owns the folder for longer than the patience.
        """
        if self._generation is not None:
            return
        self._begin()
        self._held = self._lock()
        generation = 1 + self._owner().get("generation", 0)
        owner = {"generation": generation, "process": os.getpid(), "host": socket.gethostname()}
        durable.replace(self.folder / _OWNER, durable.seal(owner))
        self._generation = generation

    def write(
        self, files: Mapping[str, Iterable[Any]], about: Mapping[str, Any] | None = None
    ) -> None:
        """Writes a version.

        Args:
            files: the content of each file, in parts.
            about: a few words or numbers about it, as JSON can have them.

        Raises:
            ValueError: if the folder holds something else, or if another process may write.
            OSError: if the files cannot be written; what was there is as it was.
        """
        self._begin()
        held = self._held or self._lock()  # Until the end of this function.
        self._check_owner()
        self._clear()
        number = 1 + max(self._numbers(), default=0)
        path = self._path(number)
        path.mkdir(0o700)
        durable.sync(self.folder)
        draft = _Manifest(self._kind, list(files), None, dict(about or {}))
        _write_manifest(path, draft)
        sums = [list(durable.write_new(path / name, parts)) for name, parts in files.items()]
        durable.sync(path)
        self._check_owner()
        _write_manifest(path, draft._replace(sums=sums))
        durable.replace(self.folder / _NEWEST, durable.seal({"number": number}))
        self._clear()
        del held

    def newest(self) -> Version | None:
        """The newest version that is whole; None before the first one.

        Warns if a newer one is damaged, so that an older one is returned.

        Raises:
            ValueError: if the folder holds something else, or only versions that are damaged.
        """
        if not self._is_ours():
            return None
        wrong = []
        try:
            pointer = self._pointer()
        except ValueError as error:
            pointer, wrong = None, [str(error)]
        numbers = self._numbers()
        if pointer is not None and pointer not in numbers:
            wrong.append(f"{self._path(pointer)}: it is gone")
        for number in sorted(numbers, reverse=True):
            path = self._path(number)
            try:
                found = _read_manifest(path)
                if found is None or found.sums is None:
                    if number == pointer:
                        raise ValueError("it was complete, and has no checksums any more")
                    continue  # A kill ended it.
                self._check_kind(found)
                _check_files(path, found)
            except ValueError as error:
                wrong.append(f"{path}: {error}")
                self._damaged.add(path)
                continue
            if wrong:
                warnings.warn(
                    f"goes back to {path}, since what was written later is damaged: "
                    + "; ".join(wrong),
                    stacklevel=4,
                )
            sizes = {name: size for name, (size, _) in zip(found.files, found.sums, strict=True)}
            return Version(path, found.about, sizes)
        if wrong:
            raise ValueError(
                f"`{self._name}` must hold a version that is whole, got {self.folder}, of which "
                f"none is: {'; '.join(wrong)}"
            )
        return None

    def _is_ours(self) -> bool:
        """Whether the folder has been begun; it may be missing or empty instead."""
        if not self.folder.exists():
            return False
        if self.folder.is_dir():
            if (self.folder / _MARK).exists():
                return True
            if not any(self.folder.iterdir()):
                return False
        raise ValueError(
            f"`{self._name}` must be new, empty, or a folder in which jaxcomp put its {_MARK}, got "
            f"{self.folder}, which holds something else, or a checkpoint of a former format: "
            "name another one"
        )

    def _begin(self) -> None:
        if not self._is_ours():
            durable.make_folder(self.folder)
            with contextlib.suppress(FileExistsError):  # Another process was faster.
                durable.write_new(self.folder / _MARK, [_TEXT])
            durable.sync(self.folder)

    def _lock(self) -> locks.Held:
        held = locks.take(self.folder / _LOCK, self._patience)
        if held is None:
            by = self._owner()
            raise ValueError(
                f"`{self._name}` must be a folder with which no other process trains, got "
                f"{self.folder}, whose lock was held for {self._patience:g} s; its owner is "
                f"process {by.get('process')} of {by.get('host')}"
            )
        return held

    def _owner(self) -> dict[str, Any]:
        return self._sealed(_OWNER) or {}

    def _pointer(self) -> int | None:
        found = self._sealed(_NEWEST)
        return None if found is None else int(found["number"])

    def _sealed(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        try:
            return durable.unseal(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; remove it") from None

    def _check_owner(self) -> None:
        if self._generation is None:
            return
        by = self._owner()
        if by.get("generation") != self._generation:
            raise ValueError(
                f"`{self._name}` must be a folder with which no other process trains, got "
                f"{self.folder}, which process {by.get('process')} of {by.get('host')} has taken "
                f"over from process {os.getpid()}"
            )

    def _check_kind(self, manifest: _Manifest) -> None:
        if manifest.kind != self._kind:
            raise ValueError(
                f"`{self._name}` must hold versions of kind {self._kind!r}, got {self.folder} with "
                f"some of kind {manifest.kind!r}"
            )

    def _path(self, number: int) -> pathlib.Path:
        return self.folder / f"{number:010}"

    def _numbers(self) -> list[int]:
        names = (path.name for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(name) for name in names if re.fullmatch(r"\d{10}", name))

    def _clear(self) -> None:
        """Removes versions that a kill ended, and all complete ones but the last two."""
        complete = []
        for number in self._numbers():
            path = self._path(number)
            try:
                found = _read_manifest(path)
            except ValueError:  # Damaged: who wrote its files is not known.
                continue
            if found is not None:
                self._check_kind(found)
            if found is None:
                if {entry.name for entry in path.iterdir()} <= {_DRAFT}:
                    _remove(path, [])
            elif found.sums is None:
                _remove(path, found.files)
            elif path not in self._damaged:  # It is no version to go back to.
                complete.append((path, found))
        for path, found in complete[:-_KEPT]:
            _write_manifest(path, found._replace(sums=None))  # From now on it does not count.
            _remove(path, found.files)


def _write_manifest(path: pathlib.Path, manifest: _Manifest) -> None:
    durable.replace(path / _MANIFEST, durable.seal(manifest._asdict()))


def _read_manifest(path: pathlib.Path) -> _Manifest | None:
    try:
        found = _Manifest(**durable.unseal((path / _MANIFEST).read_bytes()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise ValueError(f"its {_MANIFEST} is damaged: {error}") from None
    if any(pathlib.PurePath(name).name != name for name in found.files):
        raise ValueError(f"its {_MANIFEST} names files elsewhere: {found.files}")
    return found


def _check_files(path: pathlib.Path, manifest: _Manifest) -> None:
    assert manifest.sums is not None
    for name, (size, summed) in zip(manifest.files, manifest.sums, strict=True):
        try:
            with (path / name).open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found == size and hashlib.file_digest(file, "sha256").hexdigest() == summed:
                    continue
        except FileNotFoundError:
            found = 0
        raise ValueError(f"{name} is damaged: it has {found} bytes and had {size}, or others")


def _remove(path: pathlib.Path, files: list[str]) -> None:
    """Removes a version with these files; it stays if somebody has put others there."""
    for name in files:
        (path / name).unlink(missing_ok=True)
    for name in (_DRAFT, _MANIFEST):
        (path / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()

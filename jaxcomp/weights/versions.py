"""Writing a version: its files first, then its manifest, the index, and the pointer last."""

import time
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.weights import chain, encoding, ownership, tiling
from jaxcomp.weights.chain import Rules
from jaxcomp_weights import documents
from jaxcomp_weights.checksums import Sum
from jaxcomp_weights.documents import Entry, File, Id, Manifest, Way
from jaxcomp_weights.layouts import Layout
from jaxcomp_weights.signing import Key
from jaxcomp_weights.stores import Store

_PATIENCE = 600.0
"""Seconds that processes wait for each other's files."""
_AGAIN = 0.05


class _Held(NamedTuple):
    """A version from which later ones get patches: its tiles on this process, and checksums."""

    tiles: list[jax.Array]
    sums: list[Sum]


class _Work(NamedTuple):
    """Which files a version gets; the first process decides."""

    id: Id
    snapshot: bool
    bases: list[Id]


class _Part(NamedTuple):
    """The files of one process, by their base, and the checksums of its tiles."""

    files: list[File]
    sums: list[Sum]


class Writer:
    """Writes versions one after another.

    Args:
        store: the files.
        coding: "small" or "fast".
        rules: when snapshots and long patches are written.
        key: signs documents, if any.
        patience: seconds to wait for another publisher of this machine to end.
    """

    def __init__(self, store: Store, coding: str, rules: Rules, key: Key | None, patience: float):
        self._store, self._coding, self._rules = store, coding, rules
        self._sign, self._verify = (None, None) if key is None else key
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._owner = ownership.Ownership(store, key, patience) if self._leads else None
        self.newest = self._listed = None if self._owner is None else self._owner.newest
        number = 0 if self.newest is None else self.newest.number
        self._generation, self._number = _agree(self._owner and self._owner.generation, number)
        self._layout: Layout | None = None
        self._held: dict[Id, _Held] = {}
        self._last: _Work | None = None
        self._failed: list[Id] = []
        if self._leads:
            self._remove_leftovers()

    @property
    def _leads(self) -> bool:
        return self._process == 0

    def write(self, named: dict[str, jax.Array], step: int, when: float) -> None:
        """Writes the next version.

        Args:
            named: the exported arrays.
            step: the step of training.
            when: seconds since 1970.
        """
        self._number += 1
        layout = tiling.layout(named)
        fresh = layout != self._layout
        if fresh:
            self._held = {}
        work = self._decide(Id(self._generation, self._number), fresh)
        tiles = tiling.tiles(named, layout)
        try:
            part = self._write_files(work, tiles, layout)
            if self._leads:
                self._finish(work, layout, self._gather(work, part), step, when)
            else:
                self._hand_over(work, part)
        except BaseException:
            if self._listed != work.id:  # Otherwise readers may see it already.
                self._remove_files(work)
            if self._processes > 1:  # The others may hold this version, and not the one before.
                self._held, self._layout = {}, None
                self._failed.append(work.id)
            raise
        self._layout, self.newest, self._last = layout, work.id, work
        self._held[work.id] = _Held(tiles, part.sums)
        wanted = chain.to_hold(work.id.number, self._rules)
        self._held = {one: held for one, held in self._held.items() if one.number in wanted}

    def release(self) -> None:
        """Lets another process of this machine publish."""
        if self._owner is not None:
            self._owner.release()

    def _decide(self, version: Id, fresh: bool) -> _Work:
        name = f"work/{version}"
        if self._owner is not None:
            self._owner.check()
            snapshot = chain.needs_snapshot(version.number, self._owner.entries, fresh, self._rules)
            bases = chain.bases(version.number, list(self._held), self._rules)
            if self._processes > 1:
                content = {"snapshot": snapshot, "bases": bases, "listed": self._listed}
                ownership.write(self._store, name, content, self._sign)
            return _Work(version, snapshot, bases)
        content = self._wait_for(name)
        if self._last is not None and content["listed"] != [*self._last.id]:
            self._remove_files(self._last)  # Another process could not write its own.
            self._last = None
        return _Work(version, content["snapshot"], [Id(*base) for base in content["bases"]])

    def _remove_files(self, work: _Work) -> None:
        """Removes the files of this process for a version that is not finished."""
        for base in self._bases(work):
            self._store.remove(documents.file_name(work.id, base, self._process))

    @staticmethod
    def _bases(work: _Work) -> list[Id | None]:
        return [*work.bases, *([None] if work.snapshot else [])]

    def _write_files(self, work: _Work, tiles: list[jax.Array], layout: Layout) -> _Part:
        """The files of this process. Checksums that patches update must equal those of a snapshot.

        Raises:
            RuntimeError: if they differ, which is a fault of memory or of this library.
        """
        files, sums = [], []
        for base in self._bases(work):
            new: list[Sum] = []
            if base is None:
                parts = encoding.snapshot(tiles, layout, self._process, new)
            else:
                held = self._held[base]
                new = list(held.sums)
                parts = encoding.patch(held.tiles, tiles, layout, self._process, self._coding, new)
            name = documents.file_name(work.id, base, self._process)
            files.append(File(name, *self._store.write_new(name, parts)))
            if sums and sums != new:
                raise RuntimeError(f"two files of version {work.id.number} end in other weights")
            sums = new
        return _Part(files, sums)

    def _gather(self, work: _Work, own: _Part) -> list[_Part]:
        """The parts of all processes."""
        parts = [own]
        for process in range(1, self._processes):
            content = self._wait_for(f"work/{work.id}-{process:05}")
            parts.append(
                _Part(
                    [File(*file) for file in content["files"]],
                    [Sum.parse(one) for one in content["sums"]],
                )
            )
        return parts

    def _hand_over(self, work: _Work, part: _Part) -> None:
        """Tells the first process what was written."""
        content = {"files": part.files, "sums": [str(one) for one in part.sums]}
        name = f"work/{work.id}-{self._process:05}"
        ownership.write(self._store, name, content, self._sign)

    def _wait_for(self, name: str) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while (content := ownership.read(self._store, name, self._verify)) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"another process did not write {name} in {_PATIENCE:g} s")
            time.sleep(_AGAIN)
        return content

    def _finish(
        self, work: _Work, layout: Layout, parts: list[_Part], step: int, when: float
    ) -> None:
        """Writes the documents, the pointer last, and removes files that nobody needs."""
        assert self._owner is not None
        bases = self._bases(work)
        ways = tuple(
            Way(base, tuple(part.files[number] for part in parts))
            for number, base in enumerate(bases)
        )
        digest = self._write_layout(layout)
        sums = tuple(tuple(part.sums) for part in parts)
        manifest = Manifest(work.id, step, when, digest, sums, ways)
        name = documents.manifest_name(work.id)
        ownership.write(self._store, name, documents.write_manifest(manifest), self._sign)
        self._owner.check()
        sizes = tuple((way.base, sum(file.size for file in way.files)) for way in ways)
        before = [*self._owner.entries, Entry(work.id, step, when, sizes)]
        after = chain.kept(before, self._rules)
        previous = self._owner.entries, self._owner.dropped
        gone = chain.dropped(before, after, self._processes)
        self._owner.entries, self._owner.dropped = after, [*self._owner.dropped, *gone]
        try:
            index = documents.index_name(self._generation)
            ownership.write(self._store, index, self._owner.index(), self._sign)
        except BaseException:
            self._owner.entries, self._owner.dropped = previous
            raise
        # From here on readers may see the version, even if the store does not say so.
        self._listed = work.id
        pointer = documents.newest_name(self._generation)
        ownership.write(self._store, pointer, {"version": work.id}, self._sign)
        self._remove_dropped()
        for done in [*self._failed, work.id] if self._processes > 1 else []:
            notes = (f"-{process:05}" for process in range(1, self._processes))
            self._remove([f"work/{done}{one}" for one in ("", *notes)])
        self._failed = []

    def _write_layout(self, layout: Layout) -> str:
        """Writes the document of a layout, and returns its digest."""
        digest = layout.digest
        if layout != self._layout:
            name = documents.layout_name(digest)
            ownership.write(self._store, name, layout.to_json(), self._sign)
        return digest

    def _remove_leftovers(self) -> None:
        """Removes what a publisher that was killed had begun: the version after its newest one."""
        assert self._owner is not None
        self._remove_dropped()
        begun = self._owner.begun
        if begun is None:
            return
        listed = [entry.id for entry in self._owner.entries]
        for base in (None, *chain.bases(begun.number, listed, self._rules)):
            for part in range(self._processes):
                self._store.remove(documents.file_name(begun, base, part))
        self._store.remove(documents.manifest_name(begun))

    def _remove_dropped(self) -> None:
        """Removes files that no listed version has; what stays is tried again with the next one."""
        assert self._owner is not None
        try:
            self._remove(self._owner.dropped)
        except OSError as error:
            warnings.warn(f"old files of weights could not be removed: {error}", stacklevel=2)
        else:
            self._owner.dropped = []

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._store.remove(name)


def _agree(generation: int | None, number: int) -> tuple[int, int]:
    """The generation and number of the first process, on all processes."""
    if jax.process_count() == 1:
        assert generation is not None
        return generation, number
    from jax.experimental import multihost_utils

    mine = np.array([generation or 0, number], np.int32)
    found = multihost_utils.broadcast_one_to_all(mine)
    return int(found[0]), int(found[1])

"""Who may publish at a URL: one process on a machine by a lock, and the newest generation anywhere.

A publisher writes its pointer and its index under the number of its generation. Readers follow the
newest generation, so an older publisher cannot change what they read, even if it does not know yet.
"""

import os
import socket
from typing import Any

from jaxcomp_files import locks
from jaxcomp_weights import documents
from jaxcomp_weights.documents import Entry, Id
from jaxcomp_weights.errors import Untrusted
from jaxcomp_weights.signing import Key, Sign, Verify
from jaxcomp_weights.stores import Store

_LOCK = "lock"
_CLAIMS = 1000


class Ownership:
    """The right to publish at a URL.

    Args:
        store: the files.
        key: signs documents; versions that it has not signed are not taken over.
        patience: seconds to wait for another process of this machine to end.

    Raises:
        ValueError: if another process of this machine publishes there.
    """

    def __init__(self, store: Store, key: Key | None, patience: float):
        self._store, self._verify = store, None if key is None else key.verify
        sign = None if key is None else key.sign
        self._held = None
        if store.folder is not None:
            self._held = _lock(store, patience)
        before = self._current()
        self.generation = self._claim(before + 1)
        self.newest: Id | None = None
        self.entries: list[Entry] = []
        self.dropped: list[str] = []
        self.begun: Id | None = None  # The version that the publisher before may have begun.
        if before >= 0:
            self._inherit(before)
        write(store, documents.index_name(self.generation), self.index(), sign)
        if self.newest is not None:
            pointer = {"version": self.newest}
            write(store, documents.newest_name(self.generation), pointer, sign)
        owner = {"generation": self.generation, "process": os.getpid(), "host": _host()}
        write(store, documents.OWNER, owner, sign)
        self.check()

    def index(self) -> dict[str, Any]:
        """The index as it is now, with the names of files that are to be removed."""
        return {**documents.write_index(self.entries), "dropped": self.dropped}

    def check(self) -> None:
        """Raises `ValueError` if another publisher has taken over."""
        found = self._current()
        if found != self.generation:
            raise ValueError(
                f"`url` must have one publisher, got {self._store.url}, which generation {found} "
                f"has taken over from generation {self.generation}, this one"
            )

    def release(self) -> None:
        """Lets another process of this machine publish."""
        self._held = None  # Another publisher of this process may hold the same lock.

    def _claim(self, generation: int) -> int:
        """The first generation that nobody has claimed."""
        mark = f"{_host()} {os.getpid()}\n".encode()
        for number in range(generation, generation + _CLAIMS):
            if self._store.create(f"owners/{number:06}", mark):
                return number
        raise ValueError(f"`url` must have free generations, got {self._store.url}")

    def _current(self) -> int:
        content = read(self._store, documents.OWNER)
        return -1 if content is None else int(content["generation"])

    def _inherit(self, before: int) -> None:
        """Takes over the versions of the generation before, and removes what its end left."""
        try:
            pointer = read(self._store, documents.newest_name(before), self._verify)
            index = read(self._store, documents.index_name(before), self._verify)
        except Untrusted:  # Its versions stay where they are, and are not listed any more.
            return
        if index is not None:
            names = [str(name) for name in index.get("dropped", ())]
            self.dropped = [name for name in names if documents.is_removable(name)]
        if pointer is not None and index is not None:
            newest = self.newest = documents.read_id(pointer)
            self.entries = [e for e in documents.read_index(index) if e.id <= newest]
        elif pointer is not None or index is None:  # Damaged: nothing is certain.
            return
        self.begun = Id(before, 1 + (0 if self.newest is None else self.newest.number))


def read(store: Store, name: str, verify: Verify | None = None) -> dict[str, Any] | None:
    """A document that this or another publisher has written; None if there is none."""
    data = store.read(name, documents.MOST_BYTES)
    return None if data is None else documents.unseal(name, data, verify)


def write(store: Store, name: str, content: dict[str, Any], sign: Sign | None) -> None:
    """Writes a document in place of the one that has this name."""
    store.write(name, documents.seal(name, content, sign))


def _lock(store: Store, patience: float) -> locks.Held:
    from jaxcomp_files import durable

    assert store.folder is not None
    if not store.folder.exists():
        durable.make_folder(store.folder, mode=0o777)
    held = locks.take(store.folder / _LOCK, patience)
    if held is None:
        owner = read(store, documents.OWNER) or {}
        raise ValueError(
            f"`url` must be a folder at which no other process publishes, got {store.url}: its "
            f"lock was held for {patience:g} s; its owner is process {owner.get('process')} of "
            f"{owner.get('host')}"
        )
    return held


def _host() -> str:
    return socket.gethostname()

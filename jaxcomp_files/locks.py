"""A lock on a file, held by one process at a time until it ends."""

import os
import pathlib
import threading
import time
import weakref

_AGAIN = 0.1
"""Seconds between two tries."""


class Held:
    """A lock that this process holds: until it ends, or until nobody refers to this object."""

    def __init__(self, path: pathlib.Path):
        self.number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.leave = weakref.finalize(self, os.close, self.number)


_all: "weakref.WeakValueDictionary[str, Held]" = weakref.WeakValueDictionary()
_taking = threading.Lock()


def take(path: pathlib.Path, patience: float) -> Held | None:
    """The lock of a file, which is made if needed.

    It is that of the process: whoever takes it again here gets the same object. A kill ends it.
    Where there are no locks on files, as on Windows, it keeps nobody out.

    Returns:
        None if another process has it for longer than so many seconds.
    """
    with _taking:
        held = _all.get(os.path.realpath(path))
        if held is not None:
            return held
        held = Held(path)
        until = time.monotonic() + patience
        while not _locked(held.number):
            if time.monotonic() > until:
                held.leave()
                return None
            time.sleep(_AGAIN)
        _all[os.path.realpath(path)] = held
        return held


def _locked(number: int) -> bool:
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # A file system without locks.
        return True
    return True


def _leave_all() -> None:
    for held in list(_all.values()):
        held.leave()
    _all.clear()


if hasattr(os, "register_at_fork"):
    # The lock is that of an open file, which a child would keep open after its parent has ended.
    os.register_at_fork(after_in_child=_leave_all)

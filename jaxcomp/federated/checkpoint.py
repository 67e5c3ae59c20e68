"""Checkpoints of a simulation: written whole or not at all, continued bit for bit."""

import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_STATE = "state.npz"
_PATIENCE = 90.0
"""Seconds: Flower ends the app of a server that is gone after a minute."""


def save(folder: str | pathlib.Path, state: Any, table: Sequence[np.ndarray]) -> None:
    """Writes a tree of arrays, and the arrays of a table, in place of what is in `folder`.

    Args:
        folder: where to; it is complete at any time, or does not exist.
        state: a tree of arrays.
        table: large arrays, each written as one file.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and not (folder / _STATE).is_file():
        raise ValueError(f"`folder` must be new, or hold a checkpoint, got {folder}")
    fresh, old = (folder.with_name(folder.name + end) for end in (".new", ".old"))
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for number, array in enumerate(table):
        # Row by row: a view of mapped rows is not copied as a whole.
        with (fresh / f"{number}.rows").open("wb") as file:
            for start in range(0, len(array), _ROWS):
                file.write(np.ascontiguousarray(array[start : start + _ROWS]).tobytes())
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    kept: dict[str, Any] = {
        f"leaf{n}": np.frombuffer(leaf.tobytes(), np.uint8) for n, leaf in enumerate(leaves)
    }
    np.savez(fresh / _STATE, kinds=np.array(_kinds(leaves)), **kept)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: str | pathlib.Path, state: Any, table: Sequence[np.ndarray]) -> Any:
    """Reads what `save` wrote: returns the tree, and fills the arrays of the table.

    Args:
        folder: the folder of the checkpoint.
        state: a tree of arrays of the same shapes and dtypes.
        table: arrays of the same shapes and dtypes, which are overwritten.

    Raises:
        ValueError: if there is no checkpoint, or one of another method, other parameters or another
            number of clients.
    """
    found = there(folder)
    if found is None:
        raise ValueError(f"`folder` must hold a checkpoint of a simulation, got {folder}")
    folder = found
    leaves, treedef = jax.tree.flatten(state)
    leaves = [np.asarray(leaf) for leaf in leaves]
    rows = [folder / f"{number}.rows" for number in range(len(table))]
    with np.load(folder / _STATE) as found:
        fits = list(found["kinds"]) == _kinds(leaves)
        sizes = [path.stat().st_size if path.exists() else -1 for path in rows]
        if not fits or sizes != [array.nbytes for array in table]:
            raise ValueError(
                "`folder` must hold a checkpoint of the same method, parameters and number of "
                f"clients, got {folder} with {', '.join(found['kinds'])} and rows of {sizes} bytes"
            )
        read = [
            np.frombuffer(found[f"leaf{n}"].tobytes(), leaf.dtype).reshape(leaf.shape)
            for n, leaf in enumerate(leaves)
        ]
    for path, array in zip(rows, table, strict=True):
        with path.open("rb") as file:
            for start in range(0, len(array), _ROWS):
                part = array[start : start + _ROWS]
                part[...] = np.frombuffer(file.read(part.nbytes), part.dtype).reshape(part.shape)
    return jax.tree.unflatten(treedef, read)


def there(folder: str | pathlib.Path) -> pathlib.Path | None:
    """Where the checkpoint of a folder is, if it has one."""
    folder = pathlib.Path(folder)
    # Beside it, if `save` was stopped between its two renames.
    places = (folder, folder.with_name(folder.name + ".old"))
    return next((place for place in places if (place / _STATE).is_file()), None)


def lock(folder: str | pathlib.Path, patience: float = _PATIENCE) -> Any:
    """Waits until no other process trains with the checkpoint of a folder; then none can.

    A server that was killed may live for a few seconds more, and two would overwrite each other's
    rounds. Where there are no locks on files, as on Windows, nothing is checked.

    Returns:
        What holds the lock: it ends with the process, or when this is closed.

    Raises:
        ValueError: if another process has it for longer than so many seconds.
    """
    try:
        import fcntl
    except ImportError:
        return None
    folder = pathlib.Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    held = folder.with_name(folder.name + ".lock").open("a")
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > until:
                held.close()
                raise ValueError(
                    f"`checkpoint` must be a folder with which no other process trains, got "
                    f"{folder}, whose lock was held for {patience:g} s"
                ) from None
            time.sleep(0.2)
        else:
            return held


_ROWS = 256
"""Rows that are in memory at once."""


def _kinds(leaves: Sequence[np.ndarray]) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]

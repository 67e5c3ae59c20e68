"""Checkpoints of a simulation and of a server: whole or not there, continued bit for bit."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxcomp import checks
from jaxcomp_files.versions import Versions

ROUNDS = "rounds.jsonl"
"""The file beside the versions of a server in which each round has a line, for `jaxcomp watch`."""

_STATE = "state"
_ROWS = 256
"""Rows that are in memory at once."""


def folder_of(
    folder: str | pathlib.Path, name: str = "folder", own: Versions | None = None
) -> Versions:
    """The checkpoints in a folder, the argument of this name.

    Args:
        folder: the folder.
        name: the name of the argument, for errors.
        own: the checkpoints of a server's own; in their folder nobody else may then write.
    """
    checks.path(name, folder)
    if own is None or own.folder != pathlib.Path(folder):
        return Versions(folder, "federated", name)
    own.own()
    return own


def save(versions: Versions, state: Any, table: Sequence[np.ndarray]) -> None:
    """Writes a tree of arrays, and the arrays of a table, as a new version.

    Args:
        versions: where to.
        state: a tree of arrays.
        table: large arrays, each written as one file.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    files = {_STATE: (leaf.tobytes() for leaf in leaves)}
    files |= {_rows(number): _parts(array) for number, array in enumerate(table)}
    versions.write(files, {"kinds": _kinds(leaves)})


def restore(
    versions: Versions, state: Any, table: Sequence[np.ndarray], *, missing_ok: bool = False
) -> Any:
    """Reads what `save` wrote last: returns the tree, and fills the arrays of the table.

    Args:
        versions: where from.
        state: a tree of arrays of the same shapes and dtypes.
        table: arrays of the same shapes and dtypes, which are overwritten.
        missing_ok: whether to return None if there is no checkpoint yet.

    Raises:
        ValueError: if there is no checkpoint, or one of another method, other parameters or another
            number of clients.
    """
    found = versions.newest()
    if found is None:
        if missing_ok:
            return None
        raise ValueError(
            f"`folder` must hold a checkpoint of a simulation or server, got {versions.folder}"
        )
    leaves, treedef = jax.tree.flatten(state)
    leaves = [np.asarray(leaf) for leaf in leaves]
    expected = {_rows(number): array.nbytes for number, array in enumerate(table)}
    sizes = {name: size for name, size in found.sizes.items() if name != _STATE}
    if found.about.get("kinds") != _kinds(leaves) or sizes != expected:
        raise ValueError(
            "`folder` must hold a checkpoint of the same method, parameters and number of clients, "
            f"got {found.path} with {', '.join(found.about.get('kinds', []))} and rows of "
            f"{list(sizes.values())} bytes, not {list(expected.values())}"
        )
    with (found.path / _STATE).open("rb") as file:
        read = [
            np.frombuffer(file.read(leaf.nbytes), leaf.dtype).reshape(leaf.shape) for leaf in leaves
        ]
    for number, array in enumerate(table):
        with (found.path / _rows(number)).open("rb") as file:
            for start in range(0, len(array), _ROWS):
                part = array[start : start + _ROWS]
                part[...] = np.frombuffer(file.read(part.nbytes), part.dtype).reshape(part.shape)
    return jax.tree.unflatten(treedef, read)


def _parts(array: np.ndarray) -> Iterator[bytes]:
    """The rows, some at a time: a view of mapped rows is not copied as a whole."""
    for start in range(0, len(array), _ROWS):
        yield np.ascontiguousarray(array[start : start + _ROWS]).tobytes()


def _rows(number: int) -> str:
    return f"{number}.rows"


def _kinds(leaves: Sequence[np.ndarray]) -> list[str]:
    return [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]

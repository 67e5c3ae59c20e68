"""Tables of what clients keep: a row for each client, in memory or in files."""

import abc
import functools
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree


class Table(Interface, abstract=True):
    """A row of arrays for each client."""

    @abc.abstractmethod
    def read(self, numbers: np.ndarray) -> PyTree:
        """The rows of these clients, along a leading axis."""

    @abc.abstractmethod
    def write(self, numbers: np.ndarray, rows: PyTree) -> None:
        """Replaces the rows of these clients, each at most once."""

    @abc.abstractmethod
    def arrays(self) -> list[np.ndarray]:
        """All rows, an array for each leaf, to be saved, or written and given to `fill`."""

    def fill(self, arrays: list[np.ndarray]) -> None:
        """Replaces all rows by those of `arrays`, which came from there."""
        del arrays  # They are the table's own, where rows are written in place.


class InMemory(Table):
    """A table in the host's memory.

    Args:
        row: a new client's row.
        clients: the number of clients.

    Example:
        >>> table = InMemory({"residual": np.zeros(3, np.float32)}, clients=100)
        >>> table.write(np.array([7]), {"residual": np.ones((1, 3), np.float32)})
        >>> table.read(np.array([7, 8]))["residual"].sum(axis=1)
        array([3., 0.], dtype=float32)
    """

    def __init__(self, row: PyTree, clients: int):
        leaves, self._treedef = jax.tree.flatten(row)
        self._arrays = [_filled(_zeros(leaf, clients), leaf) for leaf in map(np.asarray, leaves)]

    def read(self, numbers: np.ndarray) -> PyTree:
        return _read(self._arrays, self._treedef, numbers)

    def write(self, numbers: np.ndarray, rows: PyTree) -> None:
        _write(self._arrays, numbers, rows)

    def arrays(self) -> list[np.ndarray]:
        return self._arrays


class OnDevice(Table):
    """A table in the memory of one device: no row crosses to the host; a write is in place.

    Args:
        row: a new client's row.
        clients: the number of clients.
    """

    def __init__(self, row: PyTree, clients: int):
        leaves, self._treedef = jax.tree.flatten(row)
        self._arrays = [jnp.broadcast_to(leaf, (clients, *np.shape(leaf))) for leaf in leaves]
        # A reader in another thread must not see arrays that a writer has given away.
        self._lock = threading.Lock()

    def read(self, numbers: np.ndarray) -> PyTree:
        with self._lock:
            return jax.tree.unflatten(self._treedef, _taken(self._arrays, jnp.asarray(numbers)))

    def write(self, numbers: np.ndarray, rows: PyTree) -> None:
        new = jax.tree.leaves(rows)
        count = new[0].shape[0] if new else 0
        # Rows beyond the clients' are those that fill up a block; they are dropped.
        clients = self._arrays[0].shape[0] if new else 0
        padded = np.full(count, clients)
        padded[: len(numbers)] = numbers
        with self._lock:
            self._arrays = _replaced(self._arrays, jnp.asarray(padded), new)

    def arrays(self) -> list[np.ndarray]:
        return [np.array(array) for array in self._arrays]

    def fill(self, arrays: list[np.ndarray]) -> None:
        self._arrays = [jnp.asarray(array) for array in arrays]


@jax.jit
def _taken(arrays: list[Array], numbers: Array) -> list[Array]:
    return [array[numbers] for array in arrays]


@functools.partial(jax.jit, donate_argnums=0)
def _replaced(arrays: list[Array], numbers: Array, rows: list[Array]) -> list[Array]:
    return [a.at[numbers].set(new, mode="drop") for a, new in zip(arrays, rows, strict=True)]


class Mapped(Table):
    """A table in files that are mapped into memory, for more clients than memory can hold.

    The operating system keeps in memory what fits. Rows that were never written take no space on
    most file systems.

    Args:
        row: a new client's row.
        clients: the number of clients.
        folder: a folder for the files, created if needed. A table in it is overwritten.

    Raises:
        ValueError: if `folder` is a file.
    """

    def __init__(self, row: PyTree, clients: int, folder: str | pathlib.Path):
        folder = pathlib.Path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"`folder` must be a folder, or a path for a new one, got {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        leaves, self._treedef = jax.tree.flatten(row)
        self._arrays: list[np.ndarray] = []
        for number, leaf in enumerate(map(np.asarray, leaves)):
            if not leaf.size:  # A file cannot be empty.
                self._arrays.append(_zeros(leaf, clients))
                continue
            shape = (clients, *leaf.shape)
            place = folder / f"{number}.rows"
            mapped = np.memmap(place, _plain(leaf.dtype), "w+", shape=shape)
            self._arrays.append(_filled(mapped.view(leaf.dtype), leaf))

    def read(self, numbers: np.ndarray) -> PyTree:
        return _read(self._arrays, self._treedef, numbers)

    def write(self, numbers: np.ndarray, rows: PyTree) -> None:
        _write(self._arrays, numbers, rows)

    def arrays(self) -> list[np.ndarray]:
        return self._arrays


def _zeros(leaf: np.ndarray, clients: int) -> np.ndarray:
    return np.zeros((clients, *leaf.shape), leaf.dtype)


def _plain(dtype: Any) -> np.dtype:
    """A dtype of the same size that numpy knows by itself: files cannot hold bfloat16."""
    return np.dtype(f"V{dtype.itemsize}") if dtype.kind == "V" else dtype


def _filled(array: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """The array with the leaf in each row; pages of zeros are not touched."""
    if leaf.size and leaf.astype(np.float64).any():
        array[:] = leaf
    return array


def _read(arrays: list[np.ndarray], treedef: Any, numbers: np.ndarray) -> PyTree:
    return jax.tree.unflatten(treedef, [array[numbers] for array in arrays])


def _write(arrays: list[np.ndarray], numbers: np.ndarray, rows: PyTree) -> None:
    for array, new in zip(arrays, jax.tree.leaves(rows), strict=True):
        array[numbers] = np.asarray(new)[: len(numbers)]

"""Tables of what clients keep: a row for each client, in memory or in files."""

import abc
import functools
import pathlib
import threading

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


class OnHost(Table):
    """A table in the host's memory, or in files that are mapped into it.

    Of files the operating system keeps in memory what fits, and rows that were never written take
    no space on most file systems.

    Args:
        row: a new client's row.
        clients: the number of clients.
        folder: a folder for the files, created if needed; a table in it is overwritten. None for
            memory.

    Raises:
        ValueError: if `folder` is a file.

    Example:
        >>> table = OnHost({"residual": np.zeros(3, np.float32)}, clients=100)
        >>> table.write(np.array([7]), {"residual": np.ones((1, 3), np.float32)})
        >>> table.read(np.array([7, 8]))["residual"].sum(axis=1)
        array([3., 0.], dtype=float32)
    """

    def __init__(self, row: PyTree, clients: int, folder: str | pathlib.Path | None = None):
        folder = None if folder is None else pathlib.Path(folder)
        if folder is not None:
            if folder.exists() and not folder.is_dir():
                raise ValueError(
                    f"`folder` must be a folder, or a path for a new one, got {folder}"
                )
            folder.mkdir(parents=True, exist_ok=True)
        leaves, self._treedef = jax.tree.flatten(row)
        self._arrays: list[np.ndarray] = []
        for number, leaf in enumerate(map(np.asarray, leaves)):
            array = _zeros((clients, *leaf.shape), leaf.dtype, folder, number)
            if leaf.size and leaf.astype(np.float64).any():  # Pages of zeros are not touched.
                array[:] = leaf
            self._arrays.append(array)

    def read(self, numbers: np.ndarray) -> PyTree:
        return jax.tree.unflatten(self._treedef, [array[numbers] for array in self._arrays])

    def write(self, numbers: np.ndarray, rows: PyTree) -> None:
        for array, new in zip(self._arrays, jax.tree.leaves(rows), strict=True):
            array[numbers] = np.asarray(new)[: len(numbers)]

    def arrays(self) -> list[np.ndarray]:
        return self._arrays


def _zeros(
    shape: tuple[int, ...], dtype: np.dtype, folder: pathlib.Path | None, number: int
) -> np.ndarray:
    if folder is None or 0 in shape:  # A file cannot be empty.
        return np.zeros(shape, dtype)
    # Numpy cannot map bfloat16, which is not a dtype of its own.
    plain = np.dtype(f"V{dtype.itemsize}") if dtype.kind == "V" else dtype
    return np.memmap(folder / f"{number}.rows", plain, "w+", shape=shape).view(dtype)


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

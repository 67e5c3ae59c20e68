"""Tables of what clients keep: a row for each client, in memory or in files."""

import abc
import functools
import math
import os
import pathlib
import threading
import weakref

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

    def lend(self, numbers: np.ndarray) -> PyTree:
        """The rows of these clients until they are written; the table's own, where possible."""
        return self.read(numbers)

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
        self._files: list[int | None] = []
        for number, leaf in enumerate(map(np.asarray, leaves)):
            array, file = _zeros((clients, *leaf.shape), leaf.dtype, folder, number)
            if leaf.size and leaf.astype(np.float64).any():  # Pages of zeros are not touched.
                array[:] = leaf
            self._arrays.append(array)
            self._files.append(file)
            if file is not None:
                weakref.finalize(self, os.close, file)

    def read(self, numbers: np.ndarray) -> PyTree:
        return jax.tree.unflatten(self._treedef, [array[numbers] for array in self._arrays])

    def lend(self, numbers: np.ndarray) -> PyTree:
        run = _run(numbers)
        if run is None:
            return self.read(numbers)
        found = [array[run] for array in self._arrays]
        for rows, file in zip(found, self._files, strict=True):
            if file is not None:  # Read from the disk now, beside other work.
                rows.reshape(-1).view(np.uint8)[::_PAGE].max(initial=0)
        return jax.tree.unflatten(self._treedef, found)

    def write(self, numbers: np.ndarray, rows: PyTree) -> None:
        run = _run(numbers)
        leaves = jax.tree.leaves(rows)
        for array, file, new in zip(self._arrays, self._files, leaves, strict=True):
            new = np.asarray(new)[: len(numbers)]
            if run is None or file is None:
                array[numbers if run is None else run] = new
            else:
                _write(file, new, run.start * new[0].nbytes)

    def arrays(self) -> list[np.ndarray]:
        return self._arrays


_PAGE = 4096
_ALIGNED = 64
"""Bytes; a program takes arrays that begin at a multiple of them without a copy."""


def _zeros(
    shape: tuple[int, ...], dtype: np.dtype, folder: pathlib.Path | None, number: int
) -> tuple[np.ndarray, int | None]:
    """Rows of zeros, and the file that they are mapped from."""
    if folder is None or 0 in shape:  # A file cannot be empty.
        size = math.prod(shape) * dtype.itemsize
        whole = np.zeros(size + _ALIGNED, np.uint8)
        begin = -whole.ctypes.data % _ALIGNED
        return whole[begin : begin + size].view(dtype).reshape(shape), None
    # Numpy cannot map bfloat16, which is not a dtype of its own.
    plain = np.dtype(f"V{dtype.itemsize}") if dtype.kind == "V" else dtype
    path = folder / f"{number}.rows"
    array = np.memmap(path, plain, "w+", shape=shape).view(dtype)
    return array, os.open(path, os.O_RDWR) if hasattr(os, "pwrite") else None


def _run(numbers: np.ndarray) -> slice | None:
    """The rows as a slice, if they follow one another."""
    if not len(numbers) or not (np.diff(numbers) == 1).all():
        return None
    return slice(int(numbers[0]), int(numbers[-1]) + 1)


def _write(file: int, rows: np.ndarray, begin: int) -> None:
    """Writes rows to a file.

    Through its mapping, each page that has gone to the disk since would be a fault: three times the
    time on Linux.
    """
    left = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    while left:
        count = os.pwrite(file, left, begin)
        left, begin = left[count:], begin + count


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

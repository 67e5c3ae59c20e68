"""Flower's arrays whose bytes are made when they are read: until then they take no memory."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxcomp.adapters.flower import extra, raw
from jaxcomp.types import PyTree

_Array: Any = object if extra.Array is None else extra.Array


class _Late(_Array):
    """An array of Flower's, whose subclass makes `data` anew each time."""

    def __init_subclass__(cls) -> None:
        # Flower writes the name of an array's class into messages, and knows no other.
        cls.__qualname__ = "Array"

    def __init__(self, dtype: str, shape: tuple[int, ...], stype: str):
        self.dtype, self.shape, self.stype = dtype, shape, stype

    def __reduce__(self) -> Any:
        return extra.Array, (self.dtype, self.shape, self.stype, self.data)


class Leaf(_Late):
    """A leaf of parameters, in the format of `flwr.app.Array(leaf)`.

    Args:
        leaf: an array that nobody changes.
    """

    def __init__(self, leaf: jax.Array):
        super().__init__(str(leaf.dtype), leaf.shape, "numpy.ndarray")
        self._leaf = leaf

    @property
    def data(self) -> bytes:
        return extra.Array(np.asarray(self._leaf)).data


class Tree(_Late):
    """A tree as raw bytes, as `records.array(raw.write(tree), stype)` has them.

    Args:
        tree: a tree of arrays, which stay on the host.
        stype: the kind of the bytes.

    Attributes:
        tree: the arrays.
        length: how many bytes they have.
    """

    def __init__(self, tree: PyTree, stype: str):
        self.tree = jax.tree.map(np.asarray, tree)
        self.length = raw.size(self.tree)
        super().__init__("uint8", (self.length,), stype)

    @property
    def data(self) -> bytes:
        return raw.write(self.tree)

    def pieces(self) -> Iterator[bytes]:
        """The bytes, a leaf at a time."""
        return raw.pieces(self.tree)

"""Trees of arrays as raw bytes: the elements of every leaf, one leaf after another."""

import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxcomp.types import PyTree


def size(like: PyTree) -> int:
    """The bytes of a tree with these shapes and dtypes."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(like))


def write(tree: PyTree) -> bytes:
    """The bytes of a tree, little-endian as on every machine that runs JAX."""
    return b"".join(pieces(tree))


def pieces(tree: PyTree) -> Iterator[bytes]:
    """The bytes of a tree, a leaf at a time."""
    return (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def read(data: bytes, like: PyTree) -> Any:
    """The tree that `write` has written, whose leaves are views of the bytes.

    Raises:
        ValueError: if there are more or fewer bytes than this tree has.
    """
    if len(data) != size(like):
        raise ValueError(f"`data` must be the {size(like)} bytes of the tree, got {len(data)}")
    leaves, treedef = jax.tree.flatten(like)
    read, begin = [], 0
    for leaf in leaves:
        found = np.frombuffer(data, np.dtype(leaf.dtype), leaf.size, begin)
        read.append(found.reshape(leaf.shape))
        begin += found.nbytes
    return jax.tree.unflatten(treedef, read)


def digest(tree: PyTree) -> bytes:
    """16 bytes that tell whether two trees of the same shapes have the same bits."""
    summed = hashlib.blake2b(digest_size=16, person=b"jaxcomp centre")
    for piece in pieces(tree):
        summed.update(piece)
    return summed.digest()


def like(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
        return jax.ShapeDtypeStruct(np.shape(x), dtype)

    return jax.tree.map(one, tree)

"""Joins arrays of many shapes to one vector for each dtype, so that one collective sends all."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.types import Array, ArrayLike


def by_dtype(arrays: Sequence[Array], move: Callable[[Array], Array]) -> list[Array]:
    """Applies `move` to one vector for each dtype, which has all elements of this dtype.

    Args:
        arrays: arrays of any shapes.
        move: a function of a vector, such as a mean over the workers, of the same length.
    """
    found = [x if x.size else jnp.zeros(x.shape, x.dtype) for x in arrays]  # The same on all.
    for dtype in dict.fromkeys(x.dtype for x in arrays if x.size):
        numbers = [i for i, x in enumerate(arrays) if x.dtype == dtype and x.size]
        sizes = [arrays[i].size for i in numbers]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = xla.cut(move(xla.joined([arrays[i] for i in numbers])), begins, sizes)
        for i, part in zip(numbers, parts, strict=True):
            found[i] = part.reshape(arrays[i].shape)
    return found


def rooms(sets: Sequence[Sequence[ArrayLike]]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """One vector for each dtype, long enough for each of these sets of arrays.

    Example:
        >>> like = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        >>> rooms([[like, like], [like]])
        (ShapeDtypeStruct(shape=(12,), dtype=float32),)
    """
    dtypes = dict.fromkeys(x.dtype for arrays in sets for x in arrays)
    sizes = {
        d: max(sum(math.prod(x.shape) for x in arrays if x.dtype == d) for arrays in sets)
        for d in dtypes
    }
    return tuple(jax.ShapeDtypeStruct((size,), dtype) for dtype, size in sizes.items())


def pack(into: Sequence[ArrayLike], arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Concatenates the arrays to vectors like `into`, padded with zeros."""
    vectors = []
    for room in into:
        parts = [x for x in arrays if x.dtype == room.dtype]
        left = room.shape[0] - sum(part.size for part in parts)
        vectors.append(xla.joined([*parts, jnp.zeros(left, room.dtype)]))
    return tuple(vectors)


def unpack(vectors: Sequence[Array], likes: Sequence[ArrayLike]) -> list[Array]:
    """The inverse of `pack`."""
    begins = {vector.dtype: 0 for vector in vectors}
    whole = {vector.dtype: vector for vector in vectors}
    arrays = []
    for like in likes:
        begin = begins[like.dtype]
        begins[like.dtype] = end = begin + math.prod(like.shape)
        arrays.append(whole[like.dtype][begin:end].reshape(like.shape))
    return arrays

"""Joins arrays of many shapes to one vector for each dtype, so that one collective sends all."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxcomp.backend import xla
from jaxcomp.types import Array, ArrayLike


def by_dtype(arrays: Sequence[Array], move: Callable[[Array], Array]) -> list[Array]:
    """Applies `move` to one array for each dtype, with the arrays of this dtype side by side.

    Args:
        arrays: vectors, or matrices of the same number of rows.
        move: a function that keeps the length of the last axis, such as a mean over the workers.
    """
    found = [x if x.size else jnp.zeros(x.shape, x.dtype) for x in arrays]  # The same on all.
    for dtype in dict.fromkeys(x.dtype for x in arrays if x.size):
        numbers = [i for i, x in enumerate(arrays) if x.dtype == dtype and x.size]
        given = [arrays[i] for i in numbers]
        sizes = [x.shape[-1] for x in given]
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        whole = move(xla.join(given) if given[0].ndim == 1 else jnp.concatenate(given, axis=1))
        parts = (
            xla.cut(whole, begins, sizes) if whole.ndim == 1 else jnp.split(whole, begins[1:], 1)
        )
        for i, part in zip(numbers, parts, strict=True):
            found[i] = part
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
        vectors.append(xla.join([*parts, jnp.zeros(left, room.dtype)]))
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

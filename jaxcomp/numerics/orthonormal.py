"""Orthonormal bases of many sets of vectors of different lengths, computed together.

Compiled for each shape of a model by itself, this would take most of the time that a step takes to
compile. So vectors are cut into tiles of one size, `[rank, tiles, 128]`, and what is summed over a
vector is summed over its tiles.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from jaxcomp.backend import axes
from jaxcomp.types import Array

_LANES = 128

_FAN = 32
"""Tiles that are added at a time, which bounds the padding of short vectors beside long ones."""


def orthonormal(sets: Sequence[Float[Array, "_ _ _"]]) -> list[Float[Array, "_ _ _"]]:
    """An orthonormal basis of the vectors of each matrix, `[n, rank, size]`, in their order.

    Gram–Schmidt, twice for each vector: one pass leaves errors in nearly dependent vectors,
    and two are enough. A vector that depends on those before it, up to rounding, is zero in the
    basis. A non-finite element spoils its matrix and no other.

    Example:
        >>> orthonormal([jnp.array([[[3.0, 4.0], [6.0, 8.0]]])])
        [Array([[[0.6, 0.8],
                [0. , 0. ]]], dtype=float32)]
    """
    return _by_dtype(_orthonormal, sets)


def refresh(
    sets: Sequence[Float[Array, "_ _ _"]], before: Sequence[Float[Array, "_ _ _"]]
) -> list[Float[Array, "_ _ _"]]:
    """Normalises each vector; if it is zero, takes its former value instead.

    A zero vector would stay zero in all later steps, and squares of large or small vectors would
    leave the range of floats.
    """
    return _by_dtype(_refresh, sets, before)


def unit(vectors: Float[Array, "n rank size"]) -> Float[Array, "n rank size"]:
    """Normalises each vector; zeros stay zero."""
    (fresh,) = refresh([vectors], [jnp.zeros_like(vectors)])
    return fresh


def _orthonormal(sets: Sequence[Array]) -> list[Array]:
    shapes = tuple(x.shape for x in sets)
    tiles = _cut_tiles(sets)
    near, rest, _ = _measure(shapes, tiles)
    units = tiles * near[..., None] * rest[..., None]
    least = 8 * float(jnp.finfo(tiles.dtype).eps)

    def add(k: Array, basis: Array) -> Array:
        rest = units[k]
        for _ in range(2):
            # Vectors that are not in the basis yet are zeros and add nothing.
            along = _over_vectors(shapes, jnp.sum(rest[None] * basis, axis=2))
            rest = rest - jnp.sum(along[..., None] * basis, axis=0)
        length = jnp.sqrt(_over_vectors(shapes, jnp.sum(rest * rest, axis=1)[None]))[0, :, None]
        rest = jnp.where(length <= least, 0, rest / length)  # NaN is not below the limit.
        return lax.dynamic_update_index_in_dim(basis, rest, k, axis=0)

    empty, _ = axes.match_vma(jnp.zeros(tiles.shape, tiles.dtype), tiles)
    return _join_tiles(shapes, lax.fori_loop(0, tiles.shape[0], add, empty))


def _refresh(sets: Sequence[Array], before: Sequence[Array]) -> list[Array]:
    shapes = tuple(x.shape for x in sets)
    tiles = _cut_tiles(sets)
    near, rest, some = (measure[..., None] for measure in _measure(shapes, tiles))
    return _join_tiles(shapes, jnp.where(some, tiles * near * rest, _cut_tiles(before)))


def _measure(shapes: tuple, tiles: Array) -> tuple[Array, Array, Array]:
    """Two factors that normalise each vector, and whether its length is not zero, on each of its
    tiles.
    """
    tiny = float(jnp.finfo(tiles.dtype).tiny)
    # First relative to the largest element, since squares of large or small values, and the
    # reciprocal of a very large value, are out of range.
    near = 1 / jnp.clip(_over_vectors(shapes, jnp.max(jnp.abs(tiles), axis=2)), tiny, 1 / tiny)
    scaled = tiles * near[..., None]
    length = jnp.sqrt(_over_vectors(shapes, jnp.sum(scaled * scaled, axis=2)))
    some = ~(length == 0)  # NaN counts as non-zero.
    return near, 1 / jnp.where(some, length, 1), some


def _over_vectors(shapes: tuple, x: Array) -> Array:
    """Sums `[rank, tiles]` over the tiles of each vector, and returns the sum on each tile."""
    places, owner = _places(shapes)
    for rows in places:
        x = jnp.sum(jnp.take(x, rows, axis=1, mode="fill", fill_value=0), axis=2)
    return x[:, owner]


@functools.lru_cache
def _places(shapes: tuple[tuple[int, int, int], ...]) -> tuple[list[np.ndarray], np.ndarray]:
    """The rows of each partial sum, and the matrix of each tile."""
    counts = np.repeat([-(-size // _LANES) for _, _, size in shapes], [n for n, _, _ in shapes])
    owner = np.repeat(np.arange(counts.size), counts).astype(np.int32)
    places = []
    while counts.max() > 1:
        fan, total = min(_FAN, counts.max()), counts.sum()
        groups = -(-counts // fan)
        matrix = np.repeat(np.arange(counts.size), groups)
        number = np.arange(matrix.size) - np.repeat(np.cumsum(groups) - groups, groups)
        inside = number[:, None] * fan + np.arange(fan)
        rows = (np.cumsum(counts) - counts)[matrix, None] + inside
        places.append(np.where(inside < counts[matrix, None], rows, total).astype(np.int32))
        counts = groups
    return places, owner


def _cut_tiles(sets: Sequence[Array]) -> Array:
    """All sets as `[rank, tiles, 128]`; vectors are padded with zeros, sets with zero vectors."""
    most = max(x.shape[1] for x in sets)
    parts = []
    for x in sets:
        _, rank, size = x.shape
        rows = x.swapaxes(0, 1)
        padded = jnp.pad(rows, ((0, most - rank), (0, 0), (0, -size % _LANES)))
        parts.append(padded.reshape(most, -1, _LANES))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _join_tiles(shapes: tuple, tiles: Array) -> list[Array]:
    """The sets that were split into these tiles."""
    sets, first = [], 0
    for n, rank, size in shapes:
        count = n * -(-size // _LANES)
        part = tiles[:rank, first : first + count].reshape(rank, n, -1)
        sets.append(part[:, :, :size].swapaxes(0, 1))
        first += count
    return sets


def _by_dtype(f: Callable[..., list[Array]], *lists: Sequence[Array]) -> list[Array]:
    """Applies `f` to the entries of each dtype together; returns the results in input order."""
    found: dict[int, Array] = {}
    for dtype in dict.fromkeys(x.dtype for x in lists[0]):
        numbers = [i for i, x in enumerate(lists[0]) if x.dtype == dtype]
        results = f(*([many[i] for i in numbers] for many in lists))
        found.update(zip(numbers, results, strict=True))
    return [found[i] for i in range(len(found))]

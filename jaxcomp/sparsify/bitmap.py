"""Bitmaps of the chosen elements of a bucket: counts, ranks and positions.

Bit `b` of word `w` represents element `32 w + b`. A bitmap is thirty-two times smaller than its
elements: one pass over the elements makes it, and all further work is on the words and on the
chosen elements.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Int32, UInt32

from jaxcomp.backend import xla
from jaxcomp.entropy import stream
from jaxcomp.types import Array

Words = UInt32[Array, "n words"]
WORD = 32
_GROUP = WORD * WORD
"""Elements whose bits are transposed together: 32 words of 32 bits."""

_DENSE = 4
"""Requested places for each word from which on each word is its own group in the search."""


def words(size: int) -> int:
    """The words of a bitmap of `size` elements.

    They are whole groups of 32 words; a short row has a fraction of a group, a power of two.
    """
    needed = -(-size // WORD)
    return 1 << (needed - 1).bit_length() if needed < WORD else -(-size // _GROUP) * WORD


def of(hits: Bool[Array, "n size"]) -> Words:
    """The bitmap of each row.

    Example:
        >>> of(jnp.array([[True, False, True]]))
        Array([[5]], dtype=uint32)
    """
    n, size = hits.shape
    if words(size) == WORD * -(-size // _GROUP):
        return _in_groups(hits)
    # Several short rows form a group.
    flat = jnp.pad(hits, ((0, 0), (0, WORD * words(size) - size))).reshape(1, -1)
    return _in_groups(flat)[:, : n * words(size)].reshape(n, -1)


def of_words(hits: Bool[Array, "n size"]) -> Words:
    """`of`, word by word: twice as fast on a CPU if it is compiled separately, with the comparison.

    Otherwise XLA fuses it into each consumer, which then reads all elements.
    """
    n, size = hits.shape
    whole = size // WORD * WORD
    parts = [hits[:, :whole]] if whole else []
    missing = WORD * words(size) - whole
    if missing:
        parts.append(jnp.pad(hits[:, whole:], ((0, 0), (0, missing - (size - whole)))))
    found, shift = [], np.arange(WORD, dtype=np.uint32)[None, None]
    for part in parts:
        bits = part.reshape(n, -1, WORD).astype(jnp.uint32) << shift
        found.append(jnp.sum(bits, axis=2, dtype=jnp.uint32))
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


def _in_groups(hits: Bool[Array, "n size"]) -> Words:
    """`of` for whole groups, and for a padded part of a group."""
    whole = hits.shape[1] // _GROUP * _GROUP
    parts = [_of(hits[:, :whole])] if whole else []
    if whole < hits.shape[1] or not parts:  # Separately: padding all would take twice as long.
        rest = hits[:, whole:]
        parts.append(_of(jnp.pad(rest, ((0, 0), (0, _GROUP - rest.shape[1])))))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def count(bitmap: Words) -> Int32[Array, " n"]:
    """The number of ones of each row."""
    return jnp.sum(lax.population_count(bitmap).astype(jnp.int32), axis=1, dtype=jnp.int32)


class Kept(NamedTuple):
    """The requested ones of each row, by rank: `base + j`, plus `skip` from `j = gap` on.

    Attributes:
        base: `int32[n]`.
        gap: `int32[n]`.
        skip: `int32[n]`.
    """

    base: Array
    gap: Array
    skip: Array


def from_first(rows: int) -> Kept:
    """All ones, from the first on."""
    zero = jnp.zeros(rows, jnp.int32)
    return Kept(zero, zero, zero)


def places(bitmap: Words, k: int, kept: Kept) -> Int32[Array, "n k"]:
    """The positions of `k` ones of each row, ascending; unspecified beyond the last one.

    Example:
        >>> places(of(jnp.array([[False, True, True]])), 2, from_first(1))
        Array([[1, 2]], dtype=int32)
    """
    return _compile_places(k)(bitmap, *kept)


@functools.lru_cache(maxsize=256)
def _compile_places(k: int) -> Callable[..., Array]:
    # Compile it separately: fused with its consumers, each would compute the positions again.
    return xla.compile_separately(lambda bitmap, *kept: _places(bitmap, k, *kept))


def _places(bitmap: Array, k: int, base: Array, gap: Array, skip: Array) -> Int32[Array, "n k"]:
    dense = _DENSE * bitmap.shape[1] <= k
    if dense:  # Each word is its own group.
        ones = lax.population_count(bitmap).astype(jnp.int32)
        before = _Before(jnp.zeros_like(ones), jnp.cumsum(ones, axis=1) - ones)
    else:
        before = _before(bitmap)
    base, gap, skip = base[:, None], gap[:, None], skip[:, None]
    slot = lax.broadcasted_iota(jnp.int32, (bitmap.shape[0], k), 1)
    rank = slot + base + jnp.where(slot >= gap, skip, 0)
    group = _group_of(before.groups, k, base, gap, skip)
    rest = rank - _take(before.groups, group) if before.groups.shape[1] > 1 else rank
    word = group
    if not dense:
        word = group * _group_words(bitmap)
        for step in _halves(bitmap):
            word = jnp.where(_take(before.words, word + step) <= rest, word + step, word)
        rest = rest - _take(before.words, word)
    return word * WORD + stream.select(_take(bitmap, word), rest)


def rank(bitmap: Words, place: Int32[Array, "n k"]) -> Int32[Array, "n k"]:
    """The ones of each row before each of these places."""
    before, word = _before(bitmap), place // WORD
    mask = (jnp.uint32(1) << (place % WORD).astype(jnp.uint32)) - jnp.uint32(1)
    ones = lax.population_count(_take(bitmap, word) & mask).astype(jnp.int32)
    groups = _take(before.groups, word // _group_words(bitmap))
    return groups + _take(before.words, word) + ones


@xla.compile_separately
def first(bitmap: Words, k: Int32[Array, "n #words"]) -> Words:
    """The ones of each word that are among the first `k` of its row."""
    before = _before(bitmap)
    n, groups = before.groups.shape
    ahead = (before.words.reshape(n, groups, -1) + before.groups[..., None]).reshape(n, -1)
    left = k - ahead
    # All ones below the one that is the first to be left out.
    end = stream.select(bitmap, left)
    below = (jnp.uint32(1) << end.astype(jnp.uint32)) - jnp.uint32(1)
    whole = left >= lax.population_count(bitmap).astype(jnp.int32)
    return jnp.where(left <= 0, jnp.uint32(0), jnp.where(whole, bitmap, bitmap & below))


def _running(numbers: Int32[Array, "n size"]) -> Int32[Array, "n size"]:
    """The sum of the numbers up to each one."""

    def one_by_one(numbers: Array) -> Array:
        return jnp.cumsum(numbers, axis=1)

    def in_rows(numbers: Array) -> Array:
        n, size = numbers.shape
        rows = jnp.pad(numbers, ((0, 0), (0, -size % WORD))).reshape(n, -1, WORD)
        running = _running_in_rows(rows)
        ends = running[..., -1]
        ahead = (in_rows if ends.shape[1] > 4 * _GROUP else one_by_one)(ends) - ends
        return (running + ahead[..., None]).reshape(n, -1)[:, :size]

    if numbers.shape[1] <= 4 * _GROUP:
        return one_by_one(numbers)
    # A CPU adds one by one in 9 to 18 ns a number.
    return lax.platform_dependent(numbers, cpu=in_rows, default=one_by_one)


def _running_in_rows(rows: Int32[Array, "n rows width"]) -> Int32[Array, "n rows width"]:
    """The sum of the numbers of each row up to each one; sums are below 2²⁴."""

    def doubled(rows: Array) -> Array:
        step = 1
        while step < rows.shape[2]:
            shifted = jnp.pad(rows[..., :-step], ((0, 0), (0, 0), (step, 0)))
            rows, step = lax.optimization_barrier(rows + shifted), 2 * step
        return rows

    def multiplied(rows: Array) -> Array:  # A CPU shifts lanes slower than it multiplies matrices.
        width = rows.shape[2]
        ones = jnp.triu(jnp.ones((width, width), jnp.float32))
        sums = jnp.matmul(rows.astype(jnp.float32), ones, precision=lax.Precision.HIGHEST)
        return lax.optimization_barrier(sums.astype(jnp.int32))

    return lax.platform_dependent(rows, cpu=multiplied, default=doubled)


def _group_words(bitmap: Array) -> int:
    """The words of a group, fewer than 32 if the bitmap is shorter."""
    return min(WORD, bitmap.shape[1])


def _halves(bitmap: Array) -> tuple[int, ...]:
    """Half the words of a group, a quarter of them, and so on down to one."""
    return tuple(step for step in (16, 8, 4, 2, 1) if step < _group_words(bitmap))


class _Before(NamedTuple):
    """The ones before each word in its group, and before each group."""

    words: Array
    groups: Array


def _before(bitmap: Array) -> _Before:
    n = bitmap.shape[0]
    ones = lax.population_count(bitmap).astype(jnp.int32)
    ones = ones.reshape(n, -1, _group_words(bitmap))
    running = _running_in_rows(ones)
    sizes = running[..., -1]
    groups = _running(sizes)
    return _Before((running - ones).reshape(n, -1), groups - sizes)


def _group_of(
    begins: Int32[Array, "n groups"], k: int, base: Array, gap: Array, skip: Array
) -> Int32[Array, "n k"]:
    """The group of each slot: the last one that begins at its rank or before."""
    n, groups = begins.shape
    if groups == 1:
        return jnp.zeros((n, k), jnp.int32)
    # The first slot of that rank or more. A bisection for each slot would look up fifteen times.
    slot = begins - base
    slot = jnp.where(slot < gap, slot, jnp.maximum(slot - skip, gap))
    row = jnp.arange(n)[:, None]
    marks = jnp.zeros((n, k), jnp.int32).at[row, jnp.maximum(slot, 0)].add(1, mode="drop")
    return _running(marks) - 1


def _of(hits: Bool[Array, "n size"]) -> Words:
    """`of` whole groups."""
    n, size = hits.shape
    # Word w of a group first takes the elements 32 p + w, which are neighbours of those of the next
    # word, so no lane of a register is idle; the transposition of 32 × 32 bits puts them in order.
    place = np.arange(WORD, dtype=np.uint32)[None, None, :, None]
    bits = hits.astype(jnp.uint32).reshape(n, size // _GROUP, WORD, WORD)
    planar = jnp.sum(bits << place, axis=2, dtype=jnp.uint32)
    return _transpose(lax.optimization_barrier(planar)).reshape(n, size // WORD)


def _take(table: Array, places: Array) -> Array:
    return jnp.take_along_axis(table, places, axis=1, mode="clip")


def _transpose(groups: UInt32[Array, "n groups 32"]) -> UInt32[Array, "n groups 32"]:
    """Bit `p` of word `w` to bit `w` of word `p`, in each group of 32 words."""
    x = groups
    mask = 0xFFFFFFFF
    for step in (16, 8, 4, 2, 1):
        mask ^= (mask << step) & 0xFFFFFFFF
        pairs = x.reshape(*x.shape[:2], WORD // (2 * step), 2, step)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        swapped = ((low >> step) ^ high) & jnp.uint32(mask)
        pairs = jnp.stack([low ^ (swapped << step), high ^ swapped], axis=-2)
        x = lax.optimization_barrier(pairs.reshape(groups.shape))
    return x

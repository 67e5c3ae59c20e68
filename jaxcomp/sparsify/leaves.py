"""Selection in buckets of several leaves: as many elements of each leaf as it would send alone."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, Integer, UInt32

from jaxcomp.numerics import segments as segments_
from jaxcomp.numerics.segments import Segments
from jaxcomp.sparsify import bitmap, selection
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.sparsify.competitors import Leaves, PerPart, size_bits
from jaxcomp.types import Array

_TOPS = 3
"""Groups of a leaf, as a multiple of the elements that are wanted."""

_LANES = 32
_NARROW = 32
"""Elements of a row of candidates."""


def top_k(x: Array, ks: tuple[int, ...], segments: Segments) -> UInt32[Array, "n k"]:
    """Places of the `k` largest `|x|` of each segment, ascending; ties go to the lower place.

    A threshold that at least `k` elements of a segment reach is that of the `k`-th largest group of
    its elements. Few more reach it, unless large elements lie together: then the threshold is
    raised until few do. Among these candidates, the `k`-th largest is found digit by digit.
    """
    n, parts = x.shape[0], Leaves(segments)
    rooms = tuple(
        min(size, k + k // 4 + 3 * math.isqrt(k) + 8)
        for size, k in zip(segments.sizes, ks, strict=True)
    )
    k, room = _numbers(ks, n), _numbers(rooms, n)
    low = jnp.maximum(_least_reached(x, ks, segments), 1)
    hits = parts.reach(x, low)
    found = parts.ones(hits)

    def raise_threshold(x: Array, low: Array, found: Array) -> tuple[Array, Array]:
        low, found = selection.bracket(x, jnp.minimum(k, found), room, low, parts)
        kept = _at_most(parts.reach(x, low), parts.reach(x, low + 1), room, parts)
        return kept, parts.ones(kept)

    over = jnp.any(found > room)
    hits, found = lax.cond(over, raise_threshold, lambda *_: (hits, found), x, low, found)

    def fill(x: Array, hits: Array, found: Array) -> Array:  # With zeros, the first ones.
        zeros = ~parts.reach(x, jnp.ones_like(found))
        return hits | parts.first(zeros, jnp.maximum(k - found, 0))

    lacks = jnp.any(found < k)
    hits = lax.cond(lacks, fill, lambda _, hits, __: hits, x, hits, found)
    candidates = Segments(rooms, _NARROW)
    number = jnp.maximum(found, k)
    places = slots(bitmap.places(hits, sum(rooms), bitmap.from_first(n)), number, candidates)
    real = candidates.real(number)
    sizes = jnp.where(real, size_bits(selection.take(x, places)), -1)
    own = Leaves(candidates)
    last = own.spread(selection.kth_largest(sizes, k, own))
    chosen = _at_most(bitmap.of(sizes >= last), bitmap.of(sizes > last), k, own)
    chosen = bitmap.places(chosen, sum(ks), bitmap.from_first(n))
    return jnp.take_along_axis(places, chosen, axis=1).astype(jnp.uint32)


def _at_most(reached: Words, above: Words, room: PerPart, parts: Leaves) -> Words:
    """Those above a threshold, and as many of those at it as there is room for."""
    left = jnp.maximum(room - parts.ones(above), 0)
    return above | parts.first(reached & ~above, left)


def as_many_as_fit(
    x: Array,
    hits: Words,
    rooms: tuple[int, ...],
    start: UInt32[Array, "n segments"],
    segments: Segments,
) -> tuple[UInt32[Array, "n room"], Int32[Array, "n segments"]]:
    """Places of as many hits of each segment as there is room for, and how many they are.

    If there are more, a cyclic run of them with a random start is left out, as in
    `selection.some`. Non-finite elements are never left out.

    Args:
        x: `[n, size]`.
        hits: as from `bitmap.of`.
        rooms: places for each segment.
        start: a random word for each segment.
        segments: of each row.
    """
    n, parts, room = x.shape[0], Leaves(segments), _numbers(rooms, x.shape[0])
    total = parts.ones(hits)

    def trim(x: Array, hits: Array) -> Array:
        over = jnp.maximum(total - room, 0)
        begin = (start % jnp.maximum(total, 1).astype(jnp.uint32)).astype(jnp.int32)
        needed = parts.nonfinite(x)
        rank = bitmap.rank(hits, jnp.maximum(needed, 0)) - parts.ahead(hits)
        begin = jnp.where(needed < 0, begin, rank + 1)
        around = jnp.maximum(begin + over - total, 0)
        # Keeps the ones from `around` to `stop`, and those from `again` on.
        stop = jnp.where(around > 0, around + room, begin)
        again = jnp.where(around > 0, total, begin + over)
        kept = parts.first(hits, stop) & ~parts.first(hits, around)
        return kept | (hits & ~parts.first(hits, again))

    hits = lax.cond(jnp.any(total > room), trim, lambda _, hits: hits, x, hits)
    places = bitmap.places(hits, sum(rooms), bitmap.from_first(n))
    return places.astype(jnp.uint32), jnp.minimum(total, room)


def slots(
    places: Integer[Array, "n k"], number: Int32[Array, "n segments"], rooms: Segments
) -> Integer[Array, "n slots"]:
    """Places one after another, put into the slots of each segment, of which `number` are used."""
    if rooms.number == 1:
        return places
    begins = jnp.cumsum(number, axis=1, dtype=jnp.int32) - number
    index = rooms.per_element(begins) + rooms.place(len(places))
    return jnp.take_along_axis(places, index, axis=1, mode="clip")


def from_slots(
    slots: Integer[Array, "n slots"], number: Int32[Array, "n segments"], rooms: Segments
) -> Integer[Array, "n slots"]:
    """The inverse of `slots`: the entries of used slots one after another, then zeros."""
    begins = jnp.cumsum(number, axis=1, dtype=jnp.int32) - number
    index = rooms.per_element(begins) + rooms.place(len(slots))
    spare = slots.shape[1] + lax.broadcasted_iota(jnp.int32, index.shape, 1)
    index = jnp.where(rooms.real(number), index, spare)
    row = jnp.arange(len(slots))[:, None]
    return jnp.zeros_like(slots).at[row, index].set(slots, unique_indices=True, mode="drop")


def estimate(
    x: Array, ks: tuple[int, ...], above: tuple[int, ...], segments: Segments
) -> Int32[Array, "n segments"]:
    """About the threshold that `k` elements of each segment reach, as `size_bits`, from samples at
    equal distances that hold about `above` of them.
    """
    n = x.shape[0]
    strides = [
        max(1, min(int(size * 2**-16), int(k / many)))
        for size, k, many in zip(segments.sizes, ks, above, strict=True)
    ]
    strides = [stride - 1 + stride % 2 if stride >= 3 else 1 for stride in strides]
    sizes = tuple(-(-s // stride) for s, stride in zip(segments.sizes, strides, strict=True))
    sampled = segments_.of(sizes)
    at = sampled.place(n) * sampled.per_element(_numbers(strides, n))
    at = at + sampled.per_element(_numbers(segments.starts, n))
    real = sampled.real(_numbers(sizes, n))
    sample = jnp.where(real, size_bits(selection.take(x, at)), -1)
    wanted = tuple(
        min(seen, max(1, round(k * seen / size)))
        for k, seen, size in zip(ks, sizes, segments.sizes, strict=True)
    )
    return selection.kth_largest(sample, _numbers(wanted, n), Leaves(sampled))


def _least_reached(x: Array, ks: tuple[int, ...], segments: Segments) -> Int32[Array, "n segments"]:
    """A threshold that at least `k` elements of each segment reach, or zero: the upper half of the
    `k`-th largest of the maxima of groups of each row's elements.
    """
    n, width = x.shape[0], segments.width
    wanted = _TOPS * sum(ks) * width / sum(segments.sizes)
    # Divisors of a row; those below the lanes also divide the lanes.
    fit = (g for g in range(1, width + 1) if width % g == 0 and (g >= _LANES or _LANES % g == 0))
    groups = next(g for g in fit if g >= min(wanted, width))
    tops = size_bits(x).reshape(n, segments.rows, width)
    for lanes in (max(_LANES, groups), groups):  # Fewer lanes would leave most of a register idle.
        if lanes < tops.shape[2]:
            tops = tops.reshape(n, segments.rows, -1, lanes)
            tops = lax.optimization_barrier(jnp.max(tops, axis=2))
    tops = lax.optimization_barrier((tops >> 16).astype(jnp.int16)).reshape(n, -1)
    grouped = Segments(tuple(rows * groups for rows in segments.lengths), groups)
    found = selection.kth_largest(tops, _numbers(ks, n), Leaves(grouped))
    return found.astype(jnp.int32) << 16


def _numbers(numbers: tuple[int, ...] | list[int], n: int) -> Int32[Array, "n segments"]:
    """The same numbers for each row."""
    return jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (n, len(numbers)))

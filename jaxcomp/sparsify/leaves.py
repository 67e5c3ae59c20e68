"""Selection in buckets of several leaves: as many elements of each leaf as it would send alone."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int32, Integer, UInt32

from jaxcomp.numerics import segments as segments_
from jaxcomp.numerics.segments import Segments
from jaxcomp.sparsify import bitmap, selection
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.sparsify.competitors import Leaves, PerPart, size_bits
from jaxcomp.sparsify.unjoined import Sample, UnjoinedLeaves
from jaxcomp.types import Array

_WIDTHS = (512, 128, 32)
"""Elements of a row of candidates: the widest whose padding is an eighth at most."""


def top_k(
    x: Any, ks: tuple[int, ...], parts: Leaves, low: PerPart | None = None
) -> tuple[UInt32[Array, "n k"], Array]:
    """Places of the `k` largest `|x|` of each segment, ascending, and these elements; ties go to
    the lower place.

    Among few candidates, the `k`-th largest is found digit by digit.

    Args:
        x: the elements.
        ks: the number of each segment.
        parts: the segments.
        low: about the threshold that `k` elements reach; None to find it.
    """
    found = _candidates(x, ks, parts, low)
    own, k = Leaves(found.slots), _numbers(ks, len(found.places))
    last = own.spread(selection.kth_largest(found.sizes, k, own))
    chosen = selection.at_most(
        bitmap.of(found.sizes >= last), bitmap.of(found.sizes > last), k, own
    )
    chosen = bitmap.places(chosen, sum(ks), bitmap.from_first(len(k)))
    places, values = (
        jnp.take_along_axis(each, chosen, axis=1) for each in (found.places, found.values)
    )
    return places.astype(jnp.uint32), values


class _Candidates(NamedTuple):
    """Elements among which are the largest ones of each segment.

    Attributes:
        places: ascending, in the slots of each segment.
        values: the elements.
        sizes: `size_bits`, -1 in slots that are not used.
        slots: those of each segment.
    """

    places: Int32[Array, "n slots"]
    values: Array
    sizes: Int32[Array, "n slots"]
    slots: Segments


def _candidates(
    x: Any, ks: tuple[int, ...], parts: Leaves, low: PerPart | None = None
) -> _Candidates:
    """The `k` largest of each segment and a few more; first zeros where too few are not zero."""
    low = _least_reached(x, ks, parts) if low is None else low
    rooms = tuple(
        min(size, k + k // 4 + 3 * math.isqrt(k) + 8)
        for size, k in zip(parts.sizes, ks, strict=True)
    )
    k, room = _numbers(ks, len(low)), _numbers(rooms, len(low))
    hits = selection.enclose(x, k, room, jnp.maximum(low, 1), parts)
    own = next(
        own
        for own in (Segments(rooms, width) for width in _WIDTHS)
        if own.width == 32 or 8 * own.size <= 9 * sum(rooms)
    )
    number = parts.ones(hits)
    places = slots(bitmap.places(hits, sum(rooms), bitmap.from_first(len(k))), number, own)
    values = parts.take(x, places, own)
    sizes = jnp.where(own.real(number), size_bits(values), -1)
    return _Candidates(places, values, sizes, own)


def as_many_as_fit(
    x: Any,
    hits: Words,
    rooms: tuple[int, ...],
    start: UInt32[Array, "n segments"],
    parts: Leaves,
) -> tuple[UInt32[Array, "n room"], Int32[Array, "n segments"]]:
    """Places of as many hits of each segment as there is room for, and how many they are.

    If there are more, a cyclic run of them with a random start is left out, as in
    `selection.some`. Non-finite elements are never left out.

    Args:
        x: the elements.
        hits: as from `bitmap.of`.
        rooms: places for each segment.
        start: a random word for each segment.
        parts: the segments.
    """
    n, room = len(start), _numbers(rooms, len(start))
    total = parts.ones(hits)

    def trim(x: Any, hits: Array) -> Array:
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


def first(
    hits: Words, rooms: tuple[int, ...], parts: Leaves
) -> tuple[UInt32[Array, "n room"], Int32[Array, "n segments"]]:
    """Places of the first hits of each segment, and how many they are."""
    total, room = parts.ones(hits), _numbers(rooms, len(hits))
    over = jnp.any(total > room)
    hits = lax.cond(over, lambda hits: parts.first(hits, room), lambda hits: hits, hits)
    places = bitmap.places(hits, sum(rooms), bitmap.from_first(len(hits)))
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
    x: Any, ks: tuple[int, ...], above: tuple[int, ...], parts: Leaves
) -> Int32[Array, "n segments"]:
    """About the threshold that `k` elements of each segment reach, as `size_bits`, from samples at
    equal distances that hold about `above` of them.
    """
    strides = [
        max(1, min(int(size * 2**-16), int(k / many)))
        for size, k, many in zip(parts.sizes, ks, above, strict=True)
    ]
    strides = [stride - 1 + stride % 2 if stride >= 3 else 1 for stride in strides]
    sizes = tuple(-(-s // stride) for s, stride in zip(parts.sizes, strides, strict=True))
    wanted = tuple(
        min(seen, max(1, round(k * seen / size)))
        for k, seen, size in zip(ks, sizes, parts.sizes, strict=True)
    )
    if isinstance(parts, UnjoinedLeaves):
        # As large a threshold as for all elements, of which few more than wanted are in the sample.
        found = _candidates(x, wanted, Sample(parts, strides), _least_reached(x, ks, parts))
        numbers, own = found.sizes, found.slots
    else:
        n, own = len(x), segments_.of(sizes)
        at = own.place(n) * own.per_element(_numbers(strides, n))
        at = at + own.per_element(_numbers(parts.segments.starts, n))
        real = own.real(_numbers(sizes, n))
        numbers = jnp.where(real, size_bits(selection.take(x, at)), -1)
    return selection.kth_largest(numbers, _numbers(wanted, len(numbers)), Leaves(own))


def _least_reached(x: Any, ks: tuple[int, ...], parts: Leaves) -> Int32[Array, "n segments"]:
    """A threshold that `k` elements of each segment or a few more reach, rarely fewer, or zero: the
    upper half of one of the largest maxima of groups of elements.
    """
    tops, grouped, numbers = parts.tops(x, ks)
    found = selection.kth_largest(tops, _numbers(numbers, len(tops)), Leaves(grouped))
    found = found.astype(jnp.int32) << 16
    return found if parts.order is None else found[:, np.argsort(parts.order)]


def _numbers(numbers: Sequence[int], n: int) -> Int32[Array, "n segments"]:
    """The same numbers for each row."""
    return jnp.broadcast_to(jnp.asarray(numbers, jnp.int32), (n, len(numbers)))

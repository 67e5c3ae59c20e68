"""Buckets whose long leaves are read where they lie.

Joined to one array, leaves are memory that every call maps anew, which takes a CPU several times as
long as a pass over it. Only short leaves are joined here. Each long one is reduced by a kernel for
its size to what is put together: a thirty-second of it, as the bits of a bitmap or as maxima.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int16

from jaxcomp.backend import xla
from jaxcomp.numerics.segments import Segments, change_width
from jaxcomp.sparsify import bitmap
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.sparsify.competitors import INF, Leaves, PerPart, size_bits
from jaxcomp.types import Array

LONG = 2**17
"""Elements of the shortest leaf that is read where it lies."""

_MOST_SIZES = 8
"""Sizes of such leaves: each is 15 to 25 kernels, of which one takes a CPU 20 ms to compile."""

_TOPS_ROW = 1024
"""Maxima of a leaf are in whole rows: many fill a vector register when they are counted."""

_TOPS_TILE = 8192
"""Elements that are read together to find maxima, in as long rows as many groups allow."""

_GROUPS = 6
"""Groups of a long leaf, as a multiple of the elements that are wanted."""

_MORE = 1.02
"""Maxima that are counted, as a multiple of the elements wanted: with those of them that share a
group, and those between a threshold and its upper half, about a seventh more are found."""

_COUNTED = 800
"""Elements wanted from which on every second tile is enough, and every `s`-th from `s - 1` times
as many: the number of elements above a threshold is then known to about 3 %.
"""

_TILE = 1024
"""Elements of a long leaf are in whole tiles, and a rest."""


class Unjoined(NamedTuple):
    """The elements of one bucket.

    Attributes:
        long: each long leaf, flat.
        short: `[1, size]`, the others one after another, each filled up with zeros to whole rows.
    """

    long: tuple[Array, ...]
    short: Array


def long_leaves(sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the leaves that are worth a program for their size, in order."""
    total = {size: size * sizes.count(size) for size in set(sizes) if size >= LONG}
    chosen = sorted(total, key=lambda size: (-total[size], size))[:_MOST_SIZES]
    return tuple(number for number, size in enumerate(sizes) if size in chosen)


@xla.compile_separately
def _reach(part: Array, low: Array, number: Array) -> Array:
    hits = size_bits(part) >= lax.dynamic_index_in_dim(low[0], number, keepdims=False)
    return bitmap.of_words(hits[None])[0, : part.size // bitmap.WORD]


@xla.compile_separately
def _reach_each(x: Array, low: Array) -> Array:
    return bitmap.of_words(size_bits(x) >= low)[0]


@functools.lru_cache(maxsize=256)
def _tops(fan: int, step: int) -> Callable[[Array], Array]:
    """Maxima of groups of `fan` elements, in each `step`-th tile."""

    def separate(leaf: Array) -> Array:
        tiles = leaf.size // (step * _TOPS_TILE)
        rows = leaf[: tiles * step * _TOPS_TILE].reshape(tiles, step, fan, _TOPS_TILE // fan)
        return (jnp.max(size_bits(rows[:, 0]), axis=1) >> 16).astype(jnp.int16).reshape(-1)

    return xla.compile_separately(separate)


# Jitted, so that a program has them once for each size of a leaf.
@jax.jit
def _take(leaf: Array, places: Array, begin: Array) -> Array:
    return jnp.take(leaf, places - begin, mode="clip")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(size: int, beyond: int, places: Array, values: Array, by: Array, zero: Array) -> Array:
    # From a value that is not known: equal constants of several leaves would be one, and copied.
    zeros = jnp.broadcast_to(zero, (size,))
    return zeros.at[_shift(beyond, places, by)].add(
        values, indices_are_sorted=True, unique_indices=True, mode="drop"
    )


def _shift(beyond: int, places: Array, by: Array) -> Array:
    return jnp.where(places < beyond, places - by, places)


def _runs(short: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring short leaves: the first, the last, and where the first one starts."""
    found: list[tuple[int, int, int]] = []
    for number, start in zip(short, starts, strict=True):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number, found[-1][2])
        else:
            found.append((number, number, start))
    return found


def scatter(
    places: Array, values: Array, slots: Segments, segments: Segments, long: Sequence[int]
) -> tuple[Array, ...]:
    """Leaves with values at these places, and zeros elsewhere.

    Args:
        places: `[1, slots]`, ascending in each segment; those beyond all segments are left out.
        values: of the same shape.
        slots: those of each segment.
        segments: the leaves.
        long: the numbers of the long ones.
    """
    short = tuple(number for number in range(segments.number) if number not in set(long))
    joined = Segments(tuple(segments.sizes[number] for number in short), segments.width)

    runs = [(number, number, 0) for number in long] + _runs(short, joined.starts)
    begins = [slots.starts[first] for first, *_ in runs]
    lengths = [slots.ends[last] - slots.starts[first] for first, last, _ in runs]
    by = [segments.starts[first] - start for first, _, start in runs]
    parts = list(
        zip(
            xla.cut(places[0], begins, lengths),
            xla.cut(values[0], begins, lengths),
            xla.hide(by, xla.zero_after(places)),
            strict=True,
        )
    )
    zeros = xla.hide((0,) * (len(long) + 1), xla.zero_after(places))
    zeros = [zero.astype(values.dtype) for zero in zeros]
    found = {
        number: _fill(segments.sizes[number], segments.size, *part, zero)
        for number, part, zero in zip(long, parts, zeros, strict=False)
    }
    if short:
        each = [_shift(segments.size, at, start) for at, _, start in parts[len(long) :]]
        own = [part for _, part, _ in parts[len(long) :]]
        at, own = map(jnp.concatenate, (each, own))
        whole = _fill(joined.size, segments.size, at, own, jnp.zeros((), at.dtype), zeros[-1])
        found |= dict(zip(short, joined.cut(whole[None]), strict=True))
    return tuple(found[number] for number in range(segments.number))


class UnjoinedLeaves(Leaves):
    """Each leaf of an `Unjoined` is a part, at the place that it has in a bucket of all leaves.

    Args:
        segments: the leaves in a bucket.
        long: the numbers of the long ones.
    """

    def __init__(self, segments: Segments, long: Sequence[int]):
        super().__init__(segments)
        self.long = tuple(long)
        self.short = tuple(n for n in range(segments.number) if n not in set(long))
        self.joined = Segments(tuple(segments.sizes[n] for n in self.short), segments.width)
        self._runs = _runs(self.short, self.joined.starts)
        self._begins = [segments.starts[number] for number in self.long]

    def split(self, leaves: Sequence[Array]) -> Unjoined:
        """The elements of these leaves, which are flat."""
        short = [leaves[number] for number in self.short]
        joined = self.joined.join(short) if short else jnp.zeros((1, 0), leaves[0].dtype)
        return Unjoined(tuple(leaves[number] for number in self.long), joined)

    def reach(self, x: Unjoined, low: PerPart) -> Words:
        words: list[tuple[int, Array]] = []
        numbers = xla.hide(self.long, xla.zero_after(low))
        for begin, leaf, number in zip(self._begins, x.long, numbers, strict=True):
            whole = leaf.size // _TILE * _TILE
            words.append((begin // bitmap.WORD, _reach(leaf[:whole], low, number)))
            if whole < leaf.size:
                rest = jnp.pad(leaf[whole:], (0, -leaf.size % bitmap.WORD))
                words.append(((begin + whole) // bitmap.WORD, _reach(rest, low, number)))
        if self.short:
            short = _reach_each(x.short, self.joined.per_element(low[:, np.asarray(self.short)]))
            for first, last, start in self._runs:
                begin, end = (
                    place // bitmap.WORD
                    for place in (self.segments.starts[first], self.segments.ends[last])
                )
                at = start // bitmap.WORD
                words.append((begin, short[at : at + end - begin]))
        return xla.place(words, bitmap.words(self.segments.size))[None]

    def nonfinite(self, x: Unjoined) -> PerPart:
        words = self.reach(x, jnp.full((1, len(self.sizes)), INF, jnp.int32))
        begin = lax.broadcasted_iota(jnp.int32, words.shape, 1) * bitmap.WORD
        last = begin + (bitmap.WORD - 1) - lax.clz(words).astype(jnp.int32)
        each = self.segments.width // bitmap.WORD
        last = jnp.where(words == 0, -1, last)[:, : self.segments.rows * each]
        rows = jnp.max(last.reshape(1, self.segments.rows, each), axis=2)
        return self.segments.largest(rows + 1) - 1

    def take(self, x: Unjoined, places: Array, slots: Segments) -> Array:
        begins, ends, places = slots.starts, slots.ends, places[0]
        lengths = [ends[number] - begins[number] for number in self.long]
        own = xla.cut(places, [begins[number] for number in self.long], lengths)
        # Constants would be kernels of their own: see `xla.cut`.
        starts = xla.hide(self._begins, xla.zero_after(places))
        found = [
            (begins[number], _take(leaf, some, start))
            for number, leaf, some, start in zip(self.long, x.long, own, starts, strict=True)
        ]
        moved = [
            places[begins[first] : ends[last]] - (self.segments.starts[first] - start)
            for first, last, start in self._runs
        ]
        if moved:
            short, at = jnp.take(x.short[0], jnp.concatenate(moved), mode="clip"), 0
            for (first, *_), part in zip(self._runs, moved, strict=True):
                found.append((begins[first], short[at : at + part.size]))
                at += part.size
        return xla.place(found, slots.size)[None]

    def tops(
        self, x: Unjoined, ks: tuple[int, ...]
    ) -> tuple[Int16[Array, "n groups"], Segments, tuple[int, ...]]:
        sizes, numbers = list(self.segments.sizes), list(ks)
        short, own = jnp.zeros((1, 0), jnp.int16), Segments((), _TOPS_ROW)
        if self.short:
            few = tuple(ks[number] for number in self.short)
            short, narrow, few = Leaves(self.joined).tops(x.short, few)
            own = Segments(narrow.sizes, _TOPS_ROW)
            short = change_width(short, narrow, own)
            for number, size, k in zip(self.short, own.sizes, few, strict=True):
                sizes[number], numbers[number] = size, k
        tops = []
        for number, leaf in zip(self.long, x.long, strict=True):
            k = ks[number]
            fan = 1 << min(8, max(0, math.floor(math.log2(leaf.size / (_GROUPS * k)))))
            step = max(step for step in (1, 2, 4, 8) if step == 1 or k > _COUNTED * (step - 1))
            tops.append(_tops(fan, step)(leaf))
            sizes[number] = tops[-1].size
            numbers[number] = max(1, round(_MORE * k * fan * tops[-1].size / leaf.size))
        found = Segments(tuple(sizes), _TOPS_ROW)
        placed = [(found.starts[number], own) for number, own in zip(self.long, tops, strict=True)]
        for first, last, start in _runs(self.short, own.starts):
            begin, end = found.starts[first], found.ends[last]
            placed.append((begin, short[0, start : start + end - begin]))
        return xla.place(placed, found.size)[None], found, tuple(numbers)


class Sample(UnjoinedLeaves):
    """Every stride-th element of each leaf, the first one included.

    The others are masked in bitmaps. To cut them out, a CPU would take longer.

    Args:
        parts: all elements.
        strides: of each leaf.
    """

    def __init__(self, parts: UnjoinedLeaves, strides: Sequence[int]):
        super().__init__(parts.segments, parts.long)
        sizes = self.segments.sizes
        self.sizes = tuple(-(-size // step) for size, step in zip(sizes, strides, strict=True))
        self._mask = self._every(strides)

    def _every(self, strides: Sequence[int]) -> Words:
        """The bitmap of the elements in the sample, and of some that fill rows after them."""
        like = self.none(1)
        patterns = [sum(1 << bit for bit in range(0, bitmap.WORD, step)) for step in strides]
        starts = [start // bitmap.WORD for start in self.segments.starts]
        every, pattern, start = (
            self.per_word(jnp.asarray(numbers, dtype)[None], like)
            for numbers, dtype in (
                (strides, jnp.int32),
                (patterns, jnp.uint32),
                (starts, jnp.int32),
            )
        )
        place = (lax.broadcasted_iota(jnp.int32, like.shape, 1) - start) * bitmap.WORD
        first = lax.rem(every - lax.rem(place, every), every)
        return jnp.where(first < bitmap.WORD, pattern << first.astype(jnp.uint32), 0)

    def reach(self, x: Unjoined, low: PerPart) -> Words:
        return super().reach(x, low) & self._mask

    def first(self, hits: Words, k: PerPart) -> Words:
        return super().first(hits & self._mask, k)

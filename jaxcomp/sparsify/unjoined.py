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
from jaxcomp.sparsify.competitors import INF, Leaves, PerPart, compile_reach, size_bits
from jaxcomp.types import Array

LONG = 2**18
"""Elements of the shortest leaf that is read where it lies: each leaf takes time to compile."""

_MOST_SIZES = 8
"""Sizes of such leaves: each has kernels of its own, which take a CPU long to compile."""

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


class Unjoined(NamedTuple):
    """The elements of one bucket, in an order in which the long leaves are first.

    Attributes:
        long: each long leaf, flat.
        short: `[1, size]`, the others one after another, each filled up with zeros to whole rows.
        numbers: `int32[]` each, 0, 1 and so on, of which the compiler does not know the values.
        rows: `int32[rows]`, for each row of the bucket its number in this order.
    """

    long: tuple[Array, ...]
    short: Array
    numbers: tuple[Array, ...]
    rows: Array


def long_leaves(sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the leaves that are worth a program for their size, in order."""
    long = [size for size in sizes if size >= LONG and size % bitmap.WORD == 0]
    chosen = sorted(set(long), key=lambda size: (-size * long.count(size), size))[:_MOST_SIZES]
    return tuple(number for number, size in enumerate(sizes) if size in chosen)


@xla.compile_separately
def _reach(leaf: Array, low: Array, number: Array) -> Array:
    words = size_bits(leaf).reshape(-1, bitmap.WORD) >= _entry(low, number)
    return bitmap.of_words(words)[:, 0]


@functools.lru_cache(maxsize=256)
def _tops(fan: int, step: int) -> Callable[[Array], Array]:
    """Maxima of groups of `fan` elements, in each `step`-th tile."""

    def separate(leaf: Array) -> Array:
        tiles = leaf.size // (step * _TOPS_TILE)
        rows = leaf[: tiles * step * _TOPS_TILE].reshape(tiles, step, fan, _TOPS_TILE // fan)
        return (jnp.max(size_bits(rows[:, 0]), axis=1) >> 16).astype(jnp.int16).reshape(-1)

    return xla.compile_separately(separate)


# Jitted, so that a program has them once for each size of a leaf: places are entries of tables.
@functools.partial(jax.jit, static_argnums=0)
def _take(
    k: int, found: Array, leaf: Array, places: Array, slots: Array, begins: Array, number: Array
) -> Array:
    slot, begin = _entry(slots, number), _entry(begins, number)
    part = jnp.take(leaf, _cut(places, slot, k) - begin, mode="clip")
    return _put(found, part, slot)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(
    size: int, k: int, places: Array, values: Array, slots: Array, begins: Array, number: Array
) -> Array:
    """A leaf; places beyond all leaves are beyond it, too."""
    slot, begin = _entry(slots, number), _entry(begins, number)
    at, own = (_cut(x, slot, k) for x in (places, values))
    # Equal constants of several leaves would be one, and copied.
    zeros = jnp.broadcast_to(jnp.minimum(number, 0).astype(values.dtype), (size,))
    return zeros.at[at - begin].add(own, indices_are_sorted=True, unique_indices=True, mode="drop")


@jax.jit
def _place(whole: Array, part: Array, begins: Array, number: Array) -> Array:
    return _put(whole, part, _entry(begins, number))


def _join(
    parts: Sequence[Array], begins: Sequence[int], size: int, numbers: Sequence[Array]
) -> Array:
    """Arrays at their places in one of this size, and zeros between them."""
    whole, table = jnp.zeros(size, parts[0].dtype), _table(begins)
    for part, number in zip(parts, numbers, strict=False):
        whole = _place(whole, part, table, number)
    return whole


# With indices that are not negative, which halves the operations.
def _entry(table: Array, number: Array) -> Array:
    return lax.dynamic_index_in_dim(table, number, keepdims=False, allow_negative_indices=False)


def _cut(x: Array, begin: Array, length: int) -> Array:
    return lax.dynamic_slice(x, (begin,), (length,), allow_negative_indices=False)


def _put(whole: Array, part: Array, begin: Array) -> Array:
    return lax.dynamic_update_slice(whole, part, (begin,), allow_negative_indices=False)


def _table(numbers: Sequence[int]) -> Array:
    return jnp.asarray(numbers, jnp.int32)


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
        self.order = (*self.long, *self.short)
        self._inner = Segments(tuple(segments.sizes[n] for n in self.order), segments.width)
        self.joined = Segments(self._inner.sizes[len(long) :], segments.width)
        self._first = (*self._inner.starts, self._inner.size)[len(long)]

    def split(self, leaves: Sequence[Array]) -> Unjoined:
        """The elements of these leaves, which are flat."""
        short = [leaves[number] for number in self.short]
        joined = self.joined.join(short) if short else jnp.zeros((1, 0), leaves[0].dtype)
        numbers, rows = self._order_of(leaves[self.long[0]])
        return Unjoined(tuple(leaves[number] for number in self.long), joined, numbers, rows)

    def _order_of(self, x: Array) -> tuple[tuple[Array, ...], Array]:
        """The numbers and rows of an `Unjoined`."""
        moved = np.zeros(self.segments.number, np.int32)
        moved[[*self.long, *self.short]] = self._inner.begins
        moved = self.segments.per_row(jnp.asarray(moved - self.segments.begins)[None])[0]
        row = lax.iota(jnp.int32, self.segments.rows) + moved
        return xla.hide(range(len(self.long) + 1), xla.zero_after(x)), row

    def scatter(self, places: Array, values: Array, slots: Segments) -> tuple[Array, ...]:
        """Leaves with values at these places, and zeros elsewhere.

        Args:
            places: `[1, slots]`, ascending in each segment; those beyond all segments are left out.
            values: of the same shape.
            slots: those of each segment.
        """
        places, values = places[0], values[0]
        numbers, rows = self._order_of(places)
        tables = self._tables(slots)
        found = {}
        for n, number in zip(self.long, numbers, strict=False):
            sizes = self.segments.sizes[n], slots.sizes[n]
            found[n] = _fill(*sizes, places, values, *tables, number)
        if self.short:
            at = self._in_short(rows, places)
            spare = self.joined.size + lax.iota(jnp.int32, slots.size)
            at = jnp.where((at < 0) | (places >= self.segments.size), spare, at)
            zeros = jnp.zeros(self.joined.size, values.dtype)
            short = zeros.at[at].add(values, unique_indices=True, mode="drop")
            found |= dict(zip(self.short, self.joined.cut(short[None]), strict=True))
        return tuple(found[number] for number in range(self.segments.number))

    def _tables(self, slots: Segments) -> tuple[Array, Array]:
        """The first slot and the first element of each long leaf."""
        slot, begin = ([each.starts[n] for n in self.long] for each in (slots, self.segments))
        return _table(slot), _table(begin)

    def _in_short(self, rows: Array, places: Array) -> Array:
        """Where elements of the bucket are among the short leaves; negative for long ones."""
        width = self.segments.width
        row = jnp.take(rows, places // width, mode="clip")
        return row * width + places % width - self._first

    def reach(self, x: Unjoined, low: PerPart) -> Words:
        each, n = self.segments.width // bitmap.WORD, len(self.long)
        own = low[0, np.asarray(self.order)]
        parts = [_reach(leaf, own, number) for leaf, number in zip(x.long, x.numbers, strict=False)]
        if self.short:
            short = compile_reach(self.joined)(x.short, own[None, n:])
            parts.append(short[0, : self.joined.rows * each])
        words = _join(
            parts,
            [begin * each for begin in self._inner.begins],
            self._inner.rows * each,
            x.numbers,
        )
        words = jnp.take(words.reshape(-1, each), x.rows, axis=0, mode="clip").reshape(1, -1)
        return jnp.pad(words, ((0, 0), (0, bitmap.words(self.segments.size) - words.size)))

    def nonfinite(self, x: Unjoined) -> PerPart:
        words = self.reach(x, jnp.full((1, len(self.sizes)), INF, jnp.int32))
        begin = lax.broadcasted_iota(jnp.int32, words.shape, 1) * bitmap.WORD
        last = begin + (bitmap.WORD - 1) - lax.clz(words).astype(jnp.int32)
        each = self.segments.width // bitmap.WORD
        last = jnp.where(words == 0, -1, last)[:, : self.segments.rows * each]
        rows = jnp.max(last.reshape(1, self.segments.rows, each), axis=2)
        return self.segments.largest(rows + 1) - 1

    def take(self, x: Unjoined, places: Array, slots: Segments) -> Array:
        places, tables = places[0], self._tables(slots)
        if self.short:
            found = jnp.take(x.short[0], self._in_short(x.rows, places), mode="clip")
        else:
            found = jnp.zeros(slots.size, x.short.dtype)
        for n, leaf, number in zip(self.long, x.long, x.numbers, strict=False):
            found = _take(slots.sizes[n], found, leaf, places, *tables, number)
        return found[None]

    def tops(
        self, x: Unjoined, ks: tuple[int, ...]
    ) -> tuple[Int16[Array, "n groups"], Segments, tuple[int, ...]]:
        tops, sizes, numbers = [], [], []
        for n, leaf in zip(self.long, x.long, strict=True):
            k = ks[n]
            fan = 1 << min(8, max(0, math.floor(math.log2(leaf.size / (_GROUPS * k)))))
            step = max(step for step in (1, 2, 4, 8) if step == 1 or k > _COUNTED * (step - 1))
            tops.append(_tops(fan, step)(leaf))
            sizes.append(tops[-1].size)
            numbers.append(max(1, round(_MORE * k * fan * tops[-1].size / leaf.size)))
        if self.short:
            few = tuple(ks[n] for n in self.short)
            short, narrow, few = Leaves(self.joined).tops(x.short, few)
            own = Segments(narrow.sizes, _TOPS_ROW)
            tops.append(change_width(short, narrow, own)[0])
            sizes, numbers = [*sizes, *own.sizes], [*numbers, *few]
        found = Segments(tuple(sizes), _TOPS_ROW)
        return _join(tops, found.starts, found.size, x.numbers)[None], found, tuple(numbers)


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
        like = self.none(jnp.zeros((1, 1), jnp.int32))
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

"""The elements that compete to be sent: those of a row, or of each segment of a row."""

import abc
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int16, Int32

from jaxcomp.backend import xla
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize import totals
from jaxcomp.sparsify import bitmap
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.types import Array

PerPart = Int32[Array, "n parts"]
INF = 0x7F800000
TOP = 0x7FFFFFFF
"""Above the `size_bits` of every element."""

_TOPS = 3
"""Groups of a leaf, as a multiple of the elements that are wanted."""

_FAN = 16
_LANES = 32
"""Accumulators of a reduction, which the compiler vectorises."""

_ROW_LANES = 64
"""`_LANES` in rows of segments: comparisons of 32 lanes take five times as long."""

_FEWEST_LANES = 16
"""`_LANES` in shorter rows: the lanes of one register."""


def size_bits(x: Array) -> Int32[Array, "..."]:
    """`|x|` as integers of the same order, NaN above infinity; float64 is rounded to float32."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & TOP


class Parts(abc.ABC):
    """Counts and comparisons of the elements of `[n, size]`; those of one part compete."""

    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of a row, with those between its parts."""
        return sum(self.sizes)

    def none(self, like: PerPart) -> Words:
        """The bitmap of no element, which varies over the same mesh axes as `like`."""
        zeros = jnp.zeros_like(like[:, :1]).astype(jnp.uint32)
        return jnp.broadcast_to(zeros, (len(like), bitmap.words(self.elements)))

    @abc.abstractmethod
    def count(self, hits: Array) -> PerPart:
        """The number of hits in each part."""

    @abc.abstractmethod
    def at_least(self, numbers: Array, low: Array) -> PerPart:
        """The number of entries of each part that are at least the `low` of their part."""

    @abc.abstractmethod
    def reach(self, x: Array, low: PerPart) -> Words:
        """The bitmap of the elements whose `size_bits` are at least the `low` of their part."""

    @abc.abstractmethod
    def ones(self, hits: Words) -> PerPart:
        """The number of ones of a bitmap in each part."""

    @abc.abstractmethod
    def first(self, hits: Words, k: PerPart) -> Words:
        """The bitmap of the first `k` ones of each part."""

    @abc.abstractmethod
    def per_word(self, values: Array, like: Words) -> Array:
        """The value of each word's part, in a shape that a bitmap can be compared with."""

    @abc.abstractmethod
    def spread(self, values: Array) -> Array:
        """The value of each element's part, in a shape that `[n, size]` can be compared with."""

    @abc.abstractmethod
    def top(self, numbers: Int32[Array, "n size"]) -> PerPart:
        """The largest number of each part; numbers are at least -1."""

    def take(self, x: Any, places: Int32[Array, "n k"], slots: Segments) -> Array:
        """The elements at these places of each row; `slots` has those of each part."""
        del slots
        return jnp.take_along_axis(x, places, axis=1, mode="clip")

    def largest(self, x: Array) -> PerPart:
        """The largest `|x|` of each part, as `size_bits`."""
        return self.top(size_bits(x))

    def nonfinite(self, x: Array) -> PerPart:
        """The last place in the row of each part whose element is not finite, or -1."""
        place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return self.top(jnp.where(size_bits(x) >= INF, place, -1))


class Row(Parts):
    """The whole row is one part."""

    def __init__(self, size: int):
        self.sizes = (size,)

    def count(self, hits: Array) -> PerPart:
        return _reduce_rows(hits.astype(jnp.int32), functools.partial(jnp.sum, dtype=jnp.int32))

    def at_least(self, numbers: Array, low: Array) -> PerPart:
        return self.count(numbers >= low)

    def reach(self, x: Array, low: PerPart) -> Words:
        return bitmap.of(size_bits(x) >= low)

    def ones(self, hits: Words) -> PerPart:
        return bitmap.count(hits)[:, None]

    def first(self, hits: Words, k: PerPart) -> Words:
        return bitmap.first(hits, k)

    def per_word(self, values: Array, like: Words) -> Array:
        return values

    def spread(self, values: Array) -> Array:
        return values

    def top(self, numbers: Int32[Array, "n size"]) -> PerPart:
        return _reduce_rows(numbers, jnp.max)

    def largest(self, x: Array) -> PerPart:
        return size_bits(totals.max_abs(x))


class Leaves(Parts):
    """Each segment is a part.

    Args:
        segments: of a row.
    """

    order: tuple[int, ...] | None = None
    """The numbers of the parts in the order of `tops`, if it is another one."""

    def __init__(self, segments: Segments):
        self.segments, self.sizes = segments, segments.sizes

    def count(self, hits: Array) -> PerPart:
        return self.segments.total(_fold_lanes(self._lanes(hits.astype(jnp.int32)), _sum))

    def at_least(self, numbers: Array, low: Array) -> PerPart:
        # Compared by rows: by elements, the compiler would divide to find the row of each.
        rows = self._lanes(numbers) >= self.segments.per_row(low)[:, :, None, None]
        return self.segments.total(_fold_lanes(rows.astype(jnp.int32), _sum))

    def reach(self, x: Array, low: PerPart) -> Words:
        return compile_reach(self.segments)(x, low)

    def ones(self, hits: Words) -> PerPart:
        each = self.segments.width // bitmap.WORD
        words = hits[:, : self.segments.rows * each].reshape(len(hits), self.segments.rows, each)
        ones = lax.population_count(words).astype(jnp.int32)
        return self.segments.total(jnp.sum(ones, axis=2, dtype=jnp.int32))

    def spread(self, values: Array) -> Array:
        return self.segments.per_element(values)

    def tops(
        self, x: Any, ks: tuple[int, ...]
    ) -> tuple[Int16[Array, "n groups"], Segments, tuple[int, ...]]:
        """The upper halves of the maxima of groups of elements, their segments, and how many of
        each segment's are as large as about `k` of its elements.
        """
        n, width = x.shape[0], self.segments.width
        wanted = _TOPS * sum(ks) / sum(self.segments.sizes)
        # Divisors of a row; those below the lanes also divide the lanes.
        fit = (g for g in range(1, width + 1) if width % g == 0)
        fit = (g for g in fit if g >= _LANES or _LANES % g == 0)
        groups = next(g for g in fit if g >= min(wanted * width, width))
        tops = size_bits(x).reshape(n, self.segments.rows, width)
        for lanes in (max(_LANES, groups), groups):  # Fewer lanes leave most of a register idle.
            if lanes < tops.shape[2]:
                tops = tops.reshape(n, self.segments.rows, -1, lanes)
                tops = lax.optimization_barrier(jnp.max(tops, axis=2))
        tops = lax.optimization_barrier((tops >> 16).astype(jnp.int16)).reshape(n, -1)
        return tops, Segments(tuple(rows * groups for rows in self.segments.lengths), groups), ks

    def ahead(self, hits: Words) -> PerPart:
        """The ones of a bitmap before each part."""
        found = self.ones(hits)
        return jnp.cumsum(found, axis=1, dtype=jnp.int32) - found

    def first(self, hits: Words, k: PerPart) -> Words:
        return bitmap.first(hits, self.per_word(self.ahead(hits) + k, hits))

    def per_word(self, values: Array, like: Words) -> Array:
        each = self.segments.width // bitmap.WORD
        words = jnp.repeat(self.segments.per_row(values), each, axis=1)
        return jnp.pad(words, ((0, 0), (0, like.shape[1] - words.shape[1])))

    @property
    def elements(self) -> int:
        return self.segments.size

    def top(self, numbers: Int32[Array, "n size"]) -> PerPart:
        return self.segments.largest(_fold_lanes(self._lanes(numbers), jnp.max) + 1) - 1

    def _lanes(self, numbers: Array) -> Array:
        """The rows of the segments, `[n, rows, fan, lanes]`."""
        n, width = numbers.shape[0], self.segments.width
        fan = next(f for f in range(max(1, width // _ROW_LANES), 0, -1) if width % f == 0)
        return numbers.reshape(n, self.segments.rows, fan, width // fan)


_sum = functools.partial(jnp.sum, dtype=jnp.int32)


def _fold_lanes(lanes: Int32[Array, "n rows fan lanes"], reduce: Callable[..., Array]) -> Array:
    """The sum or maximum of each row, `[n, rows]`."""
    if lanes.shape[2] == 1:
        return reduce(lanes, axis=(2, 3))
    return reduce(lax.optimization_barrier(reduce(lanes, axis=2)), axis=2)


@functools.lru_cache(maxsize=256)
def compile_reach(segments: Segments) -> Callable[..., Array]:
    """One function of a program, however often it is used."""

    def separate(x: Array, low: Array) -> Array:
        hits = size_bits(x) >= segments.per_element(low)
        return lax.platform_dependent(hits, cpu=bitmap.of_words, default=bitmap.of)

    return xla.compile_separately(separate)


def _reduce_rows(numbers: Int32[Array, "n size"], reduce: Callable[..., Array]) -> Array:
    """The sum or maximum of each row, `[n, 1]`."""
    n, size = numbers.shape
    fan = min(_FAN, max(1, size // _FEWEST_LANES))
    lanes = _LANES if fan == _FAN else _FEWEST_LANES
    whole = size // (fan * lanes) * fan * lanes
    parts = []
    if whole:
        rows = numbers[:, :whole].reshape(n, -1, fan, lanes)
        folded = lax.optimization_barrier(reduce(rows, axis=2))
        parts.append(reduce(folded, axis=(1, 2)))
    if whole < size or not parts:
        parts.append(reduce(numbers[:, whole:], axis=1))
    return reduce(jnp.stack(parts), axis=0)[:, None]

"""Buckets whose long leaves are read where they lie.

Joined to one array, leaves are memory that every call maps anew, which takes a CPU several times as
long as a pass over it. Only short leaves are joined here. Each long one is reduced by a kernel for
its size to what is put together: a thirty-second of it, as the bits of a bitmap or as maxima.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import xla
from jaxcomp.numerics.segments import Segments, change_width
from jaxcomp.sparsify import bitmap
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.sparsify.competitors import INF, Leaves, PerPart, size_bits
from jaxcomp.types import Array

LONG = 2**17
"""Elements of the shortest leaf that is read where it lies."""

_MOST_SIZES = 12
"""Sizes of such leaves: each is five kernels, of which one takes a CPU 20 ms to compile."""

_LANES = 32
"""Neighbours whose maxima are taken at once: fewer would leave most of a register idle."""

_TOPS_ROW = 1024
"""Maxima of a leaf are in whole rows: many fill a vector register when they are counted."""

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


# Jitted, so that a program has them once for each size of a leaf.
@functools.partial(jax.jit, static_argnums=1)
def _tops(part: Array, fan: int) -> Array:
    lanes, groups = max(_LANES, _TILE // fan), _TILE // fan
    numbers = size_bits(part).reshape(-1, _TILE // lanes, lanes)
    tops = lax.optimization_barrier((jnp.max(numbers, axis=1) >> 16).astype(jnp.int16))
    if groups < lanes:
        tops = lax.optimization_barrier(jnp.max(tops.reshape(-1, lanes // groups, groups), axis=1))
    return tops.reshape(-1)


@jax.jit
def _take(leaf: Array, places: Array, begin: Array) -> Array:
    return jnp.take(leaf, places - begin, mode="clip")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(size: int, beyond: int, places: Array, values: Array, by: Array) -> Array:
    zeros = jnp.zeros(size, values.dtype)
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
    found = {
        number: _fill(segments.sizes[number], segments.size, *part)
        for number, part in zip(long, parts, strict=False)
    }
    if short:
        each = [_shift(segments.size, at, start) for at, _, start in parts[len(long) :]]
        own = [part for _, part, _ in parts[len(long) :]]
        zero = jnp.zeros((), places.dtype)
        whole = _fill(joined.size, segments.size, *map(jnp.concatenate, (each, own)), zero)
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

    def tops(self, x: Unjoined, wanted: float) -> tuple[Array, Segments]:
        fan = 1 << min(8, max(0, math.floor(-math.log2(wanted))))
        sizes = [-(-size // _TILE) * _TILE // fan for size in self.sizes]
        short, own = jnp.zeros((1, 0), jnp.int16), Segments((), _TOPS_ROW)
        if self.short:
            short, narrow = Leaves(self.joined).tops(x.short, wanted)
            own = Segments(narrow.sizes, _TOPS_ROW)
            short = change_width(short, narrow, own)
            for number, size in zip(self.short, own.sizes, strict=True):
                sizes[number] = size
        found, tops = Segments(tuple(sizes), _TOPS_ROW), []
        for number, leaf in zip(self.long, x.long, strict=True):
            begin, whole = found.starts[number], leaf.size // _TILE * _TILE
            tops.append((begin, _tops(leaf[:whole], fan)))
            if whole < leaf.size:
                rest = jnp.pad(leaf[whole:], (0, -leaf.size % _TILE))
                tops.append((begin + whole // fan, _tops(rest, fan)))
        for first, last, start in _runs(self.short, own.starts):
            begin, end = found.starts[first], found.ends[last]
            tops.append((begin, short[0, start : start + end - begin]))
        return xla.place(tops, found.size)[None], found

    def sample(self, x: Unjoined, strides: Sequence[int]) -> "tuple[Unjoined, UnjoinedLeaves]":
        """Every stride-th element of each leaf, the first one included."""
        long = [leaf[:: strides[n]] for n, leaf in zip(self.long, x.long, strict=True)]
        sizes = [-(-size // stride) for size, stride in zip(self.sizes, strides, strict=True)]
        segments = Segments(tuple(sizes), self.segments.width)
        return Unjoined(tuple(long), x.short), UnjoinedLeaves(segments, self.long)

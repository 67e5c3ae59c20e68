"""Segments: several leaves in one bucket, each in whole rows of one width.

A codec that takes a leaf whole would be one program for every shape of leaf. Where leaves share a
bucket it is one program: maxima, sums and counts are taken of rows first, then of the rows of each
segment. All of them are integers, so their order does not matter and no segment depends on another.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Int32

from jaxcomp.backend import xla
from jaxcomp.types import Array

_WIDTHS = (32, 64, 160, 320, 640, 1280, 2560)
"""Row widths: multiples of the 32 bits of a word and, but for the first two, of its 20 trits."""

_PADDING = 1 / 256
"""The largest fraction of padding in rows wider than the narrowest."""

_MOST_ROWS = 2**15
"""The most rows of a segment, so that sums of 15-bit numbers fit a word."""

_MOST_COMPARED = 2**20
"""Comparisons of rows with segments that are made at once; a CPU holds them, in 4 MB."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """Stretches of a bucket, one after another, each filled up with zeros to whole rows.

    Attributes:
        sizes: elements of each segment, all positive.
        width: elements of a row.
    """

    sizes: tuple[int, ...]
    width: int

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Rows of each segment."""
        return tuple(-(-size // self.width) for size in self.sizes)

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        """The first row of each segment."""
        return tuple(int(begin) for begin in np.cumsum((0, *self.lengths[:-1])))

    @functools.cached_property
    def rows(self) -> int:
        """Rows of a bucket."""
        return sum(self.lengths)

    @property
    def number(self) -> int:
        """The number of segments."""
        return len(self.sizes)

    @property
    def size(self) -> int:
        """Elements of a bucket."""
        return self.rows * self.width

    @property
    def starts(self) -> tuple[int, ...]:
        """The first element of each segment."""
        return tuple(begin * self.width for begin in self.begins)

    @property
    def ends(self) -> tuple[int, ...]:
        """The element after the last row of each segment."""
        return (*self.starts[1:], self.size)

    def join(self, leaves: Sequence[Array], slices: int = 1) -> Array:
        """Flat leaves one after another in each bucket, `[slices, size]`: its slice of every leaf,
        filled up with zeros to whole rows.
        """
        parts = []
        for leaf, size, rows in zip(leaves, self.sizes, self.lengths, strict=True):
            short, padding = slices * size - leaf.size, rows * self.width - size
            if slices == 1:
                parts += [leaf, jnp.zeros(padding, leaf.dtype)] if padding else [leaf]
                continue
            each = (jnp.pad(leaf, (0, short)) if short else leaf).reshape(slices, size)
            parts.append(jnp.pad(each, ((0, 0), (0, padding))) if padding else each)
        return xla.join(parts)[None] if slices == 1 else jnp.concatenate(parts, axis=1)

    def cut(self, buckets: Array) -> list[Array]:
        """The inverse of `join`; a leaf that slices do not divide ends in zeros."""
        if buckets.shape[0] == 1:
            return xla.cut(buckets.reshape(-1), self.starts, self.sizes)
        return [
            buckets[:, start : start + size].reshape(-1)
            for start, size in zip(self.starts, self.sizes, strict=True)
        ]

    # Jitted, so that a program has them once, however often it calls them.
    @functools.partial(jax.jit, static_argnums=0)
    def per_row(self, values: Array) -> Array:
        """The value of each row's segment: `[n, segments]` to `[n, rows]`."""
        if self.number == 1:
            return jnp.broadcast_to(values, (values.shape[0], self.rows))
        return jnp.take(values, self._of_rows(), axis=1, mode="clip")

    def per_element(self, values: Array) -> Array:
        """The value of each element's segment: `[n, segments]` to `[n, size]`."""
        rows = self.per_row(values)
        if self.width == 1:
            return rows
        return jnp.broadcast_to(rows[..., None], (*rows.shape, self.width)).reshape(
            values.shape[0], -1
        )

    @functools.partial(jax.jit, static_argnums=0)
    def total(self, rows: Array) -> Array:
        """The sum of the rows of each segment: integers `[n, rows]` to `[n, segments]`."""
        if self.number == 1:
            return jnp.sum(rows, axis=1, keepdims=True, dtype=rows.dtype)
        empty = jnp.zeros((rows.shape[0], self.number), rows.dtype)
        ids = self._of_rows()
        return empty.at[:, ids].add(rows, indices_are_sorted=True, mode="drop")

    @functools.partial(jax.jit, static_argnums=0)
    def largest(self, rows: Array) -> Array:
        """The maximum of the rows of each segment, at least zero, `[n, segments]`."""
        if self.number == 1:
            return jnp.max(rows, axis=1, keepdims=True, initial=0)
        empty = jnp.zeros((rows.shape[0], self.number), rows.dtype)
        ids = self._of_rows()
        return empty.at[:, ids].max(rows, indices_are_sorted=True, mode="drop")

    def place(self, n: int) -> Int32[Array, "n size"]:
        """The place of each element in its segment."""
        starts = jnp.asarray(self.starts, jnp.int32)[None]
        at = lax.broadcasted_iota(jnp.int32, (n, self.size), 1)
        return at - self.per_element(jnp.broadcast_to(starts, (n, self.number)))

    def real(self, count: Int32[Array, "n segments"]) -> Bool[Array, "n size"]:
        """Whether each element is one of the first `count` of its segment."""
        return self.place(count.shape[0]) < self.per_element(count)

    def row_counts(self, count: Int32[Array, "n segments"]) -> Int32[Array, "n rows"]:
        """Elements of each row that are real, if the first `count` of each segment are."""
        begins = self.per_row(jnp.broadcast_to(jnp.asarray(self.begins, jnp.int32), count.shape))
        row = lax.broadcasted_iota(jnp.int32, (count.shape[0], self.rows), 1) - begins
        return jnp.clip(self.per_row(count) - row * self.width, 0, self.width)

    @functools.partial(jax.jit, static_argnums=0)
    def _of_rows(self) -> Int32[Array, " rows"]:
        """The segment of each row: counted in the program, since a table would be part of it."""
        # The barrier keeps the compiler from folding the table to a constant, which takes seconds.
        begins = lax.optimization_barrier(jnp.asarray(self.begins[1:], jnp.int32))
        if self.rows * self.number <= _MOST_COMPARED:  # One kernel, where a running sum is several.
            row = lax.iota(jnp.int32, self.rows)[:, None]
            return lax.optimization_barrier(jnp.sum(row >= begins[None], axis=1, dtype=jnp.int32))
        marks = jnp.zeros(self.rows, jnp.int32).at[begins].add(1, indices_are_sorted=True)
        return jnp.cumsum(marks, dtype=jnp.int32)


def of(sizes: Sequence[int]) -> Segments:
    """Segments of these sizes, in rows as wide as a padding of 0.4 % allows.

    Example:
        >>> of([64, 100]).width, of([2**20, 2**20 + 5]).width
        (32, 2560)
    """
    allowed = _PADDING * sum(sizes)
    fits = [width for width in _WIDTHS if sum(-size % width for size in sizes) <= allowed]
    width = max(fits, default=_WIDTHS[0])
    while max(sizes) > _MOST_ROWS * width:
        width *= 2
    return Segments(tuple(sizes), width)


def change_width(x: Array, before: Segments, after: Segments) -> Array:
    """The elements of segments of equal sizes, in rows of another width; zeros elsewhere."""
    if before == after:
        return x
    n = x.shape[0]
    shape = (n, after.number)
    place = after.place(n)
    starts = jnp.broadcast_to(jnp.asarray(before.starts, jnp.int32), shape)
    sizes = jnp.broadcast_to(jnp.asarray(after.sizes, jnp.int32), shape)
    found = jnp.take_along_axis(x, after.per_element(starts) + place, axis=1, mode="clip")
    return jnp.where(place < after.per_element(sizes), found, 0)

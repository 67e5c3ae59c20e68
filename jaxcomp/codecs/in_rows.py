"""A codec of buckets, over the rows of segments that have one scale each."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.backend import axes
from jaxcomp.base import Codec, Facts, WrappedCodec
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize import totals
from jaxcomp.types import Array, ArrayLike, AxisName, Key, Weights

_TIGHT = 1.004
"""Largest accepted ratio of the words of single rows to those of all rows as one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InRows(WrappedCodec):
    """A quantizer of leaves, where several leaves share a bucket.

    The rows of all segments are the buckets of `codec`. The scale is one for each segment, and all
    its rows use it, as if the workers had agreed on it: `codec` measures rows by `measure`, and
    gets the scales of all of them back as the state that `agreed` returns. What its payload has
    once for each bucket is sent once for each segment.

    Args:
        codec: a codec with buckets of one row.
        segments: the leaves.
    """

    codec: Any
    segments: Segments
    bucket_size = None

    @property
    def unbiased(self) -> bool:
        """Whether the codec is unbiased."""
        return self.codec.unbiased

    @property
    def linear(self) -> bool:
        """Whether the codec is linear."""
        return self.codec.linear

    @functools.cached_property
    def facts(self) -> Facts:
        """Clipped elements are counted leaf by leaf, by the codec that was chosen for them."""
        scales = self.codec.facts.scales_sums
        return dataclasses.replace(
            super().facts, bits_per_element=None, clips=False, scales_sums=scales
        )

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The variance bound of the longest segment."""
        del size, peak
        return self.codec.variance_bound(max(self.segments.sizes))

    def summable(self, workers: int) -> Codec:
        return InRows(codec=self.codec.summable(workers), segments=self.segments)

    def init(self, like: ArrayLike) -> tuple:
        del like
        return ()

    def agree(self, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
        """The agreed state of `codec` for the largest scales of all workers, once a segment."""
        del key
        if not self.codec.facts.agrees:
            return state
        return self.codec.agreed(axes.maximum(self._scales(x, count), axis_name), x.dtype)

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, tuple]:
        if isinstance(state, tuple) and not state:
            state = self.codec.agreed(self._scales(x, count), x.dtype)
        payload, _ = self.codec.encode(
            self._key(key),
            x.reshape(-1, self.segments.width),
            self.segments.row_counts(count).reshape(-1),
            jax.tree.map(self._to_rows, state),
        )
        return jax.tree.map(self._by_buckets, payload), ()

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        rows = jax.tree.map(self._by_rows, payload)
        side = None if side is None else jax.tree.map(self._to_rows, side)
        return self.codec.decode(self._key(key), rows, self._like(like), side).reshape(like.shape)

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Weights = None, side: Any = None
    ) -> Array:
        rows = jax.vmap(lambda payload: jax.tree.map(self._by_rows, payload))(payloads)
        side = None if side is None else jax.tree.map(self._to_rows, side)
        found = self.codec.decode_sum(self._key(keys), rows, self._like(like), weights, side)
        return found.reshape(like.shape)

    def _scales(self, x: Array, count: Array) -> Array:
        """The scale of each segment, `[n, segments]`."""
        rows, segments = x.reshape(-1, self.segments.width), self.segments
        counts = segments.per_row(count).reshape(-1, 1)
        found = self.codec.measure(rows, counts, totals.IN_XLA._replace(segments=segments))
        return found.reshape(-1, segments.rows)[:, jnp.asarray(segments.begins)]

    def _to_rows(self, values: Array) -> Array:
        return self.segments.per_row(values).reshape(-1)

    def _by_buckets(self, x: Array) -> Array:
        """A part of the payload: the words of rows, or a number of each row, by buckets."""
        rows = x.reshape(-1, self.segments.rows, *x.shape[1:])
        if x.ndim == 1:
            return rows[:, jnp.asarray(self.segments.begins)]  # Of each segment's first row.
        words, segments = rows.reshape(len(rows), -1), self.segments
        if not self._loose(x.shape[1]):
            return words
        return self.codec.repacked(x, segments.width, segments.size)

    def _by_rows(self, x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return self._to_rows(x)
        segments = self.segments
        if self._loose(self.codec.words(segments.width)):
            return self.codec.repacked(x, segments.size, segments.width)
        return x.reshape(len(x) * segments.rows, -1)

    def _loose(self, words: int) -> bool:
        """Whether the words of single rows are many more than those of all rows as one."""
        return words * self.segments.rows > _TIGHT * self.codec.words(self.segments.size)

    def _key(self, key: Key) -> Key:
        return key._replace(first=key.first * jnp.uint32(self.segments.rows))

    def _like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        rows = like.shape[0] * self.segments.rows
        return jax.ShapeDtypeStruct((rows, self.segments.width), like.dtype)

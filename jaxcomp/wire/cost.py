"""Bytes on the wire, from shapes alone."""

import concurrent.futures
import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import Codec
from jaxcomp.layout import batches as batches_
from jaxcomp.types import Array, Batches


def payload_like(batches: Batches) -> tuple[Any, ...]:
    """Shapes and dtypes of the payload of every batch, without computing any."""
    x64 = jax.config.read("jax_enable_x64")

    def like(batch: Any) -> Any:
        one = _payload_of_one(_Kind.of(batch), x64)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((batch.buckets, *x.shape[1:]), x.dtype), one
        )

    return tuple(map(like, batches))


class _Kind(NamedTuple):
    """The settings that determine the payload of a bucket."""

    codec: Codec
    size: int
    dtype: Any
    segments: int | None

    @classmethod
    def of(cls, batch: Any) -> "_Kind":
        segments = batch.segments
        number = None if segments is None else segments.number
        return cls(batch.codec, batch.size, batch.dtype, number)

    def like(self, buckets: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((buckets, self.size), self.dtype)

    def count(self, buckets: int) -> Array:
        more = () if self.segments is None else (self.segments,)
        return jnp.zeros((buckets, *more), jnp.int32)


@functools.lru_cache(maxsize=4096)
def _payload_of_one(kind: _Kind, x64: bool) -> Any:
    """The payload of one bucket, cached because tracing an encoder is slow."""
    del x64  # The dtypes of the payload may depend on it.

    def encode():
        key = batches_.batch_key(jnp.zeros(2, jnp.uint32), 0, 0)
        like = kind.like(1)
        x = jnp.zeros(like.shape, like.dtype)
        return kind.codec.encode(key, x, kind.count(1), kind.codec.init(like))[0]

    return jax.eval_shape(encode)


def agreed_bytes(batches: Batches, workers: int) -> Fraction:
    """Bytes that one device sends for the agreement between workers before encoding.

    It counts the arrays that the agreement adds to a codec's state, such as the scale of every
    bucket. It does not count arrays that only some steps agree on and the state keeps, such as
    adaptive levels.
    """
    x64 = jax.config.read("jax_enable_x64")

    def agreed(batch: Any) -> int:
        # The arrays are as long as there are buckets, or do not depend on their number.
        one = _agreed(_Kind.of(batch), 1, x64)
        if batch.buckets == 1:
            return one  # Tracing an agreement takes a tenth of a second.
        return one + (_agreed(_Kind.of(batch), 2, x64) - one) * (batch.buckets - 1)

    return ring(sum(map(agreed, batches)), workers)


@functools.lru_cache(maxsize=4096)
def _agreed(kind: _Kind, buckets: int, x64: bool) -> int:
    """The bytes that the agreement for this many buckets puts into an all-reduce."""
    codec, like = kind.codec, kind.like(buckets)
    if not codec.facts.agrees:
        return 0

    def agree(x):
        key = batches_.batch_key(jnp.zeros(2, jnp.uint32), 0, 0)
        state = codec.init(like)
        after = codec.agree(key, x, kind.count(buckets), state, "agree")
        return state, codec.side(after) if codec.facts.sided and codec.linear else after

    def shapes():
        rows = jax.ShapeDtypeStruct((1, *like.shape), like.dtype)
        with jax.enable_x64(x64):
            return jax.eval_shape(jax.vmap(agree, axis_name="agree"), rows)

    # In a separate thread, outside any mapped function, which would require types of its axes.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as alone:
        before, after = alone.submit(shapes).result()
    kept, all_of_it = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (before, after)
    )
    return max(all_of_it - kept, 0)


def ring_bytes(size: int, workers: int) -> int:
    """Bytes one device sends in a ring all-reduce of `size` bytes over `workers` devices."""
    return math.ceil(ring(size, workers))


def ring(size: int, workers: int) -> Fraction:
    """Unrounded, so that sums are rounded only once: XLA may join all-reduces."""
    return Fraction(2 * (workers - 1) * size, workers)

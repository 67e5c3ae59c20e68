"""Bytes on the wire, from shapes alone."""

import concurrent.futures
import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import Codec, Reducer
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.layout.policy import Policy
from jaxcomp.types import Batches, PyTree
from jaxcomp.wire import buffer


def payload_like(batches: Batches) -> tuple[Any, ...]:
    """Shapes and dtypes of the payload of every batch, without computing any."""
    return tuple(_payload_like(batch, jax.config.read("jax_enable_x64")) for batch in batches)


@functools.lru_cache(maxsize=4096)
def _payload_like(batch: Any, x64: bool) -> Any:
    """Cached: tracing an encoder is slow, and reducers are compared by their bytes many times."""
    del x64  # The dtypes of the payload may depend on it.

    def encode():
        key = batches_.batch_key(jnp.zeros(2, jnp.uint32), 0, 0)
        x = jnp.zeros((batch.buckets, batch.size), batch.dtype)
        count = jnp.zeros(_count_shape(batch), jnp.int32)
        return batch.codec.encode(key, x, count, batch.codec.init(batch.like))[0]

    return jax.eval_shape(encode)


def _count_shape(batch: Any) -> tuple[int, ...]:
    segments = batch.segments
    return (batch.buckets,) if segments is None else (batch.buckets, segments.number)


def agreed_bytes(batches: Batches, workers: int) -> Fraction:
    """Bytes that one device sends for the agreement between workers before encoding.

    It counts the arrays that the agreement adds to a codec's state, such as the scale of every
    bucket. It does not count arrays that only some steps agree on and the state keeps, such as
    adaptive levels.
    """
    x64 = jax.config.read("jax_enable_x64")
    return ring(sum(_agreed(batch, x64) for batch in batches), workers)


@functools.lru_cache(maxsize=4096)
def _agreed(batch: Any, x64: bool) -> int:
    """The bytes of an all-reduce of what one batch agrees on."""
    if not batch.codec.agrees:
        return 0

    def agree(x):
        key = batches_.batch_key(jnp.zeros(2, jnp.uint32), 0, 0)
        count, state = jnp.zeros(_count_shape(batch), jnp.int32), batch.codec.init(batch.like)
        after = batch.codec.agree(key, x, count, state, "agree")
        summed = batch.codec.sided and batch.codec.linear
        return state, batch.codec.side(after) if summed else after

    def shapes():
        rows = jax.ShapeDtypeStruct((1, *batch.like.shape), batch.dtype)
        with jax.enable_x64(x64):
            return jax.eval_shape(jax.vmap(agree, axis_name="agree"), rows)

    # In a separate thread, outside any mapped function, which would require types of its axes.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as alone:
        before, after = alone.submit(shapes).result()
    kept, all_of_it = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (before, after)
    )
    return max(all_of_it - kept, 0)


def wire_bytes(
    codec_or_reducer: Any, like: PyTree, workers: "int | tuple[int, ...] | None" = None
) -> int:
    """Bytes that one worker sends for a tree like this.

    For a codec or a policy: **payload bytes**, which one worker puts into the collective, once.
    For a reducer: **link bytes**, which one device sends over its link for the whole reduction.

    Here a bare codec encodes every leaf, but `compressed_mean` leaves small leaves dense: for the
    bytes of a training step, see `describe`.

    Args:
        codec_or_reducer: a codec, for all leaves, a `Policy`, or a reducer.
        like: the tree, or its shapes and dtypes.
        workers: the number of workers, or one for each axis; needed for a reducer, ignored for a
            codec.

    Raises:
        ValueError: if a reducer comes without `workers`, or the first argument is neither.

    Example:
        >>> import jaxcomp
        >>> like = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        >>> wire_bytes(jaxcomp.qsgd_inf(bits=4, bucket_size=512), like)
        532480
        >>> wire_bytes(jaxcomp.Dense(), like, workers=8)
        7340032
    """
    if isinstance(codec_or_reducer, Reducer):
        if workers is None:
            raise ValueError(
                "`workers` must be a positive integer for a reducer, whose link bytes depend on "
                "it, got None. For payload bytes, pass the codec."
            )
        for number in workers if isinstance(workers, tuple) else (workers,):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    "`workers` must be a positive integer, or a tuple of one for each axis, got "
                    f"{workers!r}"
                )
        if isinstance(workers, tuple) and not codec_or_reducer.hierarchical:
            workers = math.prod(workers)  # A reducer over one axis only needs the total.
        return math.ceil(codec_or_reducer.link_bytes(like, workers))
    if not isinstance(codec_or_reducer, Codec | Policy):
        raise ValueError(
            f"`codec_or_reducer` must be a codec, a Policy or a reducer, got {codec_or_reducer!r}"
        )
    plan = trees.layout(codec_or_reducer, like)
    return buffer.fused_bytes(payload_like(plan.batches)) + trees.dense_bytes(plan)


def ring_bytes(size: int, workers: int) -> int:
    """Bytes one device sends in a ring all-reduce of `size` bytes over `workers` devices."""
    return math.ceil(ring(size, workers))


def ring(size: int, workers: int) -> Fraction:
    """Unrounded, so that sums are rounded only once: XLA may join all-reduces."""
    return Fraction(2 * (workers - 1) * size, workers)

"""The sum and the mean of what all workers sent, decoded: the receiver's hot path."""

from typing import Any

import jax.numpy as jnp

from jaxcomp.base.codec import Codec
from jaxcomp.numerics import summing
from jaxcomp.types import Array, ArrayLike, Key


def decode_sum(
    codec: Codec,
    keys: Key,
    payloads: Any,
    like: ArrayLike,
    weights: Array | None = None,
    side: Any = None,
) -> Array:
    """`Σ wᵢ · decode(payloadᵢ)` in worker order, as wide as `accumulator(like)`.

    Args:
        codec: what made the payloads.
        keys: each worker's key; `own` has a leading workers axis.
        payloads: the payload tree with a leading workers axis.
        like: shape and dtype of one decoded batch.
        weights: `[workers]`, or None for all ones. A worker of weight zero adds exactly nothing,
            even if its payload is not finite.
        side: what the codec's decoder knows beside the payload.

    Returns:
        The sum in the dtype of `summing.accumulator(like)`: in a narrower one it might overflow.
    """
    like = summing.accumulator(like)
    return codec.decode_sum(keys, payloads, like, weights, side).astype(like.dtype)


def decode_mean(
    codec: Codec,
    keys: Key,
    payloads: Any,
    like: ArrayLike,
    weights: Array | None = None,
    side: Any = None,
) -> Array:
    """`Σ wᵢ · decode(payloadᵢ) / n` in the dtype of `like`, to which it is rounded once.

    Args:
        codec: as for `decode_sum`, as are all the others.
        keys: each worker's key.
        payloads: the payload tree.
        like: shape and dtype of one decoded batch.
        weights: `[workers]`, or None for all ones.
        side: what the codec's decoder knows beside the payload.
    """
    workers = keys.own.shape[0]
    before, after = summing.mean_factors(workers)
    if before != 1:  # As weights, by which a quantizer multiplies its steps and nothing else.
        weights = jnp.ones(workers, jnp.float32) if weights is None else weights
        weights = weights * summing.kept(before, jnp.float32)
    # Without a factor, a kernel writes the mean in its own dtype.
    sum_like = like if after == 1 else summing.accumulator(like)
    total = codec.decode_sum(keys, payloads, sum_like, weights, side)
    # Times the reciprocal: compiled, division by a constant is that; eagerly it is not.
    return summing.saturated(total * jnp.asarray(after, total.dtype), like.dtype)

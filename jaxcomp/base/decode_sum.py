"""The decoded sum and mean of all workers' payloads: the receiver's hot path."""

from typing import Any

import jax.numpy as jnp

from jaxcomp.base.codec import Codec
from jaxcomp.numerics import addition
from jaxcomp.types import Array, ArrayLike, Key


def decode_sum(
    codec: Codec,
    keys: Key,
    payloads: Any,
    like: ArrayLike,
    weights: Array | None = None,
    side: Any = None,
) -> Array:
    """`Σ wᵢ · decode(payloadᵢ)` in worker order, in the dtype of `accumulator(like)`.

    Args:
        codec: the codec of the payloads.
        keys: each worker's key; `own` has a leading workers axis.
        payloads: the payload tree with a leading workers axis.
        like: shape and dtype of one decoded batch.
        weights: `[workers]`, or None for all ones. A worker of weight zero adds exactly nothing,
            even if its payload is not finite.
        side: the decoder's side information, as `Codec.side` returns it.

    Returns:
        The sum in the dtype of `addition.accumulator(like)`: in a narrower one it might overflow.
    """
    like = addition.accumulator(like)
    return codec.decode_sum(keys, payloads, like, weights, side).astype(like.dtype)


def decode_mean(
    codec: Codec,
    keys: Key,
    payloads: Any,
    like: ArrayLike,
    weights: Array | None = None,
    side: Any = None,
) -> Array:
    """`Σ wᵢ · decode(payloadᵢ) / n`, rounded once to the dtype of `like`.

    Args:
        codec: the codec of the payloads; all arguments are those of `decode_sum`.
        keys: each worker's key.
        payloads: the payload tree.
        like: shape and dtype of one decoded batch.
        weights: `[workers]`, or None for all ones.
        side: the decoder's side information.
    """
    workers = keys.own.shape[0]
    before, after = addition.mean_factors(workers)
    if before != 1:  # Passed as weights, since a quantizer applies weights to its steps only.
        weights = jnp.ones(workers, jnp.float32) if weights is None else weights
        weights = weights * addition.hold_factor(before, jnp.float32)
    # Without a factor, a kernel can write the mean directly in its own dtype.
    sum_like = like if after == 1 else addition.accumulator(like)
    total = codec.decode_sum(keys, payloads, sum_like, weights, side)
    # Multiply by the reciprocal: compiled code divides by a constant so, and eager code does not.
    return addition.saturate(total * jnp.asarray(after, total.dtype), like.dtype)

"""The sum of what all workers sent: the decoder's hot path."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.protocols import Array, ArrayLike, Codec, Key

UNROLLED = 16
"""Workers whose payloads are decoded and added in one fused pass; the rest follow in a loop."""


def wide(dtype: Any) -> Any:
    """The dtype that arithmetic on this one is done in: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def limit(dtype: Any) -> Any:
    """The largest float32 that is finite in this dtype too."""
    both = jnp.promote_types(dtype, jnp.float32)
    least = min(jnp.finfo(dtype).max.astype(both), jnp.finfo(jnp.float32).max.astype(both))
    return least.astype(jnp.float32)


def narrowed(x: Array, dtype: Any) -> Array:
    """`x` in this dtype, in which nothing finite becomes infinite: what is too large saturates."""
    held, given = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if held.max >= given.max.astype(jnp.promote_types(dtype, x.dtype)):
        return x.astype(dtype)
    largest = held.max.astype(x.dtype)
    over = (jnp.abs(x) > largest) & jnp.isfinite(x)
    return jnp.where(over, jnp.sign(x) * largest, x).astype(dtype)


def accumulator(like: ArrayLike) -> jax.ShapeDtypeStruct:
    """`like` in the dtype that sums are taken in: float32, or float64 for float64."""
    return jax.ShapeDtypeStruct(like.shape, wide(like.dtype))


def decode_sum(
    codec: Codec,
    keys: Key,
    payloads: Any,
    like: ArrayLike,
    weights: Array | None = None,
    side: Any = None,
) -> Array:
    """`Σ wᵢ · decode(payloadᵢ)` in worker order, by the codec's own method if it has one.

    Args:
        codec: what made the payloads.
        keys: each worker's key; `own` has a leading workers axis.
        payloads: the payload tree with a leading workers axis.
        like: shape and dtype of one decoded batch.
        weights: `[workers]`, or None for all ones. A worker of weight zero adds exactly nothing,
            even if its payload is not finite.
        side: what the codec's decoder knows beside the payload.

    Returns:
        The sum in the dtype of `accumulator(like)`, if the codec has no method of its own.
    """
    own = getattr(codec, "decode_sum", None)
    if own is not None:
        return own(keys, payloads, like, weights, **({} if side is None else {"side": side}))
    like = accumulator(like)

    def term(index):
        key = keys._replace(own=keys.own[index])
        payload = jax.tree.map(lambda leaf: leaf[index], payloads)
        return weighted(
            codec.decode(key, payload, like, side), None if weights is None else weights[index]
        )

    return in_order(term, keys.own.shape[0])


def weighted(x: Array, weight: Array | None) -> Array:
    """`weight * x`, exactly zero for weight zero; `x` for None."""
    if weight is None:
        return x
    weight = weight.astype(x.dtype)
    return jnp.where(weight == 0, 0, weight * x)


def in_order(term, workers: int) -> Array:
    """`term(0) + term(1) + …`, added in this order however it is compiled."""
    total = term(0)
    for index in range(1, min(workers, UNROLLED)):
        total = total + term(index)
    if workers > UNROLLED:
        total = lax.fori_loop(UNROLLED, workers, lambda i, acc: acc + term(i), total)
    return total

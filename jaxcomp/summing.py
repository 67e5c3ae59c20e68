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
        The sum in the dtype of `accumulator(like)`: in a narrower one it might overflow.
    """
    like = accumulator(like)
    return _decode_sum(codec, keys, payloads, like, weights, side).astype(like.dtype)


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
    before, after = mean_factors(workers)
    if before != 1:  # As weights, by which a quantizer multiplies its steps and nothing else.
        weights = jnp.ones(workers, jnp.float32) if weights is None else weights
        weights = weights * kept(before, jnp.float32)
    # Without a factor, a kernel writes the mean in its own dtype.
    sum_like = like if after == 1 else accumulator(like)
    total = _decode_sum(codec, keys, payloads, sum_like, weights, side)
    # Times the reciprocal: compiled, division by a constant is that; eagerly it is not.
    return saturated(total * jnp.asarray(after, total.dtype), like.dtype)


def mean_factors(workers: int) -> tuple[float, float]:
    """Two factors, of each term and of the sum, that make it a mean which does not overflow.

    The first is a power of two, so that no other bit changes: only terms below `2⁻¹²⁶ / first`
    become subnormal numbers, which many processors take for zero.

    Example:
        >>> mean_factors(8), mean_factors(6)
        ((0.125, 1.0), (0.125, 1.3333333333333333))
    """
    power = 1 << (workers - 1).bit_length()
    return 1 / power, power / workers


def saturated(x: Array, dtype: Any) -> Array:
    """`x` in the dtype; what is finite stays finite, even where rounding up would overflow."""
    largest = float(jnp.finfo(dtype).max)
    if largest >= float(jnp.finfo(x.dtype).max):
        return x.astype(dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


def kept(factor: float, dtype: Any) -> Array:
    """A factor of every term of a sum, which XLA must not take out of the sum.

    It does so with a constant that is a power of two, since only overflow could tell.
    """
    return lax.optimization_barrier(jnp.asarray(factor, dtype))


def _decode_sum(
    codec: Codec, keys: Key, payloads: Any, like: ArrayLike, weights: Array | None, side: Any
) -> Array:
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


def widened(x: Array) -> Array:
    """`x` in the dtype that sums are taken in."""
    if x.dtype != jnp.bfloat16:
        return x.astype(wide(x.dtype))
    # By hand, since a CPU converts whole arrays of bfloat16 before it fuses anything with them.
    halves = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(halves << 16, jnp.float32)


def weighted(x: Array, weight: Array | None = None) -> Array:
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

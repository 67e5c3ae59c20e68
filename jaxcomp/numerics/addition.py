"""Addition over workers: its order, its dtype, its weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from jaxcomp.backend import axes
from jaxcomp.types import Array, ArrayLike, Key

UNROLLED = 16
"""The most workers whose payloads are decoded and added in one fused pass."""

_TOGETHER = 8
"""Workers of each pass of a loop over more workers, whose program has one length for any number."""

SPLIT = (
    "Wrap the whole chain, `optax.contrib.split_real_and_imaginary(optax.chain(...))`, which makes "
    "two real leaves of a complex one, and give it the conjugate of what jax.grad returns."
)
"""Advice on complex leaves."""


def wide(dtype: Any) -> Any:
    """The dtype of arithmetic on this dtype: float64 for float64, else float32.

    Raises:
        ValueError: for a complex dtype, whose imaginary part would be lost.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(f"every leaf must have a real dtype, got {jnp.dtype(dtype)}. {SPLIT}")
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)


def zeros(leaf: Any) -> Array:
    """Zeros of this shape in the dtype of arithmetic."""
    return jnp.zeros(jnp.shape(leaf), wide(jnp.result_type(leaf)))


def limit(dtype: Any) -> Any:
    """The largest float32 that is also finite in this dtype."""
    both = jnp.promote_types(dtype, jnp.float32)
    least = min(jnp.finfo(dtype).max.astype(both), jnp.finfo(jnp.float32).max.astype(both))
    return least.astype(jnp.float32)


def accumulator(like: ArrayLike) -> jax.ShapeDtypeStruct:
    """`like` in the dtype of sums: float32, or float64 for float64."""
    return jax.ShapeDtypeStruct(like.shape, wide(like.dtype))


def one_by_one(
    decode: Callable[..., Array],
    keys: Key,
    payloads: Any,
    like: ArrayLike,
    weights: Array | None = None,
    *,
    looped: bool = False,
) -> Array:
    """`Σ wᵢ · decode(keyᵢ, payloadᵢ, wide)` in worker order, in `accumulator(like).dtype`.

    Args:
        decode: decodes one payload to an array like its last argument.
        keys: each worker's key; `own` has a leading workers axis.
        payloads: the payload tree with a leading workers axis.
        like: shape and dtype of one decoded batch.
        weights: `[workers]`, or None for all ones.
        looped: a loop over all workers in a compiled program, for a decoder that cannot be fused
            with the sum: one pass for all workers would not save memory traffic, and the program
            would have the decoder once for every worker.
    """
    wide = accumulator(like)

    def term(index):
        key = keys._replace(own=keys.own[index])
        payload = jax.tree.map(lambda leaf: leaf[index], payloads)
        return weigh(decode(key, payload, wide), None if weights is None else weights[index])

    arrays = jax.tree.leaves((keys, payloads, weights))
    # Eagerly, a loop would be compiled anew at each call.
    looped = looped and any(isinstance(x, core.Tracer) for x in arrays)
    return in_order(term, keys.own.shape[0], looped=looped)


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


def saturate(x: Any, dtype: Any) -> Array:
    """Casts `x` to the dtype; finite values stay finite, even if rounding up would overflow."""
    return within(x, dtype).astype(dtype)


def within(x: Any, dtype: Any) -> Array:
    """`x` in its own dtype, with finite values in the range of another one."""
    largest = float(jnp.finfo(dtype).max)
    if largest >= float(jnp.finfo(x.dtype).max):
        return x
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)


def hold_factor(factor: float, dtype: Any) -> Array:
    """A factor of every term of a sum, which XLA must not move out of the sum.

    It moves a power of two, which changes no bit unless a number overflows.
    """
    return lax.optimization_barrier(jnp.asarray(factor, dtype))


def widen(x: Array) -> Array:
    """`x` in the dtype of sums."""
    if x.dtype != jnp.bfloat16:
        return x.astype(wide(x.dtype))
    # Explicit, since a CPU converts whole arrays of bfloat16 before it fuses the conversion.
    halves = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(halves << 16, jnp.float32)


def weigh(x: Array, weight: Array | None = None) -> Array:
    """`weight * x`, exactly zero for weight zero; `x` for None."""
    if weight is None:
        return x
    weight = weight.astype(x.dtype)
    return jnp.where(weight == 0, 0, weight * x)


def in_order(term: Callable[[Any], Array], workers: int, *, looped: bool | None = None) -> Array:
    """`term(0) + term(1) + …`, always added in this order.

    Args:
        term: the term of a worker.
        workers: the number of terms, at least one.
        looped: True for a loop over all of them; None for one fused pass of up to sixteen, and
            a loop over passes of eight for more.
    """
    group = 1 if looped else _TOGETHER
    whole = workers // group if looped or workers > UNROLLED else 0

    def step(number: Array, total: Array) -> Array:
        one = term(number * group)
        # Not added to zero, which would take the sign of a zero.
        total = jnp.where(number == 0, one, total + one)
        for index in range(1, group):
            total = total + term(number * group + index)
        return total

    if whole:
        like = jax.eval_shape(term, jnp.zeros((), jnp.int32))
        total = lax.fori_loop(0, whole, step, axes.zeros(like))
    else:
        total = term(0)
    for index in range(max(whole * group, 1), workers):
        total = total + term(index)
    return total


def in_kernel(term: Callable[[Any], Array], workers: int) -> Array:
    """`in_order` for a kernel, whose loop cannot start from zeros: the first terms are unrolled."""
    total = term(0)
    for index in range(1, min(workers, UNROLLED)):
        total = total + term(index)
    if workers > UNROLLED:
        total = lax.fori_loop(UNROLLED, workers, lambda i, acc: acc + term(i), total)
    return total


def weighted_mean(rows: Array, weights: Array) -> Array:
    """`Σ wᵢ · rowsᵢ / Σ wᵢ` over the first axis, added in its order, in the dtype of `rows`.

    A row of weight zero adds nothing, even if it is not finite; without a positive weight the mean
    is zero. With weights of one it has the bits of `decode_sum.decode_mean`.

    Example:
        >>> weighted_mean(jnp.array([[1.0], [jnp.nan], [5.0]]), jnp.array([3.0, 0.0, 1.0]))
        Array([2.], dtype=float32)
    """
    workers = rows.shape[0]
    before, after = mean_factors(workers)
    wide = widen(rows)
    scaled = weights.astype(wide.dtype) * hold_factor(before, wide.dtype)
    total = in_order(lambda i: weigh(wide[i], scaled[i]), workers)
    whole = jnp.sum(weights.astype(wide.dtype))
    factor = jnp.where(whole > 0, workers / jnp.where(whole > 0, whole, 1), 0)
    return saturate(total * jnp.asarray(after, wide.dtype) * factor, rows.dtype)

"""Storage of memories in float32 (float64 for float64), another float, or eight-bit blocks."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.numerics import addition
from jaxcomp.quantize import blocks
from jaxcomp.types import Array, ArrayLike

_FLOATS = (None, "float64", "float32", "bfloat16", "float16")


def check(dtype: Any, *, exact: bool = False) -> None:
    """Raises a `ValueError` unless `dtype` is allowed for memories; `exact` forbids lossy ones."""
    checks.choice("dtype", dtype, _FLOATS[:3] if exact else (*_FLOATS, "int8"))


def check_residual(feedback: Any, codec: Codec, size: int | None, decay: float = 1.0) -> None:
    """Raises a `ValueError` for a codec whose residual would grow.

    With `‖D(C(x)) − x‖∞ ≤ w‖x‖∞` and `w < 1` it is bounded by `w/(1 − w)` of the largest message.
    """
    worst = codec.facts.worst
    if worst is not None and decay * worst < 1:
        return
    omega = None if size is None or codec.contractive else codec.variance_bound(size)
    if omega is not None and decay**2 * omega >= 1:
        raise ValueError(
            f"`feedback` must be NoFeedback() or a Shift around {codec!r}, whose relative variance "
            f"on buckets of {size}, ω = {omega:.4g}, is so large that a residual may grow from "
            f"step to step, got {feedback!r}; or use "
            "jaxcomp.codecs.Contractive(codec), more bits, shorter buckets, or a contractive codec "
            "such as jaxcomp.blockwise(bits=4)"
        )


def zeros(like: ArrayLike, dtype: str | None) -> Any:
    """An empty memory of an array."""
    if dtype == "int8":
        return blocks.pack(jnp.zeros(like.shape, jnp.float32))
    return jnp.zeros(like.shape, dtype or addition.wide(like.dtype))


def load(memory: Any) -> Array:
    """The array that a memory holds."""
    return blocks.unpack(memory) if isinstance(memory, blocks.Blocks8) else memory


def tree(memory: Any) -> Any:
    """Loads every memory of a tree."""
    return jax.tree.map(load, memory, is_leaf=lambda node: isinstance(node, blocks.Blocks8))


def store(x: Array, dtype: Any) -> Any:
    """Stores `x` as a memory of this dtype, None for at least float32."""
    dtype = dtype or addition.wide(x.dtype)
    # Saturate values out of range: an Inf would stay in the memory for ever.
    if dtype == "int8":
        # 127 steps of a block may be a little more than its largest element.
        return blocks.pack(_clip(x.astype(jnp.float32), jnp.float32(2.0**127)))
    wide = jnp.promote_types(x.dtype, dtype)  # Represents the largest value exactly.
    return _clip(x.astype(wide), jnp.finfo(dtype).max.astype(wide)).astype(dtype)


def add_saturated(x: Array, held: Array) -> Array:
    """`x + held`; the sum of two finite numbers saturates, a non-finite `x` stays non-finite."""
    total = x + held
    over = jnp.isinf(total) & jnp.isfinite(x)
    return jnp.where(over, jnp.sign(total) * jnp.finfo(total.dtype).max, total)


def _clip(x: Array, largest: Any) -> Array:
    """Clips to the largest value, infinite values too; NaN stays."""
    return jnp.where(jnp.abs(x) > largest, jnp.sign(x) * largest, x)

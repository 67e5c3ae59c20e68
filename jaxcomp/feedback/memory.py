"""What a memory is stored in: the gradient's dtype, another float, or blocks of eight bits."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.protocols import Array, ArrayLike
from jaxcomp.quantize import blocks

_FLOATS = (None, "float64", "float32", "bfloat16", "float16")


def check(dtype: Any, *, exact: bool = False) -> None:
    """Raises a `ValueError` unless memories may be stored so; `exact` leaves out the lossy ones."""
    checks.choice("dtype", dtype, _FLOATS[:3] if exact else (*_FLOATS, "int8"))


def zeros(like: ArrayLike, dtype: str | None) -> Any:
    """An empty memory of an array."""
    if dtype == "int8":
        return blocks.pack(jnp.zeros(like.shape, jnp.float32))
    return jnp.zeros(like.shape, dtype or like.dtype)


def load(memory: Any) -> Array:
    """The array that is remembered."""
    return blocks.unpack(memory) if isinstance(memory, blocks.Blocks8) else memory


def tree(memory: Any) -> Any:
    """`load` of every array."""
    return jax.tree.map(load, memory, is_leaf=lambda node: isinstance(node, blocks.Blocks8))


def store(x: Array, dtype: Any) -> Any:
    """What a memory of this dtype keeps of `x`."""
    if dtype == "int8":
        return blocks.pack(x.astype(jnp.float32))
    if jnp.finfo(dtype).max < jnp.finfo(x.dtype).max:
        # What a narrower memory cannot hold it must not turn into Inf, which would stay.
        wide = jnp.promote_types(x.dtype, dtype)  # As which the largest value is what it is.
        largest = jnp.finfo(dtype).max.astype(wide)
        x = jnp.clip(x.astype(wide), -largest, largest)
    return x.astype(dtype)

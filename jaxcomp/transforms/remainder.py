"""The part of parameters that their dtype cannot hold: with it, small steps add up.

A bfloat16 number near one changes in steps of 1/128, so a centre that moves by less never moves.
A method that moves parameters keeps what rounding took from them, in float32, and adds it to the
next step: parameters and remainder together are a float32 copy, bit for bit. Parameters in float32
or float64 have no remainder, and cost nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


def nothing(params: PyTree) -> PyTree:
    """The remainder before the first step: zeros for narrow parameters, None for all others."""

    def one(p: Any) -> Array | None:
        dtype = jnp.result_type(p)  # A leaf may be a Python number.
        return jnp.zeros(jnp.shape(p), addition.wide(dtype)) if _narrow(dtype) else None

    return jax.tree.map(one, params)


def exact(params: PyTree, rest: PyTree) -> PyTree:
    """The parameters with their remainder; float32 in place of narrower dtypes."""
    return _over(lambda r, p: p if r is None else p.astype(r.dtype) + r, rest, params)


def wide(params: PyTree, rest: PyTree, tree: PyTree) -> PyTree:
    """A tree like the parameters, in the dtypes of `exact(params, rest)`."""
    return _over(lambda r, p, x: x if r is None else x.astype(r.dtype), rest, params, tree)


def split_step(params: PyTree, rest: PyTree, step: PyTree) -> tuple[PyTree, PyTree]:
    """The update that moves `params` by `step`, and the remainder after it.

    Args:
        params: the parameters.
        rest: their remainder.
        step: by how much they move, in the dtypes of `exact(params, rest)`.

    Returns:
        The update for `optax.apply_updates`, in the dtypes of the parameters, and what it leaves.
    """

    def update(r: Array | None, p: Any, u: Any) -> Any:
        if r is None:
            return None if p is None else u.astype(jnp.result_type(p))
        return _rounded(r + u.astype(r.dtype), p.dtype).astype(p.dtype)

    def left(r: Array | None, p: Any, u: Any, by: Any) -> Array | None:
        if r is None:
            return None
        base = p.astype(r.dtype)
        # Near, `base` and `after` share most digits, so that their difference is exact.
        after = _rounded(base + by.astype(r.dtype), p.dtype)
        return (base - after) + (r + u.astype(r.dtype))

    updates = _over(update, rest, params, step)
    return updates, _over(left, rest, params, step, updates)


def _narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4


def _over(f: Any, rest: PyTree, *trees: PyTree) -> PyTree:
    return jax.tree.map(f, rest, *trees, is_leaf=lambda x: x is None)


def _rounded(x: Array, dtype: Any) -> Array:
    """`x` as `dtype` holds it. A compiler may leave out a conversion there and back, not this."""
    info = jnp.finfo(dtype)
    found = lax.reduce_precision(x, info.nexp, info.nmant)
    least = float(info.smallest_subnormal)
    if least < float(jnp.finfo(x.dtype).tiny):
        return found
    # The operation rounds subnormal numbers to zero, which float16 holds in equal steps.
    return jnp.where(jnp.abs(x) < float(info.tiny), jnp.round(x / least) * least, found)

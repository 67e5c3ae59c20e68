"""Helpers for optimizers that contain several averaging transformations."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.types import PyTree


def check(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, extended to take extra arguments.

    Raises:
        ValueError: if `tx` is not a transformation.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"`{name}` must be a transformation that averages over the workers, such as "
            f"jaxcomp.compressed_mean(jaxcomp.Dense(), axis_name), got {tx!r}"
        )
    return optax.with_extra_args_support(tx)


def forget(tx: optax.GradientTransformation, now: Any, state: PyTree, like: PyTree) -> PyTree:
    """The state with its memory cleared if `now`; its key and count are kept."""

    def clear(new: jax.Array, old: jax.Array) -> jax.Array:
        memory = jnp.issubdtype(old.dtype, jnp.floating)
        return jnp.where(now, new, old) if memory else old

    return jax.tree.map(clear, tx.init(like), state)

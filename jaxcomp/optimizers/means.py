"""The averaging transformations inside an optimizer that takes one or the other of them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.types import PyTree


def check(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, taking extra arguments.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"`{name}` must be a transformation that averages over the workers, such as "
            f"jaxcomp.compressed_mean(jaxcomp.Dense(), axis_name), got {tx!r}"
        )
    return optax.with_extra_args_support(tx)


def forgotten(tx: optax.GradientTransformation, now: Any, state: PyTree, like: PyTree) -> PyTree:
    """The state whose memory is empty again if `now`, while its key and its count go on."""

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        memory = jnp.issubdtype(old.dtype, jnp.floating)
        return jnp.where(now, new, old) if memory else old

    return jax.tree.map(kept, tx.init(like), state)

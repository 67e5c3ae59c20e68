"""Transformations that are run in some steps and left out in others, or whose steps are undone."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.reducers import state as state_
from jaxcomp.types import PyTree

FIT = "fit_only"
"""The extra argument by which a mean is asked for its state as it would begin the step with it,
and for nothing else: it sends nothing, and hands its updates on as they are."""


def fitted(
    tx: optax.GradientTransformationExtraArgs,
    state: PyTree,
    updates: PyTree,
    params: PyTree | None = None,
    **extra: Any,
) -> PyTree:
    """The state for these workers, of one that may have been made for others.

    A mean fits its own state in the step: one that was made outside of the mapped function, where
    there was only one worker, or that comes from another number of them. But where the step may be
    left out, the state must have its shapes before. A state that cannot be fitted was made outside
    and has not been in use, since `resize_workers` makes none of such shapes: a new one is as good.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What there is to say was said when it was made.
        wanted = jax.eval_shape(tx.init, updates)
    if shapes(wanted) == shapes(state):
        return state
    try:
        return refitted(tx, state, updates, params, **extra)
    except state_.OtherShapesError:
        return tx.init(updates)


def refitted(
    tx: optax.GradientTransformationExtraArgs,
    state: PyTree,
    updates: PyTree,
    params: PyTree | None = None,
    **extra: Any,
) -> PyTree:
    """The same, where it is known to have other shapes than after the step."""
    _, found = tx.update(updates, state, params, **{**extra, FIT: True})

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        # What is wrapped beside a mean has made a step, which the compiler leaves out.
        return old if new.shape == old.shape else new

    return jax.tree.map(kept, found, state)


def shapes(state: PyTree) -> list[tuple[int, ...]]:
    """The shapes of all arrays of a state."""
    return [jnp.shape(x) for x in jax.tree.leaves(state)]

"""State shapes for transformations that are skipped, or undone, in some steps."""

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

TELL = "tell_nonfinite"
"""The extra argument by which `skip_nonfinite` asks a mean for NaN in a step that is not finite, so
that what follows cannot hide it: the sign of Inf is finite."""


def fitted(
    tx: optax.GradientTransformationExtraArgs,
    state: PyTree,
    updates: PyTree,
    params: PyTree | None = None,
    **extra: Any,
) -> PyTree:
    """Adapts state initialised outside the mapped function to the current workers.

    A mean adapts its own state in the step, if the state was made outside of the mapped function
    or for another number of workers. If the step may be skipped, the state needs its final shapes
    before the step. A state that cannot be adapted was made outside and has not been used, because
    `resize_workers` never produces such shapes. It is replaced by a new state.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The first initialisation has warned already.
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
    """Adapts a state whose shapes are known to differ from those after the step."""
    _, found = tx.update(updates, state, params, **{**extra, FIT: True})

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        # The compiler removes the step that the other wrapped transformations take here.
        return old if new.shape == old.shape else new

    return jax.tree.map(kept, found, state)


def shapes(state: PyTree) -> list[tuple[int, ...]]:
    """The shapes of all arrays of a state."""
    return [jnp.shape(x) for x in jax.tree.leaves(state)]

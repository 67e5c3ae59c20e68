"""Transformations that are run in some steps and left out in others."""

import warnings

import jax
import optax

from jaxcomp.protocols import PyTree


def fitted(tx: optax.GradientTransformation, state: PyTree, like: PyTree) -> PyTree:
    """The state for these workers, of one that may have been made where there was only one.

    A mean fits its own state in its first step; but where it may be left out, the state must have
    its shapes before. One that has other shapes has not been in use, so a new one is as good.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What there is to say was said when it was made.
        wanted = jax.eval_shape(tx.init, like)
        if [x.shape for x in jax.tree.leaves(wanted)] == [x.shape for x in jax.tree.leaves(state)]:
            return state
        return tx.init(like)

"""The count of steps, and the learning rate of each: a number, an array, or a schedule."""

import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.types import Array

LAST = 2**31 - 1
"""The last step that an int32 counts."""


def check(learning_rate: optax.ScalarOrSchedule) -> None:
    """Raises a `ValueError` unless the learning rate is a schedule or a number of at least zero."""
    if callable(learning_rate) or hasattr(learning_rate, "dtype"):
        return  # An array may be traced, for instance by `optax.inject_hyperparams`.
    checks.number("learning_rate", learning_rate, 0.0)


def at(learning_rate: optax.ScalarOrSchedule, count: Array) -> Array:
    """The learning rate of the step after `count` others."""
    return jnp.asarray(learning_rate(count) if callable(learning_rate) else learning_rate)


def after(count: Array) -> Array:
    """The count plus one, saturating at the largest integer."""
    return jnp.minimum(count, LAST - 1) + 1

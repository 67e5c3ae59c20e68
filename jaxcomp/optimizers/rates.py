"""The count of steps, and the learning rate of each: a number, an array, or a schedule."""

import jax.numpy as jnp
import optax

from jaxcomp import checks
from jaxcomp.types import Array

LAST = 2**31 - 1
"""The last step that an int32 counts."""


def check(learning_rate: optax.ScalarOrSchedule) -> None:
    """Raises a `ValueError` unless it is a schedule or a number that is not negative."""
    if callable(learning_rate) or hasattr(learning_rate, "dtype"):
        return  # An array may be traced, as `optax.inject_hyperparams` has it.
    checks.number("learning_rate", learning_rate, 0.0)


def at(learning_rate: optax.ScalarOrSchedule, count: Array) -> Array:
    """The rate of the step that `count` others went before."""
    return jnp.asarray(learning_rate(count) if callable(learning_rate) else learning_rate)


def after(count: Array) -> Array:
    """One step more, or the last one again."""
    return jnp.minimum(count, LAST - 1) + 1

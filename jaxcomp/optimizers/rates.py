"""The count of steps, and the learning rate of each: a number, an array, or a schedule."""

import jax.numpy as jnp
import optax

from jaxcomp.types import Array


def at(learning_rate: optax.ScalarOrSchedule, count: Array) -> Array:
    """The learning rate of the step after `count` others."""
    return jnp.asarray(learning_rate(count) if callable(learning_rate) else learning_rate)

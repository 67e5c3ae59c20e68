"""The residual of what all workers have sent."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp


def test_the_memory_is_the_message_without_the_mean_of_all_messages():
    feedback = jaxcomp.Aggregated(jaxcomp.Residual(decay=0.5))
    gradient = jnp.array([8.0, -4.0, 2.0])
    sent, mean = jnp.array([8.0, 0.0, 0.0]), jnp.array([2.0, 0.0, 1.0])
    state = feedback.init(gradient, gradient)

    @jax.jit
    def step(state):
        message, state = feedback.compensate(gradient, state)
        return feedback.update(message, sent, mean, 1.0, None, state)

    for memory in ([3.0, -2.0, 0.5], [4.5, -3.0, 0.75]):
        estimate, state = step(state)
        np.testing.assert_array_equal(estimate, mean)
        np.testing.assert_array_equal(feedback.unsent(state), memory)

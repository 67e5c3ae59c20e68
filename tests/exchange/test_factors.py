"""The factor on the sum of the messages of those who take part."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.exchange import gating


@pytest.mark.parametrize("feedback", [jaxcomp.NoFeedback(), jaxcomp.Shift(0.5)], ids=str)
def test_the_estimate_takes_the_messages_times_the_factor(feedback):
    """Beside the mirror, which moves by its step of the messages as they are."""
    part, like = (jnp.array([8.0, -4.0, 2.0]),), (jnp.zeros(3),)
    state, mirror = feedback.init(like, like), np.zeros(3)
    for factor in (4.0, 1.0, 2.0):
        estimate, state = gating.remember(feedback, factor, part, part, part, 1.0, None, state)
        np.testing.assert_array_equal(estimate[0], mirror + factor * np.array(part[0]))
        if feedback.facts.mirrors:
            mirror = mirror + 0.5 * np.array(part[0])
            np.testing.assert_array_equal(state.mirror[0], mirror)

"""Gates and reducers that go together, and the factor on the messages of those who take part."""

import jax
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


SIGN, QSGD = jaxcomp.sign(), jaxcomp.qsgd_inf(bits=4)
SHIFT, RESIDUAL = jaxcomp.Link(QSGD, jaxcomp.Shift(0.5)), jaxcomp.Link(SIGN, jaxcomp.Residual())
LEFT_OUT = jaxcomp.Link(QSGD, jaxcomp.Shift(0.5, absent="left out"))
HALF = jaxcomp.gates.Bernoulli(0.5)


@pytest.mark.parametrize(
    ("link", "times"),
    [(QSGD, 2.0), (SHIFT, 2.0), (RESIDUAL, 1.0), (jaxcomp.Link(SIGN, jaxcomp.Shift()), 1.0)],
    ids=["plain", "DIANA", "residual", "EF21"],
)
def test_messages_that_are_sent_later_or_biased_have_no_factor(link, times):
    assert gating.factor(HALF, jaxcomp.Gather(link), 8) == times
    assert gating.factor(jaxcomp.gates.Every(3), jaxcomp.Gather(link), 8) == 1.0


@pytest.mark.filterwarnings("ignore:.*is biased:UserWarning")
def test_a_mean_over_senders_has_no_factor():
    with pytest.raises(ValueError, match=r"`over` must be 'workers' with .* got 'senders'"):
        gating.factor(HALF, jaxcomp.Gather(jaxcomp.top_k(0.1), over="senders"), 8)


@pytest.mark.parametrize(
    ("gate", "reducer", "whole", "says"),
    [
        (jaxcomp.gates.Censored(0.1), jaxcomp.Hierarchical(outer=jaxcomp.Gather(QSGD)), True,
         "needs whole messages"),
        (jaxcomp.gates.Censored(0.1), jaxcomp.Gather(QSGD), False, "needs whole messages"),
        (HALF, jaxcomp.TwoShot(LEFT_OUT, QSGD), True, "requires jaxcomp.Gather"),
        (jaxcomp.gates.Every(2), jaxcomp.TwoShot(SHIFT, QSGD), True, "has closed rounds"),
        (HALF, jaxcomp.ReducerSchedule(((0, jaxcomp.TwoShot(QSGD)),)), True, "needs phases"),
    ],
    ids=["levels", "shards", "left out", "hidden mirror", "phases"],
)  # fmt: skip
def test_a_gate_is_refused_where_a_device_lacks_what_it_needs(gate, reducer, whole, says):
    with pytest.raises(ValueError, match=says):
        gating.check(gate, reducer, whole=whole)
    gating.check(gate, jaxcomp.Gather(SHIFT))


def test_senders_are_the_workers_with_a_weight():
    weights = jnp.array([1.0, 0.0, 0.5, 0.0])
    found = jax.vmap(lambda w: gating.senders(w, "data"), axis_name="data")(weights)
    assert found.tolist() == [2] * 4
    alone = jax.vmap(lambda _: gating.senders(None, "data"), axis_name="data")(weights)
    assert alone.tolist() == [4] * 4

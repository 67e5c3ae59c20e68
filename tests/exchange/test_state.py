"""The memory of a reduction: its shapes, and the states that a plan refuses by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.exchange import resize, state as state_
from jaxcomp.exchange.legs import LegState
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback.residual import ResidualState
from jaxcomp.mesh import per_worker

LIKE = {"w": jnp.zeros((64, 60)), "b": jnp.zeros(7)}
SIGN = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
GATHER = jaxcomp.Gather(SIGN)


def plan_of(reducer, like=LIKE, workers=4):
    return Plan.of(reducer, like, sizes=(workers,))


def test_memory_has_its_shapes_before_the_first_step():
    plan = plan_of(GATHER)
    state = state_.init(plan)
    (residual,) = state.feedback.own().residual
    assert residual.shape == plan.likes[0].shape
    assert (state.reducer, state.dense) == ((), ())
    (dense,) = state_.init(plan, gated=True).dense.own().residual
    assert dense.shape == (7,)
    state_.take(plan, state)


def test_a_state_of_other_gradients_is_refused_by_path():
    other = state_.init(plan_of(GATHER, {"w": jnp.zeros((90, 60)), "b": jnp.zeros(7)}))
    with pytest.raises(ValueError, match=r"these gradients and 4 workers: memory.*residual"):
        state_.take(plan_of(GATHER), other)


def test_a_state_without_the_memory_of_a_gate_is_refused():
    plan = plan_of(GATHER)
    with pytest.raises(ValueError, match=r"memory\.dense.* must have the shape .*got none"):
        state_.take(plan, state_.init(plan), gated=True)
    with pytest.raises(ValueError, match=r"memory\.dense.* must not be there, got"):
        state_.take(plan, state_.init(plan, gated=True))


def test_the_order_of_a_memory_is_named_if_rules_decide_it():
    """These two make batches of the same shapes, of other leaves."""
    like = dict.fromkeys("abcd", jax.ShapeDtypeStruct((16, 32), jnp.float32))
    plans = [
        plan_of(jaxcomp.Gather(jaxcomp.Policy(jaxcomp.qsgd(), rules=rules, min_size=0)), like)
        for rules in ((), *((jaxcomp.Rule(name, jaxcomp.natural()),) for name in ("[ac]", "[ab]")))
    ]
    orders = [state_.order_of(plan) for plan in plans]
    assert orders[0] == ""
    assert len(set(orders)) == 3


def test_the_memory_of_two_levels_cannot_be_resized():
    reducer = jaxcomp.Hierarchical(jaxcomp.Dense(), GATHER)
    held = state_.init(Plan.of(reducer, LIKE, ("slow", "fast"), (2, 2)))
    with pytest.raises(ValueError, match=r"must not be that of jaxcomp\.Hierarchical"):
        held.check_resizable(8)
    state_.init(plan_of(GATHER)).check_resizable(8)


def test_what_a_downlink_did_not_send_joins_every_uplink():
    """New workers have no downlink: the mean of their residuals grows by its residual."""
    draw = np.random.default_rng(0)
    up = draw.standard_normal((2, 3, 4)).astype(np.float32)  # Workers, rows, elements.
    down = draw.standard_normal((2, 2, 4)).astype(np.float32)  # Two rows on each, one of padding.
    feedback = per_worker.PerWorker(ResidualState((jnp.asarray(up),)), "link")
    unsent = per_worker.PerWorker(ResidualState((jnp.asarray(down),)), "slice")
    given = LegState(per_worker.PerWorker((), "codec")), LegState((), memory=unsent)
    found, left = resize.carry(feedback, given, (), 8, sharded=False)
    np.testing.assert_allclose(found.tree.residual[0], up + down.reshape(4, 4)[:3], rtol=1e-6)
    assert left == ()
    nothing = per_worker.PerWorker((), "link")
    with pytest.raises(ValueError, match=r"must not have a downlink's residual .* 8 workers"):
        resize.carry(nothing, given, (), 8, sharded=False)

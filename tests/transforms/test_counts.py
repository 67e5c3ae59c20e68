"""Counters and statistics at the ends of what their words hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.exchange.plan import Plan
from jaxcomp.transforms import stats

GRADS = {"w": jnp.ones((8, 40, 32)), "b": jnp.ones((8, 3))}
LIKE = jax.tree.map(lambda g: g[0], GRADS)


def stepped(tx, change):
    """The state after one step from one that is changed."""
    with axes.planned(8):
        state = change(tx.init(LIKE))
    update = jax.vmap(lambda grads: tx.update(grads, state)[1], axis_name="data")
    return jax.jit(update)(GRADS)


@pytest.mark.full
def test_a_gate_counts_up_to_the_end_and_stays_there():
    tx = jaxcomp.compressed_mean(jaxcomp.cast("bfloat16"), "data", gate=jaxcomp.gates.Every(1))
    for rounds, messages in ((7, 2**32 - 5), (2**32 - 1, 2**32 - 1), (0, 0)):

        def late(state, rounds=rounds, messages=messages):
            gate = state.gate._replace(rounds=jnp.uint32(rounds), messages=jnp.uint32(messages))
            return state._replace(gate=gate)

        after = stepped(tx, late).gate
        assert int(after.rounds[0]) == min(rounds + 1, 2**32 - 1)
        assert int(after.messages[0]) == min(messages + 8, 2**32 - 1)


def test_steps_are_counted_beyond_two_to_the_31():
    """And each has noise of its own."""
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=2), "data")
    last = stepped(tx, lambda state: state._replace(step=jnp.asarray(2**31 - 1, state.step.dtype)))
    assert np.asarray(last.step).astype(np.int64).tolist() == [2**31] * 8


def test_bytes_of_large_models_are_not_clamped():
    like = {"w": jax.ShapeDtypeStruct((2**17, 2**16), jnp.float32)}
    plan = Plan.of(jaxcomp.Dense(), like, sizes=(8,))
    payload, link = (stats._count(size) for size in (plan.payload_bytes, plan.link_bytes))
    assert float(payload) == 2**35
    np.testing.assert_allclose(link, jaxcomp.wire_bytes(plan.given, like, workers=8), rtol=1e-7)

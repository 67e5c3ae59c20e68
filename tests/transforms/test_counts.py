"""Counters and statistics at the ends of what their words hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import batches
from jaxcomp.transforms import stats

GRADS = {"w": jnp.ones((8, 40, 32)), "b": jnp.ones((8, 3))}
LIKE = jax.tree.map(lambda g: g[0], GRADS)


def stepped(tx, change):
    """The state after one step from one that is changed."""
    with axes.assume_workers(8):
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


def test_statistics_of_double_precision_are_those_of_single(x64):
    """Also by groups, and of gradients whose squares leave the range of float32."""
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(), min_size=0), jaxcomp.Residual())
    draw = np.random.default_rng(0)
    found = []
    for dtype in (jnp.float32, jnp.float64):
        grads = {k: jnp.asarray(2.0**70 * draw.random(g.shape), dtype) for k, g in GRADS.items()}
        draw = np.random.default_rng(0)
        tx = jaxcomp.compressed_mean(link, "data", stats="rules")
        with axes.assume_workers(8):
            state = tx.init(jax.tree.map(lambda g: g[0], grads))

        def twice(grads, tx=tx, state=state):
            return tx.update(grads, tx.update(grads, state)[1])[1].stats

        found.append(jax.jit(jax.vmap(twice, axis_name="data"))(grads))
    assert (found[0].relative_error > 0.1).all()
    assert found[0].residual_norm[0] > 2.0**70
    # A larger word means more bytes of the leaf that is sent as it is.
    same = [s._replace(payload_bytes=0, link_bytes=0, groups=s.groups["default"]) for s in found]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *same)


BEFORE = 2**31 - 5
"""Steps, after which a few more do not fit into the word of the count."""


def due(every, steps, offset=1):
    """Whether each of the next steps is one of every so many."""
    return [(BEFORE + step + offset) % every == 0 for step in range(steps)]


def test_gossip_keeps_its_rhythm_at_the_end_of_its_count():
    tx = jaxcomp.gossip(optax.sgd(0.1), jaxcomp.qsgd_inf(bits=8), "data", every=3)
    with axes.assume_workers(8):
        begin = tx.init(LIKE)._replace(taken=jnp.int32(BEFORE))

    def run(grads):
        def step(state, _):
            after = tx.update(grads, state, LIKE)[1]
            return after, after.mixed != state.mixed

        return lax.scan(step, jaxcomp.local(begin, "data"), None, length=9)[1]

    found = jax.jit(jax.vmap(run, axis_name="data"))(GRADS)
    assert found.tolist() == [due(3, 9)] * 8


def test_epochs_keep_their_length_at_the_end_of_their_count():
    tx = jaxcomp.variance_reduced(every=3)
    begin = tx.init(LIKE)._replace(taken=jnp.int32(BEFORE), begun=jnp.int32(BEFORE - 3))
    begin = begin._replace(ends=jnp.int32(BEFORE))

    def step(state, _):
        def grad_fn(params):
            return params

        given = {"grad_fn": grad_fn, "full_grad_fn": grad_fn}
        after = tx.update(LIKE, state, LIKE, **given)[1]
        return after, (after.begun != state.begun, after.taken)

    begins, taken = jax.jit(lambda: lax.scan(step, begin, None, length=9)[1])()
    assert begins.tolist() == [True, False, False] * 3
    assert (taken > 2**30).all()


def test_delayed_momentum_keeps_its_rhythm_at_the_end_of_its_count():
    tx = jaxcomp.optimizers.delayed_nesterov(0.1, every=4)
    begin = tx.init(LIKE)._replace(count=jnp.int32(BEFORE))

    def step(state, _):
        after = tx.update(LIKE, state)[1]
        return after, (after.buffer["b"] == 0).all()

    found = jax.jit(lambda: lax.scan(step, begin, None, length=9)[1])()
    assert found.tolist() == due(4, 9)


def test_levels_are_fitted_in_their_rhythm_at_the_end_of_their_count():
    codec = jaxcomp.alq(bits=3, every=3)
    x = jax.random.normal(jax.random.key(0), (2, codec.bucket_size))
    count = jnp.full(2, codec.bucket_size)
    begin = codec.init(x)._replace(step=jnp.int32(BEFORE))

    def run(x):
        def step(state, _):
            after = codec.agree(
                batches.batch_key(jnp.zeros(2, jnp.uint32), 0, 0), x, count, state, "data"
            )
            return after, after.top == 0

        return lax.scan(step, jaxcomp.local(begin, "data"), None, length=9)[1]

    found = jax.jit(jax.vmap(run, axis_name="data"))(x[None])
    assert found.tolist() == [due(3, 9, offset=-1)]

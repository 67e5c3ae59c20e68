"""`jax.vmap` within each device of `jax.pmap`: a device sends one message for all its lanes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp

W = jax.random.normal(jax.random.key(0), (48, 32))
X = jax.random.normal(jax.random.key(1), (8, 3, 5, 48))
CODEC = jaxcomp.top_k(fraction=0.1)


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def of_lanes(w, x):
    return jnp.mean(jax.vmap(lambda x: loss(w, x))(x))


def mapped(axis_name, loss, lanes):
    tx = optax.chain(jaxcomp.compressed_mean(CODEC, axis_name), optax.sgd(0.1))

    def steps(w, state, x):
        def body(carry, _):
            w, state = carry
            updates, state = tx.update(jax.grad(loss)(w, x), state, w)
            return (optax.apply_updates(w, updates), state), None

        (w, state), _ = jax.lax.scan(body, (w, state), None, length=3)
        return w, state

    run = steps if not lanes else jax.vmap(steps, axis_name="batch")
    shape = X.shape[: 1 + bool(lanes)]
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, shape + jnp.shape(x)), (W, tx.init(W)))
    run = jax.pmap(run, axis_name="device")
    compiled = run.lower(*rows, X).compile()
    return compiled(*rows, X)[0], jaxcomp.collective_bytes(compiled)


@pytest.mark.full
def test_a_device_averages_its_lanes_and_sends_one_message():
    found, sent = mapped(("device", "batch"), loss, lanes=True)
    expected, once = mapped("device", of_lanes, lanes=False)
    np.testing.assert_array_equal(found, found[:1, :1].repeat(8, 0).repeat(3, 1))
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found[0, 0] - W).max() > 1e-3
    assert sent == once

"""States of `jax.pmap` are refused by name where a state of a mesh is meant."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp

PARAMS = {"w": jnp.eye(64)}
X = jax.random.normal(jax.random.key(0), (8, 2, 64))
MOVE = r"state.* of jax\.pmap, .*Take x\[:, 0\] of the arrays of each jaxcomp\.PerWorker"
LOST = r"x\[0\] of a state of jax\.pmap loses the memory of all other workers"


def chain(codec):
    return optax.chain(jaxcomp.compressed_mean(codec, "data"), optax.sgd(0.1))


SIGN, QSGD = chain(jaxcomp.sign()), chain(jaxcomp.qsgd_inf(bits=4))


def step_of(tx):
    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] - 1) ** 2))(jaxcomp.local(params, "data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(tx):
    """The state after a step of `pmap`."""
    params = jax.tree.map(lambda x: jnp.stack([x] * 8), PARAMS)
    state = jax.pmap(tx.init, axis_name="data")(params)
    return jax.pmap(step_of(tx), axis_name="data")(params, state, X)[1]


@pytest.fixture(scope="module")
def states():
    return {"sign": trained(SIGN), "qsgd": trained(QSGD)}


@pytest.mark.core("True")
@pytest.mark.parametrize("on_host", [False, True])
def test_the_whole_state(states, mesh, on_host):
    state = jax.device_get(states["sign"]) if on_host else states["sign"]
    with pytest.raises(ValueError, match=MOVE):
        jaxcomp.place({"tree": state}, mesh, "data")
    with pytest.raises(ValueError, match=MOVE):
        jaxcomp.data_parallel(step_of(SIGN), mesh, "data")(PARAMS, state, X.reshape(16, 64))
    with pytest.raises(ValueError, match=MOVE):
        jaxcomp.resize_workers(SIGN, state, PARAMS, 4)


def test_a_state_without_memory(states, mesh):
    """It is recognised by its sharding, or by the mean; the entry of one worker is right."""
    with pytest.raises(ValueError, match=MOVE):
        jaxcomp.place(states["qsgd"], mesh, "data")
    step = jaxcomp.data_parallel(step_of(QSGD), mesh, "data")
    with pytest.raises(ValueError, match=MOVE):
        step.lower(PARAMS, jax.device_get(states["qsgd"]), X.reshape(16, 64))
    first = jax.tree.map(lambda x: x[0], jax.device_get(states["qsgd"]))
    step.lower(PARAMS, first, X.reshape(16, 64))
    with pytest.raises(ValueError, match=MOVE):
        jaxcomp.resize_workers(QSGD, states["qsgd"], PARAMS, 4)


def test_one_workers_slice_of_memory(states, mesh):
    """`x[0]` has worker 0's rows only, and `tx.init` makes none without the number of workers."""
    first = jax.tree.map(lambda x: x[0], jax.device_get(states["sign"]))
    with pytest.raises(ValueError, match=LOST):
        jaxcomp.place(first, mesh, "data")
    with pytest.raises(ValueError, match=LOST):
        jaxcomp.data_parallel(step_of(SIGN), mesh, "data")(PARAMS, first, X.reshape(16, 64))
    with pytest.raises(ValueError, match=LOST):
        jaxcomp.resize_workers(SIGN, first, PARAMS, 4)
    with pytest.raises(ValueError, match=r"number of workers of 'data', on which .* jax\.pmap"):
        SIGN.init(PARAMS)


@pytest.mark.parametrize("feedback", [jaxcomp.MomentumCorrection(masking=False), jaxcomp.Shift()])
def test_states_of_one_worker_are_placed(feedback, mesh):
    """Each worker gets the memory of one; a mirror of the whole mean is the same on all."""
    codec = jaxcomp.Policy(jaxcomp.sign(bucket_size=64), min_size=0, min_ndim=0)
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(jaxcomp.Link(codec, feedback)), "data")
    params = {"w": np.ones((5, 33)), "b": np.ones(3), "c": np.ones(70)}
    placed = jaxcomp.place(tx.init(params), mesh, "data")
    wanted = jaxcomp.init_state(tx, params, mesh, "data")
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.shape, y.shape), placed, wanted)


def test_the_state_of_a_mesh_under_pmap(mesh):
    state = jaxcomp.init_state(SIGN, PARAMS, mesh, "data")
    params, state = jax.tree.map(lambda x: np.stack([x] * 8), jax.device_get((PARAMS, state)))
    with pytest.raises(ValueError, match=r"Under jax\.pmap, make the state with"):
        jax.pmap(step_of(SIGN), axis_name="data")(params, state, X)


def test_an_ensemble_of_as_many_members_is_no_state_of_pmap(mesh):
    tx = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), "data")
    members = jax.tree.map(lambda x: jnp.stack([x] * 8), PARAMS)
    state = jax.vmap(tx.init)(members)
    assert jaxcomp.place(state, mesh, "data").step.shape == (8,)

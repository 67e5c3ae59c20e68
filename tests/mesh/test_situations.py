"""Meshes in another order, keys of rbg, states of nnx, the leak checker, memory of the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxcomp

PARAMS = {"w": np.ones((16, 16), np.float32)}
X = np.asarray(np.random.default_rng(0).standard_normal((16, 16)), np.float32)
CODEC = jaxcomp.Policy(jaxcomp.sign(bucket_size=64), min_size=0)


def chain(**settings):
    return optax.chain(jaxcomp.compressed_mean(CODEC, "data", **settings), optax.adam(1e-3))


def stepper(tx):
    def step(params, state, x):
        loss, grads = jaxcomp.value_and_grad(loss_of, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def loss_of(params, x):
    return jnp.mean((x @ params["w"] - x) ** 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_devices_of_a_mesh_may_be_in_another_order(kind):
    """Arrays that lie on one go to the other, with the placement of their shards."""
    devices = np.array(jax.devices())
    one, other = (
        Mesh(each.reshape(2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
        for each in (devices, devices[::-1])
    )
    params = jax.device_put(PARAMS, NamedSharding(one, P("fsdp")))
    tx = chain(param_specs=P("fsdp"))
    state = jaxcomp.init_state(tx, params, one, "data")
    wanted = jaxcomp.data_parallel(stepper(tx), one, "data")(params, state, X)
    step = jaxcomp.data_parallel(stepper(tx), other, "data")
    direct = step(params, state, X)
    moved, after = jaxcomp.place((params, state), other, "data")
    assert moved["w"].sharding == NamedSharding(other, P("fsdp"))
    assert all(x.sharding.mesh == other for x in jax.tree.leaves(after))
    for found in (direct, step(moved, after, X)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            *jax.device_get((found, wanted)),
        )


def test_keys_of_rbg_are_keys(mesh):
    key = jax.random.PRNGKey(3, impl="rbg")
    last = jaxcomp.data_parallel(lambda w, key: w, mesh, "data")
    with pytest.raises(ValueError, match=r"argument 1 \('key'\), is a PRNG key, or uint32"):
        last(X, key)

    def step(w, x, key):
        def loss(w, x, key):
            typed = jax.random.wrap_key_data(key, impl="rbg")
            return jnp.sum(w * x) * jax.random.uniform(typed)

        return jaxcomp.value_and_grad(loss, "data", key_argnums=2)(w, x, key)[0]

    ones = np.ones(8, np.float32)
    run = jaxcomp.data_parallel(step, mesh, "data", batch_argnums=1)
    folded = [jax.random.fold_in(jax.random.wrap_key_data(key, impl="rbg"), n) for n in range(8)]
    want = np.mean([float(jax.random.uniform(each)) for each in folded])
    np.testing.assert_allclose(run(np.float32(1), ones, key), want, rtol=1e-6)
    typed = jaxcomp.compressed_mean(CODEC, "data", key=jax.random.key(3, impl="rbg"))
    raw = jaxcomp.compressed_mean(CODEC, "data", key=key)
    keys = [
        jax.vmap(lambda _, tx=tx: tx.init(PARAMS).key, axis_name="data")(X) for tx in (typed, raw)
    ]
    np.testing.assert_array_equal(*keys)


METHODS = {
    "diloco": lambda: jaxcomp.algorithms.diloco(CODEC, "data", inner=optax.sgd(0.1), every=2),
    "gossip": lambda: jaxcomp.gossip(optax.sgd(0.1), jaxcomp.codecs.Identity(), "data"),
}


@pytest.mark.core("diloco")
@pytest.mark.parametrize("name", METHODS)
def test_the_state_of_an_optimizer_of_nnx_is_one_of_rounds(name, mesh):
    """`view` and `consensus` take its variables, as they take those of the model."""

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.asarray(PARAMS["w"]))

    tx = METHODS[name]()

    def step(model, optimizer, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        own = nnx.merge(graph, jaxcomp.view(params, optimizer.opt_state), rest, copy=True)
        loss, grads = jaxcomp.value_and_grad(lambda own, x: loss_of({"w": own.w[...]}, x), "data")(
            own, x
        )
        optimizer.update(model, grads)
        return loss

    def plain(params, state, x):
        here = jaxcomp.view(params, state)
        loss, grads = jaxcomp.value_and_grad(loss_of, "data")(here, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    model = Model()
    optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(tx, mesh, "data"), wrt=nnx.Param)
    run, alone = (jaxcomp.data_parallel(each, mesh, "data") for each in (step, plain))
    params, state = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data")
    for _ in range(3):
        loss = run(model, optimizer, X)
        params, state, want = alone(params, state, X)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    found = jaxcomp.consensus(nnx.state(model, nnx.Param), optimizer.opt_state)
    assert isinstance(found["w"], nnx.Param)
    want = jaxcomp.consensus(params, state)["w"]
    np.testing.assert_allclose(found["w"][...], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"`params` must be a tree of arrays, got an nnx object"):
        jaxcomp.view(model, optimizer.opt_state)


def test_no_tracer_outlives_its_trace(mesh):
    """JAX's leak checker looks for tracers that something still refers to after a trace."""
    tx = chain()
    with jax.checking_leaks():
        state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
        jaxcomp.data_parallel(stepper(tx), mesh, "data").trace(PARAMS, state, X)


def test_memory_of_the_host_is_moved_in_the_step(mesh):
    tx = chain()
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    held = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), state
    )

    def moving(params, state, x):
        return stepper(tx)(params, jax.device_put(state, jax.memory.Space.Device), x)

    want = jaxcomp.data_parallel(stepper(tx), mesh, "data")(PARAMS, state, X)
    found = jaxcomp.data_parallel(moving, mesh, "data")(PARAMS, held, X)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    with pytest.raises(ValueError, match="memory_space of all inputs") as caught:
        jaxcomp.data_parallel(stepper(tx), mesh, "data")(PARAMS, held, X)
    notes = [note for note in caught.value.__notes__ if note.startswith("jaxcomp")]
    assert len(notes) == 1
    assert "an argument lies in the memory of the host" in notes[0]

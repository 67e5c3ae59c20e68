"""Errors of other libraries in a step name a working alternative, and the alternative works."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.sharding import TWO, make_mesh
from helpers.suite import label
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

PARAMS = {"w": jnp.eye(32), "v": jnp.eye(32)}
BATCH = jnp.asarray(np.random.default_rng(0).standard_normal((32, 32)), jnp.float32)


def loss_of(params, x, lay=lambda h: h):
    return jnp.mean((lay(x @ params["w"]) @ params["v"] - 1) ** 2)


def step_of(grad, axis="data"):
    tx = jaxcomp.compressed_mean(jaxcomp.Dense(), axis)
    state = tx.init(PARAMS)

    def step(params, batch):
        updates, _ = tx.update(grad(jaxcomp.local(params, axis), batch), state)
        return jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)

    return step


def notes_of(step, mesh, error):
    with pytest.raises(error) as caught:
        jaxcomp.data_parallel(step, mesh, "data")(PARAMS, BATCH)
    return [note for note in caught.value.__notes__ if note.startswith("jaxcomp:")]


@pytest.mark.parametrize("how", ["spec", "sharding", "reshard"])
def test_constraints_on_the_axis_of_the_workers(how, mesh):
    def lay(h):
        if how == "reshard":
            return jax.sharding.reshard(h, P("data"))
        spec = P("data") if how == "spec" else NamedSharding(mesh, P("data"))
        return jax.lax.with_sharding_constraint(h, spec)

    step = step_of(jax.grad(lambda p, x: loss_of(p, x, lay)))
    (note,) = notes_of(step, mesh, ValueError)
    assert "nothing is split over 'data'" in note


def test_constraints_on_other_axes_work():
    def lay(h):
        return jax.lax.with_sharding_constraint(h, P(None, "fsdp"))

    mesh = make_mesh(TWO)
    got, want = (
        jaxcomp.data_parallel(step_of(jax.grad(f), "dcn"), mesh, "dcn")(PARAMS, BATCH)
        for f in (lambda p, x: loss_of(p, x, lay), loss_of)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def accumulated(start, loop):
    """Gradients of two micro-batches, summed up from what `start` makes of the parameters."""

    def grad(params, x):
        parts = x.reshape(2, -1, 32)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, part))

        zeros = start(params)
        if loop == "scan":
            total, _ = jax.lax.scan(lambda t, part: (add(t, part), None), zeros, parts)
        else:
            total = jax.lax.fori_loop(0, 2, lambda i, t: add(t, parts[i]), zeros)
        return jax.tree.map(lambda t: t / 2, total)

    return grad


def plain(params):
    return jax.tree.map(lambda p: jnp.zeros(p.shape), params)


@pytest.mark.parametrize("loop", ["scan", "fori"])
def test_micro_batches(loop, mesh):
    (note,) = notes_of(step_of(accumulated(plain, loop)), mesh, TypeError)
    assert "jaxcomp.local(zeros, 'data')" in note
    want = jaxcomp.data_parallel(step_of(jax.grad(loss_of)), mesh, "data")(PARAMS, BATCH)
    for start in (
        lambda params: jaxcomp.local(plain(params), "data"),
        lambda params: jax.tree.map(jnp.zeros_like, params),
    ):
        step = step_of(accumulated(start, loop))
        got = jaxcomp.data_parallel(step, mesh, "data")(PARAMS, BATCH)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def test_other_errors_are_as_they_were(mesh):
    def grad(params, x):
        raise ValueError("of the user")

    assert notes_of_other(step_of(grad), mesh) == []


def notes_of_other(step, mesh):
    with pytest.raises(ValueError, match="of the user") as caught:
        jaxcomp.data_parallel(step, mesh, "data", batch_argnums=1)(PARAMS, BATCH)
    return [note for note in getattr(caught.value, "__notes__", []) if "jaxcomp" in note]


@pytest.mark.core("inside")
@pytest.mark.parametrize("place", ["before", "inside"])
def test_lookahead(place, mesh):
    mean = jaxcomp.compressed_mean(jaxcomp.sign(bucket_size=64), "data")

    def ahead(tx):
        return optax.lookahead(tx, sync_period=2, slow_step_size=0.5)

    sgd = optax.sgd(0.1)
    tx = optax.chain(mean, ahead(sgd)) if place == "before" else ahead(optax.chain(mean, sgd))
    params = optax.LookaheadParams.init_synced({"w": jnp.ones((64, 64)) / 64, "v": jnp.eye(64)})
    state = jaxcomp.init_state(tx, params, mesh, "data")
    assert sum(x.shape[0] == 8 for x in jax.tree.leaves(state) if x.ndim > 1) == 2

    def step(params, state, batch):
        grads = jax.grad(loss_of)(jaxcomp.local(params.fast, "data"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    batch = jnp.tile(BATCH, (1, 2))
    run, first = jaxcomp.data_parallel(step, mesh, "data"), loss_of(params.fast, batch)
    for _ in range(4):
        params, state = run(params, state, batch)
    assert loss_of(params.slow, batch) < first
    for fast, slow in zip(*map(jax.tree.leaves, params), strict=True):
        np.testing.assert_allclose(fast, slow, atol=1e-6)  # After four steps they have met.


@pytest.mark.parametrize("codec", [jaxcomp.top_k(fraction=0.1), jaxcomp.qsgd_inf()], ids=label)
def test_loops_over_steps_with_a_state_from_init(codec, mesh):
    """It has its final shapes and tree, whatever reducer is chosen for eight workers."""
    tx = jaxcomp.compressed_mean(codec, "data")
    params, x = {"w": jnp.ones((64, 64))}, jnp.ones((64, 64))

    def step(params, state, x):
        def one(state, x):
            return tx.update({"w": x[:, None] * params["w"]}, state)[::-1]

        state, means = jax.lax.scan(one, state, x)
        return params, state, means

    run = jaxcomp.data_parallel(step, mesh, "data")
    run.lower(params, tx.init(params), x)
    run.lower(params, jaxcomp.init_state(tx, params, mesh, "data"), x)


def test_arrays_and_objects_from_outside():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
    run = jaxcomp.data_parallel(lambda x: x + jax.random.normal(key), mesh, "data")
    with pytest.raises(NotImplementedError) as error:
        run.lower(jnp.ones(8))
    assert "Pass it to the step as an argument" in error.value.__notes__[0]
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def step(x):
        graph, state = nnx.split(model)
        return jax.lax.pmean(nnx.merge(graph, state)(x), "data")

    with pytest.raises(Exception, match="different trace level") as error:
        jaxcomp.data_parallel(step, mesh, "data").lower(jnp.ones(8))
    assert any("nnx.merge(graphdef, state, copy=True)" in note for note in error.value.__notes__)


def ctc(params, x):
    logits = (x @ params["w"])[:, :25].reshape(-1, 5, 5)
    rows = len(logits)
    padding = jnp.zeros((rows, 5))
    return optax.ctc_loss(
        logits, padding, jnp.ones((rows, 2), jnp.int32), jnp.zeros((rows, 2))
    ).mean()


def branches(params, x):
    total = jnp.sum(x @ params["w"])
    return jax.lax.cond(total > 0, lambda: total, lambda: 0.0)


def drawn(params, x):
    return jnp.mean(jax.random.gamma(jax.random.key(0), jnp.exp(x @ params["w"])))


OF_LIBRARIES = {"ctc_loss": ctc, "cond": branches, "gamma": drawn}


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_types_that_a_library_does_not_know_are_switched_off(name, mesh):
    """The note names `check_vma=False`, with which the gradient is that of each worker."""
    loss = OF_LIBRARIES[name]

    def step(params, batch):
        value, grads = jaxcomp.value_and_grad(loss, "data")(params, batch)
        return value, jax.lax.pmean(grads["w"], "data")

    (note,) = notes_of(step, mesh, TypeError)
    assert "give data_parallel check_vma=False" in note
    value, grads = jaxcomp.data_parallel(step, mesh, "data", check_vma=False)(PARAMS, BATCH)
    each = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))
    values, want = each(PARAMS, BATCH.reshape(8, 4, 32))
    np.testing.assert_allclose(value, values.mean(), rtol=1e-5)
    np.testing.assert_allclose(grads, want["w"].mean(0), rtol=1e-4, atol=1e-5)


def test_an_inner_shard_map_takes_the_current_mesh():
    """Where it names the mesh, the note tells to leave that out, and nothing about the batch."""
    mesh = make_mesh({"data": 4, "fsdp": 2})

    def step_with(**given):
        def inner(w, x):
            return jax.lax.psum(x @ w, "fsdp")

        def loss(params, x):
            specs = (P("fsdp"), P(None, "fsdp"))
            on = jax.shard_map(inner, in_specs=specs, out_specs=P(), axis_names={"fsdp"}, **given)
            return jnp.mean((on(params["w"], x) @ params["v"] - 1) ** 2)

        return step_of(jax.grad(loss))

    (note,) = notes_of(step_with(mesh=mesh), mesh, ValueError)
    assert "Leave mesh= out of an inner jax.shard_map" in note
    assert "axis_names={'fsdp'}" in note
    found = jaxcomp.data_parallel(step_with(), mesh, "data")(PARAMS, BATCH)
    want = jaxcomp.data_parallel(step_of(jax.grad(loss_of)), mesh, "data")(PARAMS, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, want)

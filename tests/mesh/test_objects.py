"""Steps whose arguments are nnx objects or equinox modules."""

import functools
import subprocess
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jaxcomp

MESH = jax.make_mesh((8,), ("data",))
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
X = jax.random.normal(jax.random.key(0), (16, 4))
W = jnp.arange(1.0, 5.0)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(32, 4, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def trainer(loss_fn, codec, **settings):
    """A model, its optimizer, and the step of a tutorial."""
    model = Net(nnx.Rngs(0))
    tx = optax.chain(jaxcomp.compressed_mean(codec, axis_name="data"), optax.sgd(0.1))

    def step(model, optimizer, metrics, x):
        grad = jaxcomp.value_and_grad(loss_fn, "data", has_aux=True)
        (loss, y), grads = grad(model, x)
        metrics.update(loss=loss, logits=y, labels=jnp.argmax(x, -1))
        optimizer.update(model, grads)
        return loss

    step = jaxcomp.data_parallel(step, MESH, "data", **settings)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), step


@pytest.mark.full
def test_nnx_objects_change_in_place():
    """One step is that of a loop over the workers; the state of further ones is in place."""
    traces = []

    def loss_fn(model, x):
        traces.append(x)
        y = model(x)
        return jnp.mean((y - x) ** 2), y

    model, optimizer, step = trainer(loss_fn, jaxcomp.Dense(), donate_argnums=(0, 1))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    keys = nnx.state(model, nnx.RngKey)
    found = []
    for worker, x in enumerate(X.reshape(8, 2, 4)):
        own = nnx.clone(model)
        own.dropout.rngs.key[...] = jax.random.fold_in(own.dropout.rngs.key[...], worker)
        (loss, y), grads = nnx.value_and_grad(loss_fn, has_aux=True)(own, x)
        accuracy = jnp.mean(jnp.argmax(y, -1) == jnp.argmax(x, -1))
        stats = nnx.as_pure(nnx.state(own, nnx.BatchStat))
        found.append((loss, nnx.as_pure(grads), stats, accuracy))
    loss, grads, stats, accuracy = jax.tree.map(lambda *x: np.mean(x, 0), *found)
    before = nnx.as_pure(nnx.state(model, nnx.Param))
    want = jax.tree.map(lambda p, g: p - 0.1 * g, before, grads)

    def check(got, want):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)

    traces.clear()
    check(step(model, optimizer, metrics, X), loss)
    check(nnx.as_pure(nnx.state(model, nnx.Param)), want)
    check(nnx.as_pure(nnx.state(model, nnx.BatchStat)), stats)
    check(metrics.compute(), {"accuracy": accuracy, "loss": loss})
    for _ in range(2):
        step(model, optimizer, metrics, X)
    assert len(traces) == 1
    assert int(model.dropout.rngs.count[...]) == int(optimizer.step[...]) == 3
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(jax.random.key_data, (keys.dropout.rngs.key[...], model.dropout.rngs.key[...])),
    )
    model.eval()
    assert np.isfinite(nnx.jit(lambda model, x: model(x))(model, X)).all()


def test_batch_statistics_of_a_step_without_types():
    """Those that the step writes are averaged, with whatever it takes gradients."""
    model = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))

    def step(model, metrics, x):
        loss = jnp.mean(model(x) ** 2)
        if metrics is not None:
            metrics.update(loss=loss)
        return jax.lax.pmean(loss, "data")

    step = jaxcomp.data_parallel(step, MESH, "data", check_vma=False)
    step(model, None, X)
    np.testing.assert_allclose(model.mean[...], 0.5 * X.mean(0), rtol=1e-5)
    with pytest.raises(ValueError, match="with `check_vma=True`"):
        step(model, nnx.metrics.Average("loss"), X)


@pytest.mark.full
def test_memory_of_a_new_nnx_optimizer_is_for_all_workers():
    """Residuals both ways; the downlink's depends on the number of workers."""
    traces = []

    def loss_fn(model, x):
        traces.append(x)
        y = model(x)
        return jnp.mean((y - x) ** 2), y

    both = jaxcomp.Link(
        jaxcomp.Policy(jaxcomp.sign(bucket_size=64), min_size=0), jaxcomp.Residual()
    )
    model, optimizer, step = trainer(loss_fn, jaxcomp.TwoShot(both, both))
    metrics = nnx.metrics.Average("loss")
    for _ in range(3):
        step(model, optimizer, metrics, X)
    assert len(traces) == 1
    state = jax.tree_util.tree_leaves_with_path(nnx.state(optimizer))
    memory = [x for path, x in state if "per_worker" in jax.tree_util.keystr(path)]
    assert memory
    assert all(x.shape[0] == 8 and x.sharding.spec[0] == "data" for x in memory)
    assert not np.array_equal(*np.asarray(memory[0])[:2])
    assert step.lower(model, optimizer, metrics, X).as_text()


def refused(loss_fn, metrics, match, step=None):
    model, optimizer, plain = trainer(loss_fn, jaxcomp.Dense())
    with pytest.raises(ValueError, match=match):
        (plain if step is None else jaxcomp.data_parallel(step, MESH, "data"))(
            model, optimizer, metrics, X
        )


def test_nnx_state_that_cannot_be_averaged_is_refused():
    def loss_fn(model, x):
        y = model(x)
        return jnp.mean((y - x) ** 2), y

    def writes(model, x):
        model.seen[...] += jnp.sum(x)
        return loss_fn(model, x)

    def sows(model, x):
        model.sown = nnx.Intermediate(jnp.sum(x))
        return loss_fn(model, x)

    def changes(model, optimizer, metrics, x):
        model.eval()
        return jnp.zeros(())

    def returns(model, optimizer, metrics, x):
        return model

    average = nnx.metrics.Average("logits")
    refused(loss_fn, nnx.metrics.Welford("logits"), "the metric at 2 differs between the workers")
    refused(writes, average, r"the variable at \[0\]\['seen'\].* differs between the workers")
    refused(sows, average, "must not add or remove variables .*sown")
    refused(None, average, "must not change the structure of nnx objects", changes)
    refused(None, average, "must not return nnx objects", returns)


def test_describe_names_the_parameters_of_an_nnx_model():
    model, codec = Net(nnx.Rngs(0)), jaxcomp.qsgd_inf(bits=4)
    with pytest.raises(ValueError, match=r"take nnx\.state\(model, nnx\.Param\)"):
        jaxcomp.describe(codec, model, workers=8)
    assert len(jaxcomp.describe(codec, nnx.state(model, nnx.Param), workers=8).lines) == 6


def test_local_refuses_nnx_objects():
    def step(model, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(jaxcomp.local(model, "data"))
        return jax.lax.pmean(nnx.as_pure(nnx.state(grads, nnx.Param)), "data")

    with pytest.raises(ValueError, match=r"Use jaxcomp\.value_and_grad\(loss_fn, .data.\)"):
        jaxcomp.data_parallel(step, MESH, "data")(Net(nnx.Rngs(0)), X)


class Block(eqx.Module):
    """A module with leaves of every kind."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    table: jax.Array
    name: str

    def __call__(self, x, key):
        assert self.name == "block"
        return self.dropout(self.mlp(x), key=key) + 0 * self.table.sum()


@pytest.mark.full
def test_equinox_modules_are_arguments_and_results():
    traces = []
    key = jax.random.key(0)
    mlp = eqx.nn.MLP(4, 4, 32, 1, key=key)
    model = Block(mlp, eqx.nn.Dropout(0.5), jnp.arange(3), "block")
    tx = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), "data"), optax.sgd(0.1))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, x, key):
        traces.append(x)
        y = jax.vmap(model)(x, jax.random.split(key, len(x)))
        return jnp.mean((y - x) ** 2)

    want = [
        eqx.filter_value_and_grad(loss_fn)(model, x, jax.random.fold_in(key, worker))
        for worker, x in enumerate(X.reshape(8, 2, 4))
    ]
    loss, grads = jax.tree.map(lambda *x: np.mean(x, 0), *want)
    params = eqx.filter(model, eqx.is_inexact_array)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    @functools.partial(jaxcomp.data_parallel, mesh=MESH, axis_name="data")
    def step(model, state, key, x):
        loss, grads = jaxcomp.value_and_grad(loss_fn, "data")(model, x, key)
        updates, state = tx.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    traces.clear()
    model, state, found = step(model, state, key, X)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    got = eqx.filter(model, eqx.is_inexact_array)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    for _ in range(2):
        model, state, _ = step(model, state, key, X)
    assert len(traces) == 1
    assert model.mlp.activation is mlp.activation
    assert model.name == "block"
    assert model.dropout.inference is False
    assert jaxcomp.place(model, MESH, "data").name == "block"
    model = eqx.nn.inference_mode(model)  # Another static leaf: another program.
    step(model, state, key, X)
    assert len(traces) == 2


class Repeated(eqx.Module):
    """A module that counts with one of its leaves."""

    weight: jax.Array
    times: int
    activation: Callable

    def __call__(self, x):
        for _ in range(self.times):
            x = self.activation(x @ self.weight)
        return x


def test_a_loss_of_an_equinox_model_that_is_not_averaged():
    """The step is traced again to narrow types, with its static leaves as they are."""
    model = Repeated(jnp.ones((4, 4)) / 4, 2, jax.nn.relu)

    def step(model, x):
        loss = jnp.mean(jax.vmap(model)(x))
        return model, loss, 0 * x[0]

    run = jaxcomp.data_parallel(step, MESH, "data")
    with pytest.raises(ValueError, match=r"result\[1\] differs .*average it with jax\.lax\.pmean"):
        run.lower(model, X)
    averaged = jaxcomp.data_parallel(
        lambda m, x: (m, jax.lax.pmean(step(m, x)[1], "data"), jnp.zeros_like(x[0])), MESH, "data"
    )
    found, loss, zeros = averaged(model, X)
    np.testing.assert_allclose(loss, jnp.mean(jax.vmap(model)(X)), rtol=1e-5)
    assert (found.times, zeros.any()) == (2, False)


@pytest.mark.parametrize("library", ["equinox", "nnx"])
def test_a_step_compiled_ahead_of_time(library):
    """Takes whole modules and objects, as the step does, and refuses other static leaves."""
    if library == "equinox":
        model = Repeated(jnp.ones((4, 4)) / 4, 2, jax.nn.relu)
        other = Repeated(model.weight, 3, jax.nn.relu)
    else:
        model = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
        other = nnx.BatchNorm(4, momentum=0.5, use_bias=False, rngs=nnx.Rngs(0))

    def step(model, x, scale):
        y = model(x) if library == "nnx" else jax.vmap(model)(x)
        return None if library == "nnx" else model, jax.lax.pmean(scale * jnp.mean(y**2), "data")

    run = jaxcomp.data_parallel(step, MESH, "data", batch_argnames="x")
    stages = [run.lower(model, X, scale=2.0), run.trace(model, X, scale=2.0).lower()]
    want = run(nnx.clone(model) if library == "nnx" else model, X, scale=2.0)
    for lowered in stages:
        compiled = lowered.compile()
        assert "HloModule" in compiled.as_text()
        again = nnx.clone(model) if library == "nnx" else model
        found, loss = compiled(again, X, scale=2.0)
        np.testing.assert_array_equal(loss, want[1])
        if library == "nnx":
            np.testing.assert_allclose(again.mean[...], 0.5 * X.mean(0), rtol=1e-5)
        else:
            assert found.times == 2
        with pytest.raises(ValueError, match=r"static leaves.*compile it again"):
            compiled(other, X, scale=2.0)


def test_flax_and_equinox_are_not_imported():
    script = "import sys, jaxcomp; assert not {'flax', 'equinox'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)

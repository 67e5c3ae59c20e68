"""`value_and_grad`, and steps whose arguments are nnx objects or equinox modules."""

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
from jax.sharding import AxisType, PartitionSpec as P

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


def mapped(function, way):
    """The function of parameters and a batch, mapped over the workers; results of all of them."""
    if way == "vmap":
        return jax.vmap(function, in_axes=(None, 0), axis_name="data")
    if way == "pmap":
        return jax.pmap(function, in_axes=(None, 0), axis_name="data")

    def own(w, x):
        return jax.tree.map(lambda leaf: leaf[None], function(w, x[0]))

    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.jit(jax.shard_map(own, mesh=AUTO, **specs, check_vma=way == "shard_map"))


@pytest.mark.parametrize("way", ["shard_map", "shard_map without vma", "pmap", "vmap"])
def test_losses_are_averaged_and_gradients_are_not(way):
    """Metrics are averaged like the loss; other arrays, and gradients, remain each worker's own."""

    def loss_fn(params, x):
        y = x @ params["w"]
        return jnp.mean(y**2), {"logits": y, "metric": jnp.max(y), "count": jnp.sum(y > 0)}

    def step(w, x):
        params = {"w": w, "steps": jnp.int32(3)}
        (loss, aux), grads = jaxcomp.value_and_grad(loss_fn, "data", has_aux=True)(params, x)
        assert grads.pop("steps") is None
        return loss, aux, grads["w"]

    parts = X.reshape(8, 2, 4)
    loss, aux, grads = mapped(step, way)(W, parts)
    want = [jax.value_and_grad(lambda w, x=x: jnp.mean((x @ w) ** 2))(W) for x in parts]
    np.testing.assert_allclose(loss, np.full(8, np.mean([v for v, _ in want])), rtol=1e-5)
    np.testing.assert_allclose(grads, np.stack([g for _, g in want]), rtol=1e-5)
    np.testing.assert_allclose(aux["logits"], parts @ W, rtol=1e-5)
    np.testing.assert_allclose(aux["metric"], np.full(8, np.max(parts @ W, 1).mean()), rtol=1e-5)
    np.testing.assert_array_equal(aux["count"], np.sum(parts @ W > 0, 1))


@pytest.mark.parametrize("way", ["shard_map", "pmap"])
def test_keys_differ_between_workers(way):
    """Typed keys anywhere, and raw keys in arguments that are named; other words are data."""
    key, raw = jax.random.key(1), jax.random.PRNGKey(2)

    def drawn(w, keys, pair, labels, x, raw):
        draws = [keys["dropout"][0], keys["dropout"][1], raw, pair["a"][0], pair["a"][1]]
        return jnp.sum(w * x), (jnp.stack([jax.random.normal(k) for k in draws]), keys, labels + 0)

    def step(w, x):
        keys = {"dropout": jax.random.split(key), "table": raw}
        args, found = (w, keys, {"a": jax.random.split(raw)}, raw), []
        for named in ({"key_argnums": 2, "key_argnames": "raw"}, {}, {"fold_keys": False}):
            grad = jaxcomp.value_and_grad(drawn, "data", has_aux=True, **named)
            (_, (draws, keys, labels)), _ = grad(*args, x=x, raw=raw)
            found.append(draws)
        return found, keys["table"], labels

    (named, plain, kept), *data = mapped(step, way)(W, X.reshape(8, 2, 4))
    assert [len(np.unique(x)) for x in (named, plain, kept)] == [40, 16 + 3, 5]
    for words in data:
        np.testing.assert_array_equal(words, np.tile(raw, (8, 1)))
    own = [jax.random.fold_in(k, 5) for k in (raw, *jax.random.split(raw))]
    np.testing.assert_array_equal(named[5, 2:], [jax.random.normal(k) for k in own])


def test_arguments_named_as_keys_are_keys():
    def refused(match, *args, kwargs=None, **named):
        grad = jaxcomp.value_and_grad(lambda w, k, other=0: jnp.sum(w), "data", **named)
        step = mapped(lambda w, x: grad(w, *args, **(kwargs or {})), "vmap")
        with pytest.raises(ValueError, match=match):
            step(W, X[:8])

    key = jax.random.PRNGKey(0)
    refused("`key_argnums` must be numbers of the 2 positional.*got 0", key, key_argnums=0)
    refused("`key_argnums` must be numbers of the 2 positional.*got 2", key, key_argnums=2)
    refused(r"`key_argnames` must name.*got 'k'; name a positional", key, key_argnames="k")
    refused(r"must name PRNG keys.*got float32 of shape \(4,\) in argument 1", W, key_argnums=1)


@pytest.mark.parametrize("check_vma", [True, False])
def test_words_are_data(check_vma):
    """Two labels for each worker, and weights of hardware; a batch of pairs of words."""

    def loss_fn(w, labels, weights, x):
        logits = x @ jnp.outer(w, jnp.arange(3.0))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses) * weights[0] + weights[1]

    def step(w, weights, x, labels):
        return jaxcomp.value_and_grad(loss_fn, "data")(w, labels, weights, x)[0]

    labels, weights = jnp.arange(16, dtype=jnp.uint32) % 3, jnp.array([3, 5], jnp.uint32)
    settings = {"batch_argnums": (2, 3), "check_vma": check_vma}
    found = jaxcomp.data_parallel(step, MESH, "data", **settings)(W / 9, weights, X, labels)
    np.testing.assert_allclose(found, loss_fn(W / 9, labels, weights, X), rtol=1e-5)
    pairs = jnp.arange(128, dtype=jnp.uint32).reshape(64, 2)
    total = jaxcomp.data_parallel(lambda p: jax.lax.psum(p.sum(), "data"), MESH, "data")(pairs)
    assert int(total) == 127 * 64


def test_keys_that_differ_already_stay():
    def loss_fn(w, key):
        return jnp.sum(w * jax.random.normal(key))

    def step(w, seeds):
        loss, _ = jaxcomp.value_and_grad(loss_fn, "data")(w, jax.random.key(seeds[0]))
        return loss

    loss = jaxcomp.data_parallel(step, MESH, "data")(jnp.ones(()), jnp.arange(8))
    want = np.mean([jax.random.normal(jax.random.key(i)) for i in range(8)])
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_a_loss_that_is_averaged_already_is_refused():
    def loss_fn(w, x):
        return jax.lax.pmean(jnp.mean((x @ w) ** 2), "data")

    step = jaxcomp.data_parallel(jaxcomp.value_and_grad(loss_fn, "data"), MESH, "data")
    with pytest.raises(ValueError, match=r"without jax\.lax\.pmean or psum"):
        step(W, X)
    with pytest.raises(ValueError, match="is not bound here"):
        jaxcomp.value_and_grad(loss_fn, "data")(W, X)
    with pytest.raises(ValueError, match=r"`argnums` must be numbers of the 2 .*, got 2"):
        mapped(jaxcomp.value_and_grad(loss_fn, "data", argnums=2), "shard_map")(W, X[:, None])


def test_several_arguments_are_differentiated():
    def step(w, b, x):
        grad = jaxcomp.value_and_grad(lambda x, w, b: jnp.sum(x @ w + b), "data", argnums=(1, -1))
        _, grads = grad(x, w, b)
        return jax.lax.pmean(grads, "data")

    w, b = jaxcomp.data_parallel(step, MESH, "data")(W, jnp.zeros(()), X)
    np.testing.assert_allclose(w, X.sum(0) / 8, rtol=1e-5)
    assert b == 2


def test_pmean_is_the_mean_of_compressed_mean():
    codec = jaxcomp.qsgd_inf(bits=4)
    tx = jaxcomp.compressed_mean(codec, axis_name="data")

    def step(_, x):
        grads, number = x, jnp.int32(3)
        state = tx.init(grads)._replace(step=jnp.uint32(number))
        want, _ = tx.update(grads, state)
        keys = [number, number + 1, jax.random.key(3)]
        return want, [jaxcomp.pmean(grads, "data", codec, key) for key in keys]

    grads = jax.random.normal(jax.random.key(2), (8, 32, 32))
    want, (same, *others) = mapped(step, "shard_map")(W, grads)
    np.testing.assert_array_equal(same, want)
    assert len({x.tobytes() for x in map(np.asarray, (same, *others))}) == 3

    def refused(codec, key, match):
        step = mapped(lambda _, x: jaxcomp.pmean(x, "data", codec, key(x)), "shard_map")
        with pytest.raises(ValueError, match=match):
            step(W, grads)

    refused(jaxcomp.sign(), lambda x: 0, "`codec` must need no memory, got .*compressed_mean")
    refused(codec, lambda x: x[0, 0].astype(int), "`key` must be the same on all workers")


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

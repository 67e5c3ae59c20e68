"""Steps whose arguments are nnx objects: modules, optimizers and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxcomp

MESH = jax.make_mesh((8,), ("data",))
X = jax.random.normal(jax.random.key(0), (16, 4))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(32, 4, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


def trainer(loss_fn, codec, *, on_mesh=False, **settings):
    """A model, its optimizer, and the step of a tutorial."""
    model = Net(nnx.Rngs(0))
    tx = optax.chain(jaxcomp.compressed_mean(codec, axis_name="data"), optax.sgd(0.1))
    tx = jaxcomp.on_mesh(tx, MESH, "data") if on_mesh else tx

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
    model, optimizer, step = trainer(loss_fn, jaxcomp.TwoShot(both, both), on_mesh=True)
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


def test_variables_of_nnx_name_all_dimensions(mesh):
    """In a state that `nnx.Optimizer` makes, after a step that updates it in place."""

    class Model(nnx.Module):
        def __init__(self):
            names = {"out_sharding": P("a", "b"), "eager_sharding": False}
            self.w = nnx.Param(jnp.ones((8, 128)), **names)
            self.scale = nnx.Param(jnp.ones(()), out_sharding=())

    mean = jaxcomp.compressed_mean(jaxcomp.sign(), "data")
    chain = optax.chain(jaxcomp.per_worker(optax.trace(0.9)), mean, optax.adam(0.1))
    tx, model = jaxcomp.accumulate(chain, "data", every=2), Model()
    optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(tx, mesh, "data"), wrt=nnx.Param)

    def loss_of(model, x):
        return jnp.mean(x @ model.w[...]) * model.scale[...]

    def train(model, optimizer, x):
        loss, grads = jaxcomp.value_and_grad(loss_of, "data")(model, x)
        optimizer.update(model, grads)
        return loss

    jaxcomp.data_parallel(train, mesh, "data")(model, optimizer, jnp.ones((8, 8)))
    specs = nnx.get_partition_spec(optimizer.opt_state)
    assert specs.total.tree["w"].get_raw_value() == P(None, "a", "b")
    assert specs.inner[2][0].mu["w"].get_raw_value() == P("a", "b")
    assert optimizer.opt_state.total.tree["w"].shape == (8, 8, 128)

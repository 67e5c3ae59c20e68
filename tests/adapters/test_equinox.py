"""Steps whose arguments and results are equinox modules."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.modules import Repeated

import jaxcomp

MESH = jax.make_mesh((8,), ("data",))
X = jax.random.normal(jax.random.key(0), (16, 4))


class EveryKind(eqx.Module):
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
    model = EveryKind(mlp, eqx.nn.Dropout(0.5), jnp.arange(3), "block")
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


def test_a_loss_of_an_equinox_model_that_is_not_averaged():
    """The error names the result, where static leaves are among the results, too."""
    model = Repeated(jnp.ones((4, 4)) / 4, 2, jax.nn.relu)

    def step(model, x):
        return model, jnp.mean(jax.vmap(model)(x))

    run = jaxcomp.data_parallel(step, MESH, "data")
    with pytest.raises(ValueError, match=r"result\[1\] differs .*average it with jax\.lax\.pmean"):
        run.lower(model, X)
    averaged = jaxcomp.data_parallel(
        lambda m, x: (m, jax.lax.pmean(step(m, x)[1], "data")), MESH, "data"
    )
    found, loss = averaged(model, X)
    np.testing.assert_allclose(loss, jnp.mean(jax.vmap(model)(X)), rtol=1e-5)
    assert found.times == 2

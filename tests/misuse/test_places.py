"""Gradients at other parameters, or of other shapes, than those that a transformation moves."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomp

W, X = jnp.ones((3, 2)), jnp.ones((16, 3))
CODEC = jaxcomp.Policy(jaxcomp.qsgd(bits=4), min_size=0)
MEAN = jaxcomp.compressed_mean(CODEC, "data")
DISPLACED = {
    "local_updates": jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=3),
    "with a delay": jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=3, delay=1),
    "gossip": jaxcomp.gossip(optax.sgd(0.1), CODEC, "data"),
    "mcm": jaxcomp.algorithms.mcm(CODEC, "data", learning_rate=0.1),
}


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def traced(tx, grads, mesh, check_vma=True):
    def step(w, state, x):
        updates, state = tx.update(grads(w, state, x), state, w)
        return optax.apply_updates(w, updates), state

    step = jaxcomp.data_parallel(step, mesh, "data", check_vma=check_vma)
    return jax.eval_shape(step, W, jax.eval_shape(tx.init, W), X)


def at(point):
    def grads(w, state, x):
        return jaxcomp.value_and_grad(loss, "data")(point(w, state), x)[1]

    return grads


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", DISPLACED)
def test_a_forgotten_view_is_refused(name, check_vma, mesh):
    with pytest.raises(ValueError, match=r"gradients at `params`.*jaxcomp.view"):
        traced(DISPLACED[name], at(lambda w, _: w), mesh, check_vma)
    traced(DISPLACED[name], at(jaxcomp.view), mesh, check_vma)


def test_an_offset_that_is_a_constant_of_the_program_is_no_mistake():
    """That of a scalar, in a state made within the program."""
    codec = jaxcomp.Policy(jaxcomp.qsgd(bits=4), min_size=0, min_ndim=0)
    tx = jaxcomp.algorithms.mcm(codec, "data", learning_rate=0.1)

    def first(w, x):
        state = tx.init(w)
        return tx.update(jax.grad(lambda w: (w - x) ** 2)(jaxcomp.view(w, state)), state, w)[0]

    made = jax.eval_shape(jax.vmap(first, (None, 0), axis_name="data"), jnp.zeros(()), jnp.ones(8))
    assert made.shape == (8,)


def test_workers_that_exchange_in_every_step_are_at_the_centre(mesh):
    every_step = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=1)
    traced(every_step, at(lambda w, _: w), mesh)


@pytest.mark.parametrize(
    "tx", [MEAN, jaxcomp.accumulate(MEAN, "data", every=2), *list(DISPLACED.values())[::2]]
)
def test_gradients_of_each_example_are_refused(tx, mesh):
    def of_each(w, state, x):
        own = jaxcomp.local(jaxcomp.view(w, state), "data")
        return jax.vmap(jax.grad(loss), (None, 0))(own, x[:, None])

    with pytest.raises(ValueError, match=r"shapes of the parameters.*\(2, 3, 2\) for \(3, 2\)"):
        traced(tx, of_each, mesh)

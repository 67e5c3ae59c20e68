"""Complex parameters: real ones in pairs, or refused with that advice, in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import methods
from helpers.methods import everywhere

import jaxcomp
from jaxcomp import collectives

AXIS = "data"
SPLIT = optax.contrib.split_real_and_imaginary
CODEC = everywhere(jaxcomp.qsgd_inf(bits=4))
SAID = r"Wrap the whole chain, `optax.contrib.split_real_and_imaginary\(optax.chain"
_RNG = np.random.default_rng(3)
TARGETS = (_RNG.standard_normal((8, 4, 64)) + 1j * _RNG.standard_normal((8, 4, 64))).astype(
    np.complex64
)
PARAMS = {"b": np.zeros((2, 3), np.float32), "w": np.zeros((4, 64), np.complex64)}


def chain():
    return optax.chain(jaxcomp.compressed_mean(CODEC, AXIS), optax.adam(0.1))


def grads_of(params, target):
    """Conjugates of what `jax.grad` returns for `½ |w − t|²`."""
    return {"b": params["b"] + 1, "w": params["w"] - target}


def in_pairs(params, target):
    """The same gradients, of parameters whose real and imaginary parts are leaves."""
    re, im = params["w"]
    return {"b": params["b"] + 1, "w": (re - target.real, im - target.imag)}


def stepper(tx, grads_of=grads_of):
    def step(params, state, target):
        here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        updates, state = tx.update(grads_of(here, target.reshape(4, 64)), state, params)
        return optax.apply_updates(params, updates), state

    return step


def on_rows(mapped, tx, params=PARAMS, grads_of=grads_of):
    """The first worker's parameters and all states after three steps of `pmap` or `vmap`."""
    state = mapped(lambda _: tx.init(params), axis_name=AXIS)(np.arange(8))
    params = jax.tree.map(lambda x: np.broadcast_to(x, (8, *x.shape)), params)
    run = mapped(stepper(tx, grads_of), axis_name=AXIS)
    for _ in range(3):
        params, state = run(params, state, TARGETS)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.asarray(x)[:1].repeat(8, 0)), params)
    return jax.tree.map(lambda x: np.asarray(x)[0], params), state


def on_mesh(mesh, tx, params=PARAMS, grads_of=grads_of, check_vma=True):
    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    run = jaxcomp.data_parallel(stepper(tx, grads_of), mesh, AXIS, check_vma=check_vma)
    for _ in range(3):
        params, state = run(params, state, TARGETS)
    return jax.device_get(params), state


def by_vmap(function, axis_name):
    return jax.jit(jax.vmap(function, axis_name=axis_name))


MODES = {
    "pmap": lambda mesh, tx: on_rows(jax.pmap, tx),
    "typed": on_mesh,
    "untyped": lambda mesh, tx: on_mesh(mesh, tx, check_vma=False),
    "vmap": lambda mesh, tx: on_rows(by_vmap, tx),
}


@pytest.fixture(scope="module")
def want():
    """The parameters where real and imaginary parts are leaves."""
    zeros = np.zeros((4, 64), np.float32)
    params = {"b": PARAMS["b"], "w": (zeros, zeros)}
    return on_rows(by_vmap, chain(), params, in_pairs)[0]


@pytest.mark.core("pmap", "typed")
@pytest.mark.parametrize("mode", MODES)
def test_pairs_train_as_two_leaves_in_every_mode(mode, mesh, want):
    found, _ = MODES[mode](mesh, SPLIT(chain()))
    np.testing.assert_allclose(found["b"], want["b"], rtol=1e-5)
    whole = want["w"][0] + 1j * want["w"][1]
    np.testing.assert_allclose(found["w"], whole, rtol=1e-5, atol=1e-6)
    assert (found["w"] != 0).all()


LEFT_OUT = {
    "alone": chain,
    "masked": lambda: optax.masked(chain(), {"b": True, "w": False}),
}


@pytest.mark.core("pmap", "typed")
@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("mode", MODES)
def test_complex_leaves_are_refused_in_every_mode(mode, name, mesh):
    """Those that `optax.masked` hides from the mean would be trained by each worker alone."""
    with pytest.raises(ValueError, match=SAID):
        MODES[mode](mesh, LEFT_OUT[name]())


TRANSFORMATIONS = {
    "accumulate": lambda: jaxcomp.accumulate(optax.sgd(0.1), methods.AXIS, every=2),
    "averaged": jaxcomp.optimizers.averaged,
    "prox_adagrad": lambda: jaxcomp.optimizers.prox_adagrad(0.1),
    "sharded_optimizer": lambda: jaxcomp.sharded_optimizer(optax.adam(0.1), methods.AXIS, CODEC),
    "variance_reduced": lambda: jaxcomp.variance_reduced(every=2),
} | {name: lambda name=name: methods.build(name) for name in methods.METHODS | methods.GOSSIP}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_gives_the_same_advice(name):
    tx = TRANSFORMATIONS[name]()

    def run(_):
        state = tx.init({"x": PARAMS["w"]})
        return tx.update({"x": PARAMS["w"]}, state, {"x": PARAMS["w"]}, grad_fn=len)[0]

    with pytest.raises(ValueError, match=SAID):
        jax.eval_shape(jax.vmap(run, axis_name=methods.AXIS), jnp.zeros(2))


def test_collectives_and_codecs_refuse_them_too():
    gather = jax.vmap(
        lambda x: collectives.psum(x, AXIS, jaxcomp.qsgd_inf(bits=4), key=0), axis_name=AXIS
    )
    with pytest.raises(ValueError, match=r"of complex64: send \(x.real, x.imag\) in place of x"):
        jax.eval_shape(gather, TARGETS)
    with pytest.raises(ValueError, match=SAID):
        jaxcomp.wire_bytes(jaxcomp.qsgd_inf(bits=4), PARAMS)


@pytest.mark.core("local_updates")
@pytest.mark.parametrize(
    "make",
    [
        lambda: jaxcomp.local_updates(optax.adam(0.1), None, AXIS, every=2, reducer=CODEC),
        lambda: jaxcomp.gossip(optax.adam(0.1), CODEC, AXIS),
    ],
    ids=["local_updates", "gossip"],
)
def test_models_of_workers_are_in_pairs_too(make, mesh):
    """`view` and `consensus` of complex parameters."""
    zeros = np.zeros((4, 64), np.float32)
    params, state = on_mesh(mesh, SPLIT(make()))
    pairs = {"b": PARAMS["b"], "w": (zeros, zeros)}
    want, other = on_mesh(mesh, make(), pairs, in_pairs)
    params, want = jaxcomp.consensus(params, state), jaxcomp.consensus(want, other)
    np.testing.assert_allclose(params["w"], want["w"][0] + 1j * want["w"][1], rtol=1e-6)
    assert (np.abs(params["w"]) > 0).all()

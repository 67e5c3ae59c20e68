"""Transformations before and after a whole method, and around a mean, in optax."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcomp

GRADS = {"w": jnp.ones((2, 64, 64)), "b": jnp.ones((2, 8))}


def update(tx):
    """One update of two workers, by types alone."""

    def step(grads):
        return tx.update(grads, tx.init(grads), grads)[0]

    jax.eval_shape(jax.vmap(step, axis_name="data"), GRADS)


def read(tx):
    """The order of a state's parts is read, as by `init_state`."""
    state = jax.eval_shape(jax.vmap(tx.init, axis_name="data"), GRADS)
    jaxcomp.state_specs(state, "data")


AFTER = "must not have an optimizer after a method that takes the descent step itself"


def whole():
    return jaxcomp.algorithms.dgd_def(jaxcomp.top_k(fraction=0.5), "data", learning_rate=1.0)


def signs(learning_rate):
    return optax.chain(optax.scale_by_sign(), optax.scale_by_learning_rate(learning_rate))


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "sgd at one": lambda: optax.sgd(1.0),
    "adamw": lambda: optax.adamw(1e-3),
    "warm-up": lambda: optax.adam(optax.linear_schedule(0.0, 1e-3, 100)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "injected by hand": lambda: optax.inject_hyperparams(signs)(learning_rate=0.1),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "skip_nonfinite": lambda: jaxcomp.skip_nonfinite(optax.adam(1e-3)),
    "named_chain": lambda: optax.named_chain(("adam", optax.adam(1e-3))),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "another method": whole,
    "own": lambda: signs(0.1),
}

HARMLESS = {
    "clip": lambda: optax.clip_by_global_norm(1.0),
    "half": lambda: optax.scale(0.5),
    "ascent": lambda: optax.scale(-1.0),
    "schedule": lambda: optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 10)),
    "weights of the loss": lambda: optax.trace(0.9),
    "injected": lambda: optax.inject_hyperparams(optax.scale)(step_size=0.5),
}


@pytest.mark.parametrize("after", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_optimizer_follows_a_method(after):
    with pytest.raises(ValueError, match=AFTER):
        read(optax.chain(whole(), after()))


@pytest.mark.parametrize("after", HARMLESS.values(), ids=HARMLESS)
def test_what_does_not_turn_a_step_round_may_follow(after):
    read(optax.chain(whole(), after()))
    update(optax.chain(whole(), after()))


def test_chains_within_and_around():
    for tx in (
        optax.named_chain(("method", whole()), ("adam", optax.adam(1e-3))),
        optax.chain(optax.chain(optax.clip(1.0), whole()), optax.adam(1e-3)),
        optax.chain(jaxcomp.skip_nonfinite(whole()), optax.adam(1e-3)),
        optax.chain(optax.chain(whole(), optax.adam(1e-3)), optax.clip(1.0)),
    ):
        with pytest.raises(ValueError, match=AFTER):
            read(tx)
    read(optax.chain(optax.sgd(-1e-3), jaxcomp.skip_nonfinite(optax.chain(whole()))))


@pytest.mark.parametrize(
    "method",
    [
        lambda: jaxcomp.algorithms.zero_one_adam(
            jaxcomp.sign(), "data", learning_rate=0.1, freeze_step=10
        ),
        lambda: jaxcomp.algorithms.mcm(jaxcomp.qsgd(bits=4), "data", learning_rate=0.1),
        lambda: jaxcomp.algorithms.local_sgd(jaxcomp.Dense(), "data", learning_rate=0.1, every=2),
        lambda: jaxcomp.algorithms.dpsgd(jaxcomp.qsgd(bits=4), "data", learning_rate=0.1),
        lambda: jaxcomp.algorithms.lag("data", learning_rate=0.1),
    ],
)
def test_methods_of_all_kinds(method):
    read(method())
    with pytest.raises(ValueError, match=AFTER):
        read(optax.chain(method(), optax.adam(1e-3)))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"another method"}))
def test_every_optimizer_follows_a_mean(name):
    mean = jaxcomp.algorithms.ef21(jaxcomp.top_k(fraction=0.5), "data")
    read(optax.chain(mean, OPTIMIZERS[name]()))
    update(optax.chain(mean, OPTIMIZERS[name]()))


def test_wrappers_beside_a_mean_are_no_mistake():
    mean = jaxcomp.compressed_mean(jaxcomp.Dense(), "data")
    update(optax.chain(mean, optax.apply_if_finite(optax.sgd(0.1), 3)))
    update(optax.chain(mean, optax.MultiSteps(optax.sgd(0.1), 2)))


MEAN = jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.5), "data")
SENDING = {
    "mean without memory": jaxcomp.compressed_mean(jaxcomp.qsgd(bits=4), "data"),
    "frozen": jaxcomp.freeze(optax.chain(MEAN, optax.adam(0.1)), {"w": False, "b": True}),
    "accumulate": jaxcomp.accumulate(optax.chain(MEAN, optax.adam(0.1)), "data", every=2),
    "local updates": jaxcomp.local_updates(optax.adam(0.1), None, "data", every=2),
    "gossip": jaxcomp.gossip(optax.sgd(0.1), jaxcomp.qsgd(bits=4), "data"),
}


@pytest.mark.parametrize("tx", SENDING.values(), ids=SENDING)
def test_memory_of_workers_is_not_mapped_as_parameters(tx):
    """Specs of parameters would split its wrong dimensions; batches have no parameter's shape."""
    state = tx.init(GRADS)
    with pytest.raises(ValueError, match=r"`initable` .* jaxcomp\.place\(.*opt, f, state\[1\]"):
        optax.tree_utils.tree_map_params(tx, jnp.zeros_like, state)


def test_the_optimizer_after_a_mean_is_mapped_by_itself():
    opt = optax.adam(0.1)
    state = optax.chain(MEAN, opt).init(GRADS)
    found = optax.tree_utils.tree_map_params(opt, jnp.ones_like, state[1])
    assert all((leaf == 1).all() for leaf in jax.tree.leaves((found[0].mu, found[0].nu)))

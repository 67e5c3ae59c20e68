"""The program of several slices: as plain `jit` with dense messages, fewer bytes with codecs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.paths import ROOT

pytest.importorskip("flax")


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        import multislice
        import sharded_byte_lm

        patch.setattr(multislice, "LAYERS", 2)
        patch.setattr(multislice, "WIDTH", 64)
        patch.setattr(multislice, "LENGTH", 16)
        yield multislice, sharded_byte_lm.crossing


@pytest.fixture(scope="module")
def run(program):
    multislice, crossing = program
    mesh = multislice.jaxcomp.hybrid_mesh({"dcn": 2}, {"fsdp": 2, "tp": 2})
    model = multislice.Decoder()
    specs = multislice.specs_of(model, mesh)
    draw = np.random.default_rng(0)
    batches = draw.integers(0, 32, (4, 16, 17)).astype(np.int32)

    @functools.cache
    def run(name):
        tx = multislice.optimizer(multislice.CODECS[name], specs, 3e-3)
        state = multislice.init_state(model, tx, mesh, specs, seed=0)
        first = jax.tree.map(np.asarray, state.params)
        split = jax.sharding.NamedSharding(mesh, multislice.BATCH)
        step = multislice.build_step(mesh, 2)
        step = step.lower(state, jax.device_put(batches[0], split)).compile()
        found = []
        for tokens in batches:
            state, metrics = step(state, jax.device_put(tokens, split))
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return first, state, found, crossing(step, mesh)

    return run, model, batches


def plain(model, params, batches):
    """The same training under `jax.jit`, on one device."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95, weight_decay=0.1))

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() / jnp.log(2)

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    state, found = tx.init(params), []
    for tokens in batches:
        params, state, *numbers = step(params, state, tokens)
        found.append([float(number) for number in numbers])
    return params, found


@pytest.mark.full
def test_dense_messages_train_as_plain_jit(run, monkeypatch, program):
    run, model, batches = run
    first, state, found, _ = run("dense")
    monkeypatch.setattr(program[0], "constrain", lambda x, *logical: x)
    params, expected = plain(model, first, batches)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    after = jax.tree.map(np.asarray, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), after, params)


@pytest.mark.full
def test_shards_stay_in_place_and_few_bytes_cross_the_slices(run):
    run, _, _ = run
    _, dense, _, (far_dense, _) = run("dense")
    _, state, found, (far, _) = run("qsgd_inf")
    assert np.isfinite(found).all()
    assert found[-1][0] < found[0][0]
    assert far < far_dense / 5
    for one, other in zip(*(jax.tree.leaves(x.params) for x in (state, dense)), strict=True):
        assert one.sharding == other.sharding
        assert not one.sharding.is_fully_replicated

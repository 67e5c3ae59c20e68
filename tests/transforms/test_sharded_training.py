"""Sharded models in training: optimizers, checkpoints and non-finite gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers.sharding import (
    EF_SIGN,
    REDUCERS,
    SHAPES,
    SPECS,
    draw,
    homes,
    put,
    stepper,
    zeros,
)
from jax.sharding import PartitionSpec as P

import jaxcomp


def loss_of(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


MODEL = {"in": (32, 256), "bias": (256,), "out": (256, 32)}
MODEL_SPECS = {"in": P("fsdp", "tp"), "bias": P(), "out": P("tp", "fsdp")}
BATCH = tuple(jnp.asarray(x[0]) for x in draw({"x": (64, 32), "y": (64, 32)}, 7, 1).values())


def trainer(mesh, specs, reducer=REDUCERS["two shot, both ways"], **settings):
    tx = optax.chain(
        jaxcomp.compressed_mean(reducer, "dcn", param_specs=specs, **settings), optax.adamw(1e-2)
    )

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(jaxcomp.local(params, "dcn"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "dcn")

    return tx, jaxcomp.data_parallel(step, mesh, "dcn", batch_spec=P(("dcn", "fsdp")))


@pytest.fixture(scope="module")
def trained(three):
    """Six steps: the step, and what there was before each and in the end."""
    tx, run = trainer(three, MODEL_SPECS)
    start = {k: x[0] * 0.1 for k, x in draw(MODEL, 3, 1).items()}
    params = put(start, three, MODEL_SPECS)
    state, seen, losses = jaxcomp.init_state(tx, params, three, "dcn"), [], []
    for _ in range(6):
        seen.append((params, state))
        params, state, loss = run(params, state, BATCH)
        losses.append(float(loss))
    return tx, run, [*seen, (params, state)], losses


def test_trains_with_adamw(trained):
    _, _, seen, losses = trained
    assert losses[-1] < 0.9 * losses[0]
    params, state = seen[-1]
    for x in params.values():  # Replicas have the same bits.
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(x)[shard.index])
    assert len({jax.tree.structure(one) for one in seen}) == 1
    assert all(homes(one) == homes(seen[0]) for one in seen)  # So nothing is compiled twice.
    mean, (adam, *_) = state
    assert {k: x.sharding.spec for k, x in adam.mu.items()} == MODEL_SPECS
    memory = jax.tree.leaves(mean.memory)
    assert all(x.sharding.spec == P("dcn", ("fsdp", "tp")) for x in memory)
    assert all(x.shape[:2] == (2, 4) for x in memory)
    assert all(x.addressable_shards[0].data.shape[:2] == (1, 1) for x in memory)


def test_a_sharded_checkpoint_goes_on_bit_for_bit(trained, three):
    """What was saved is placed again, and goes on bit for bit."""
    tx, run, seen, _ = trained
    (params, state), end = seen[3], seen[-1]
    saved = jax.device_get((params, state))
    again = jax.device_put(saved, jax.tree.map(lambda x: x.sharding, (params, state)))
    placed = jaxcomp.place(saved[1], three, "dcn", params=params)
    assert homes(placed) == homes(state)
    for one in (again, (params, placed)):
        for _ in range(3):
            *one, _ = run(*one, BATCH)
        jax.tree.map(np.testing.assert_array_equal, tuple(one), end)

    held = serialization.from_bytes(state, serialization.to_bytes(state))
    jax.tree.map(np.testing.assert_array_equal, held, saved[1])
    more = jaxcomp.resize_workers(tx, state, params, 3)
    first = jax.tree.leaves(state[0].memory.tree.feedback)[0]
    moved = jax.tree.leaves(more[0].memory.tree.feedback)[0]
    assert moved.shape == (3, *first.shape[1:])
    np.testing.assert_allclose(moved[2], np.mean(first, axis=0), rtol=1e-6)


def test_one_shard_that_is_not_finite_stops_all(trained):
    _, run, seen, _ = trained
    params, state = seen[-1]
    params["out"] = params["out"].at[0, 0].set(jnp.nan)  # In the forward pass it reaches all.
    _, after, _ = run(params, state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, after[0].memory, state[0].memory)


def test_guard_agrees_between_shards(two):
    tx = jaxcomp.compressed_mean(EF_SIGN, "dcn", param_specs=SPECS)
    state = jaxcomp.init_state(tx, zeros(SHAPES, two, SPECS), two, "dcn")
    run, grads = stepper(tx, two), draw(SHAPES)
    before, _ = run(state, put(grads, two, SPECS, "dcn"))
    grads["kernel"][1, 20, 3] = np.inf  # Of one worker, and one shard.
    after, mean = run(before, put(grads, two, SPECS, "dcn"))
    assert np.isfinite(np.asarray(mean["kernel"])).all(axis=1).reshape(4, 16).all(axis=1).sum() == 3
    jax.tree.map(np.testing.assert_array_equal, after.memory, before.memory)
    assert int(after.step) == 2

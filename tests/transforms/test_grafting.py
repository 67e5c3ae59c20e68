"""Moments that move into a chain with another compressor; states that do not fit any chain."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from helpers.paths import ROOT
from jax.sharding import AxisType, NamedSharding

import jaxcomp

RNG = np.random.default_rng(0)
PARAMS = {
    "layers": [jnp.asarray(RNG.standard_normal((64, 64)) / 8, jnp.float32) for _ in range(2)],
    "bias": jnp.zeros(64),
}
BATCH = jnp.asarray(RNG.standard_normal((16, 64)), jnp.float32)


def loss_of(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x + params["bias"] - 1) ** 2)


def step_of(tx, local=True):
    def step(params, state, batch):
        at = jaxcomp.local(params, "data") if local else params
        updates, state = tx.update(jax.grad(loss_of)(at, batch), state, params)
        return optax.apply_updates(params, updates), state

    return step


def adamw():
    return optax.adamw(optax.constant_schedule(1e-2))


def signs():
    return jaxcomp.compressed_mean(jaxcomp.sign(), "data")


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def dense():
    """A state of AdamW alone, after some steps."""
    tx = adamw()
    step, (params, state) = jax.jit(step_of(tx, local=False)), (PARAMS, tx.init(PARAMS))
    for _ in range(3):
        params, state = step(params, state, BATCH)
    return state


@pytest.fixture(scope="module")
def compressed(dense, mesh):
    """The same, in a chain with signs."""
    return jaxcomp.graft(optax.chain(signs(), adamw()), dense, PARAMS, mesh, "data")


@pytest.mark.full
def test_a_dense_run_goes_on_compressed(dense, compressed, mesh):
    tx = optax.chain(signs(), adamw())
    same(compressed[1], dense)
    fresh = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    assert jax.tree.structure(compressed) == jax.tree.structure(fresh)
    same(compressed[0], fresh[0])
    for got, want in zip(*map(jax.tree.leaves, (compressed, fresh)), strict=True):
        assert got.sharding == want.sharding
    _, after = jaxcomp.data_parallel(step_of(tx), mesh, "data")(PARAMS, compressed, BATCH)
    assert int(after[1][0].count) == 4


def test_to_another_codec_and_back_to_none(dense, compressed, mesh):
    top = jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.1), "data")
    tx = jaxcomp.skip_nonfinite(optax.chain(top, optax.clip_by_global_norm(1.0), adamw()))
    old = jaxcomp.skip_nonfinite(optax.chain(signs(), adamw()))
    start: Any = jaxcomp.init_state(old, PARAMS, mesh, "data")
    state = start._replace(inner=compressed)
    moved = jaxcomp.graft(tx, state, PARAMS, mesh, "data")
    same(moved.inner[2], dense)
    same(jaxcomp.graft(adamw(), compressed, PARAMS, mesh, "data"), dense)


@pytest.mark.parametrize("library", ["flax", "orbax"])
def test_from_a_checkpoint_without_a_target(library, compressed, dense, mesh, tmp_path):
    if library == "flax":
        found = serialization.msgpack_restore(serialization.to_bytes(compressed))
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", compressed)
            checkpointer.wait_until_finished()
            found = checkpointer.restore(tmp_path / "state")
    tx = optax.chain(signs(), adamw())
    with pytest.raises(ValueError, match=r"without a target.* jaxcomp\.graft\(tx, state"):
        jaxcomp.data_parallel(step_of(tx), mesh, "data")(PARAMS, found, BATCH)
    same(jaxcomp.graft(tx, found, PARAMS, mesh, "data")[1], dense)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_advised_target_restores_all(kind, compressed, tmp_path):
    tx, mesh = optax.chain(signs(), adamw()), jax.make_mesh((8,), ("data",), axis_types=(kind,))
    shapes = jax.eval_shape(lambda p: jaxcomp.init_state(tx, p, mesh, "data"), PARAMS)
    target = jaxcomp.place(shapes, mesh, "data", params=PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", compressed)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", target)
    assert jax.tree.structure(found) == jax.tree.structure(compressed)
    same(found, compressed)
    jaxcomp.data_parallel(step_of(tx), mesh, "data").lower(PARAMS, found, BATCH)
    for got, want in zip(*map(jax.tree.leaves, (found, compressed)), strict=True):
        assert got.sharding == NamedSharding(mesh, want.sharding.spec)


OTHERS = {
    "no schedule": (lambda: optax.adamw(1e-2).init(PARAMS), "has 0 arrays 'ScaleByScheduleState"),
    "no moments": (lambda: optax.sgd(0.1).init(PARAMS), "has 0 arrays 'ScaleByAdamState.count'"),
    "parameters": (lambda: PARAMS, "has 0 arrays 'count' where `tx` has 2"),
    "fewer layers": (
        lambda: adamw().init(PARAMS | {"layers": PARAMS["layers"][:1]}),
        "has 1 arrays 'ScaleByAdamState.mu/layers' where `tx` has 2",
    ),
    "another shape": (
        lambda: adamw().init(PARAMS | {"bias": jnp.zeros(3)}),
        r"mu/bias' is \(\(3,\), 'float32'\) where `tx` has \(\(64,\), 'float32'\)",
    ),
    "more": (
        lambda: optax.chain(optax.trace(0.9), adamw()).init(PARAMS),
        "has 1 arrays 'TraceState.trace/bias' where `tx` has 0",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_refuses_what_does_not_match(name, mesh):
    make, said = OTHERS[name]
    with pytest.raises(ValueError, match=said):
        jaxcomp.graft(optax.chain(signs(), adamw()), make(), PARAMS, mesh, "data")


HANDED = {
    "adam": (lambda: optax.adam(1e-2), "CompressedMeanState made by .*, got ScaleByAdamState"),
    "sgd": (lambda: optax.sgd(1e-2), "CompressedMeanState made by .*, got EmptyState"),
    "adamw": (adamw, "number of updates and states"),
}


@pytest.mark.parametrize("name", HANDED)
def test_the_state_of_another_chain_is_refused(name, mesh):
    make, said = HANDED[name]
    tx = optax.chain(signs(), make())
    step = jaxcomp.data_parallel(step_of(tx), mesh, "data")
    with pytest.raises(ValueError, match=said) as caught:
        step(PARAMS, make().init(PARAMS), BATCH)
    everything = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "jaxcomp.graft(tx, state, params, mesh, axis_name)" in everything


LATE = """
import io, sys
import jax, jax.numpy as jnp, jaxcomp

tx = jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.1), "data")
state = tx.init({"w": jnp.ones((64, 64))})
assert "flax" not in sys.modules
from flax import serialization
from jax.sharding import AxisType, NamedSharding

data = serialization.to_bytes(state)
back = serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), data)
assert jax.tree.structure(back) == jax.tree.structure(state)
print(type(back.memory.feedback).__name__)
"""


@pytest.mark.full
def test_flax_may_be_imported_late():
    command = [sys.executable, "-c", LATE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "PerWorker"

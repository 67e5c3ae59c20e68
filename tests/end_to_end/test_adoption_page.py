"""The blocks of `docs/adoption.md` run unchanged, and have the results that the page states."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.paths import ROOT

import jaxcomp

PAGE = (ROOT / "docs" / "adoption.md").read_text()
BLOCKS = {
    title.splitlines()[0]: re.findall(r"```python\n(.*?)```", title, flags=re.DOTALL)
    for title in re.split(r"^#+ ", PAGE, flags=re.M)[1:]
}


@pytest.fixture
def names():
    """The names that the first block defines."""
    found = {}
    exec(BLOCKS["In a training script of your own"][0], found)
    return found


def run(title, names):
    for block in BLOCKS[title]:
        exec(block, names)
    return names


@pytest.mark.full
def test_means_over_tokens(names):
    """The loss, and with a dense mean the gradient, are those of all tokens."""
    names["mean"] = lambda: jaxcomp.compressed_mean(jaxcomp.Dense(), "data")
    run("Means over tokens", names)

    def whole(params):
        x, weight = names["x"], names["weight"]
        losses = jnp.mean((names["forward"](params, x) - x[:, ::-1]) ** 2, axis=1)
        return jnp.sum(losses * weight) / jnp.sum(weight)

    assert sorted(np.asarray(names["weight"]).reshape(8, 8).sum(axis=1)) == list(range(1, 9))
    check_gradient(names, names["token_loss"], whole, (names["x"], names["weight"]))
    np.testing.assert_allclose(names["loss"], whole(names["params"]), rtol=1e-5)


def check_gradient(names, loss_fn, whole, batch):
    """The mean of the workers' gradients is that of the whole batch."""
    tx, params = jaxcomp.compressed_mean(jaxcomp.Dense(), "data"), names["params"]
    step = names["make_step"](tx, jax.value_and_grad(loss_fn))
    after, *_ = step(params, jaxcomp.init_state(tx, params, names["mesh"], "data"), batch)
    grads = jax.tree.map(jnp.subtract, after, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, jax.grad(whole)(params)
    )


@pytest.mark.full
def test_batch_norm(names):
    run("Batch norm", names)
    one = jax.vmap(names["normalised"], in_axes=(None, 0), axis_name="data")

    def whole(params):
        return one(params, names["x"][None])[0]

    check_gradient(names, names["normalised"], whole, names["x"])


def test_random_numbers(names):
    assert np.isfinite(run("Random numbers", names)["loss"])


def test_freezing(names):
    run("Freezing and LoRA", names)
    np.testing.assert_array_equal(names["tuned"]["base"], names["params"]["base"])
    assert np.any(np.asarray(names["tuned"]["lora"]["b"]))
    wanted = jaxcomp.wire_bytes(jaxcomp.Dense(), names["params"]["lora"], workers=8)
    assert sum(names["sent"].values()) < wanted


@pytest.mark.full
def test_clipping_accumulation_scaling(names):
    run("Clipping, accumulation, gradient scaling", names)
    np.testing.assert_allclose(names["loss"], names["loss_fn"](names["params"], names["x"]), 1e-5)


@pytest.fixture(scope="module")
def wrappers():
    found = {}
    exec(BLOCKS["In a training script of your own"][0], found)
    return run("Wrappers of optax", found)


WRAPPERS = ["masked", "partition", "MultiSteps", "inject_hyperparams", "schedule_free", "muon"]


@pytest.mark.full
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_optax(wrappers, name):
    """The loss is that of the whole batch under `jit`, with the optimizer as it was."""
    assert list(wrappers["dense"]) == WRAPPERS
    tx, x, loss_fn = wrappers["dense"][name], wrappers["x"], wrappers["loss_fn"]

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params = wrappers["params"]
    state = tx.init(params)
    for _ in range(12):
        params, state = step(params, state)
    compressed, after = wrappers["train"](wrappers["compressed"][name])
    first = loss_fn(wrappers["params"], x)
    gain, wanted = (first - loss_fn(p, x) for p in (compressed, params))
    assert wanted > 1e-4
    np.testing.assert_allclose(gain, wanted, rtol=0.2)
    assert jax.tree.structure(after[1]) == jax.tree.structure(state)
    if name == "masked":
        np.testing.assert_array_equal(compressed["base"], wrappers["params"]["base"])
    if name == "inject_hyperparams":
        after[1].hyperparams["learning_rate"] = jnp.float32(0)


@pytest.mark.full
def test_wrappers_evaluate_and_accumulate(wrappers):
    loss_fn, params, x = (wrappers[name] for name in ("loss_fn", "params", "x"))
    assert loss_fn(wrappers["averaged"], x) < loss_fn(params, x)
    few, _ = wrappers["train"](wrappers["once"], steps=2)
    jax.tree.map(np.testing.assert_array_equal, few, params)  # The third micro-batch steps.
    some, _ = wrappers["train"](wrappers["once"], steps=3)
    assert loss_fn(some, x) < loss_fn(params, x)


@pytest.mark.full
def test_other_situations(names):
    run("Other situations", names)
    loss_fn, params, x = (names[name] for name in ("loss_fn", "params", "x"))
    np.testing.assert_allclose(names["inner_loss"], loss_fn(params, x), rtol=1e-5)
    np.testing.assert_allclose(names["ahead_loss"], loss_fn(params, x), rtol=1e-5)
    each = [loss_fn(jax.tree.map(lambda p, by=by: by * p, params), x) for by in (1, 0.9, 1.1)]
    np.testing.assert_allclose(names["total"], sum(each), rtol=1e-5)


@pytest.mark.full
def test_loops_of_libraries(names):
    run("Loops of libraries", names)
    loss = names["rnn_loss"](names["weights"], names["sequences"])
    np.testing.assert_allclose(names["loss"], loss, rtol=1e-5)
    assert names["rnn_loss"](names["trained"], names["sequences"]) < loss


@pytest.mark.full
def test_complex_parameters(names):
    turned = run("Complex parameters", names)["turned"]["base"]
    assert jnp.iscomplexobj(turned)
    assert (turned.imag != 0).any()


@pytest.mark.full
def test_memory_of_the_host(names):
    state = run("Memory of the host", names)["state"]
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {"pinned_host"}


def test_blocks_of_checkpoints(names):
    run("Checkpoints", names)
    for got in (names["restored"], names["state"]):
        assert isinstance(got[0], type(names["restored"][0]))
    jax.tree.map(np.testing.assert_array_equal, names["dense"], names["trained"])


def test_fsdp(names):
    state = run("FSDP", names)["state"]
    assert state[1][0].mu["base"].sharding.spec == jax.P(None, "fsdp")


def test_rows_without_a_gradient_stay_where_they_are(names):
    """The page's order: a rotated codec moves them, one with a rule for embeddings does not."""
    rotated, ruled = run("Rows without a gradient", names)["moved"].values()
    assert 0.1 < rotated < 0.2
    assert ruled == 0
    kept = names["others_move"](jaxcomp.qsgd_inf(bits=4), steps=2)
    assert kept == 0

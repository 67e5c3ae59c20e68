"""Power iteration: low-rank matrices arrive exactly, and the loss of others stays in memory."""

import functools
import inspect
import itertools
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers.suite import slow
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import testing
from jaxcomp.exchange import legs
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.numerics import noise

PLAIN = jaxcomp.PowerIteration(rank=4)
TURNS = jaxcomp.PowerIteration(rank=4, alternate=True)
NARROW = jaxcomp.PowerIteration(rank=4, factors="bfloat16")
CODED = jaxcomp.PowerIteration(rank=4, factors=jaxcomp.qsgd_inf(bits=8))
CODED_TURNS = jaxcomp.PowerIteration(
    rank=4, alternate=True, factors=jaxcomp.qsgd_inf(bits=8, bucket_size=64)
)
EVERY = [PLAIN, TURNS, NARROW, CODED, CODED_TURNS]


def name(value):
    """A short test id."""
    if not isinstance(value, jaxcomp.PowerIteration):
        return None
    kinds = {None: "plain", "bfloat16": "narrow"}
    return kinds.get(value.factors, "coded") + "-in-turns" * value.alternate


def gaussian(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def of_rank(rank, rows, cols, seed=0):
    return gaussian(rows, rank, seed=seed) @ gaussian(rank, cols, seed=seed + 1)


def replicate(tree, workers):
    return jax.tree.map(lambda x: jnp.stack([x] * workers), tree)


@functools.partial(jax.jit, static_argnums=0)
def step(reducer, grads, state, weight=None):
    """One reduction without feedback over the workers of the leading axis, which is simulated."""

    def collect(tree, state, weight):
        plan = Plan.of(reducer, tree, "data")
        message, _ = trees.stacks(plan.layout, tree)
        got = legs.collect(plan, noise.raw(1), message, state, weight)
        return *(trees.assemble(plan.layout, x, ()) for x in (got.value, got.sent)), got.state

    axes = (0, 0, None if weight is None else 0)
    return jax.vmap(collect, in_axes=axes, axis_name="data")(grads, state, weight)


def start(reducer, grads):
    workers = jax.tree.leaves(grads)[0].shape[0]
    like = jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)
    state = legs.init(Plan.of(reducer, like, "data", (workers,)))
    return replicate(state, workers)


def relative(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.core("1")
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_what_is_of_low_rank_is_exact_after_one_step(workers):
    """The mean is, whatever the workers' own matrices are, on any number of them."""
    own = gaussian(workers, 48, 64, seed=3)
    for rank in (1, 4):
        grads = own - own.mean(0) + of_rank(rank, 48, 64)
        mean, sent, _ = step(PLAIN, grads, start(PLAIN, grads))
        assert relative(mean[0], grads.mean(0)) < 2e-5
        assert workers == 1 or relative(sent[0], grads[0]) > 0.3
        assert relative(sent.mean(0), mean[0]) < 2e-6


@pytest.mark.core("plain")
@pytest.mark.parametrize("reducer", [PLAIN, TURNS], ids=name)
def test_the_subspace_converges(reducer):
    """On one matrix, step by step, to the error of the best approximation of this rank."""
    values = np.array([8.0, 6, 5, 4, *np.linspace(1, 0, 36)])
    left, _ = np.linalg.qr(gaussian(48, 40))
    right, _ = np.linalg.qr(gaussian(64, 40, seed=1))
    matrix = jnp.asarray(left * values @ right.T, jnp.float32)
    grads = matrix + 0.1 * (noises := gaussian(4, 48, 64, seed=2)) - 0.1 * noises.mean(0)
    best = np.sqrt((values[4:] ** 2).sum() / (values**2).sum())
    state, errors = start(reducer, grads), []
    for _ in range(12):
        mean, _, state = step(reducer, grads, state)
        errors.append(relative(mean[0], matrix))
    assert errors[0] > 1.2 * best
    assert best * (1 - 1e-5) < errors[-1] < best * (1 + 1e-4)
    assert all(after < before * (1 + 1e-5) for before, after in itertools.pairwise(errors))


@pytest.mark.full
def test_a_step_without_information_does_no_harm():
    """Zeros, or no participant: the factors stay, so that the next step goes on from them."""
    grads = gaussian(2, 48, 64)
    for reducer in (PLAIN, TURNS):
        _, _, state = step(reducer, grads, start(reducer, grads))
        mean, sent, after = step(reducer, 0 * grads, state)
        assert not np.asarray(mean).any()
        assert not np.asarray(sent).any()
        mean, _, idle = step(reducer, grads, state, jnp.zeros(2))
        assert not np.asarray(mean).any()
        for got, same, want in zip(*map(jax.tree.leaves, (after, idle, state)), strict=True):
            if got.ndim > 1:
                np.testing.assert_array_equal(got, want)
                np.testing.assert_array_equal(same, want)
        # A gradient of lower rank leaves vectors for the day when there is more.
        thin = replicate(of_rank(1, 48, 64), 2)
        for _ in range(4):
            _, _, state = step(reducer, thin, state)
        full = replicate(of_rank(4, 48, 64, seed=5), 2)
        for _ in range(3):
            mean, _, state = step(reducer, full, state)
        assert relative(mean[0], full[0]) < 1e-3


@pytest.mark.core("plain")
@pytest.mark.parametrize("reducer", [PLAIN, slow(TURNS), NARROW, CODED], ids=name)
def test_power_iteration_meets_the_contract(reducer):
    """`pmean(sent) == part`, weights, shares and replicas."""
    bound = 2e-2 if reducer is NARROW else 1e-5  # Sums of bfloat16 are rounded to bfloat16.
    testing.check_reducer(reducer, tolerance=bound, downlink_tolerance=bound)


@pytest.mark.core("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_leaves(dtype):
    """Factors are float32; what is returned has the dtype of the leaf."""
    grads = gaussian(4, 48, 64).astype(dtype)
    state = start(PLAIN, grads)
    mean, sent, state = step(PLAIN, grads, state)
    assert (mean.dtype, sent.dtype) == (grads.dtype, grads.dtype)
    assert state.right[0].dtype == jnp.float32
    wide = step(PLAIN, grads.astype(jnp.float32), state=start(PLAIN, grads))[0]
    assert relative(mean[0], wide[0]) < 4e-3
    assert relative(np.asarray(sent, np.float32).mean(0), mean[0]) < 6e-3
    top = jnp.full((4, 48, 64), jnp.finfo(dtype).max) * (dtype == "float16" or 1e-9)
    assert np.isfinite(np.asarray(step(PLAIN, top.astype(dtype), state)[0], np.float32)).all()


@pytest.mark.core("plain")
@pytest.mark.parametrize("reducer", [PLAIN, NARROW, CODED_TURNS], ids=name)
def test_power_iteration_loses_nothing(reducer):
    """Of every worker, what was sent and what is left adds up to its gradients, over the steps."""
    tx = jaxcomp.compressed_mean(reducer, "data", stats=True)
    like = {"w": jnp.zeros((40, 64)), "v": jnp.zeros((3, 3, 8, 40)), "b": jnp.zeros(9)}
    state = replicate(tx.init(like), 3)
    update = jax.jit(jax.vmap(tx.update, axis_name="data"))
    total, arrived = 0.0, 0.0
    for number in range(5):
        grads = {k: gaussian(3, *x.shape, seed=number) for k, x in like.items()}
        mean, state = update(grads, state)
        total = total + np.asarray(grads["w"], np.float64).mean(0)
        arrived = arrived + np.asarray(mean["w"], np.float64)[0]
        for leaf in jax.tree.leaves(mean):
            assert (np.asarray(leaf) == np.asarray(leaf)[:1]).all()
        np.testing.assert_allclose(mean["b"][0], grads["b"].mean(0), rtol=1e-5, atol=1e-6)
    (left,) = (e for e in state.memory.feedback.tree.residual if e.shape[-1] == 40 * 64)
    left = np.asarray(left, np.float64).reshape(3, 40, 64)
    bound = 2e-2 if reducer is NARROW else 1e-5
    np.testing.assert_allclose(arrived + left.mean(0), total, atol=bound)
    assert relative(arrived, total) > 0.1
    assert 0.1 < float(state.stats.relative_error[0]) < 1
    assert int(state.stats.link_bytes[0]) == jaxcomp.wire_bytes(reducer, like, workers=3)
    assert int(state.stats.payload_bytes[0]) == jaxcomp.describe(reducer, like).payload_bytes


@pytest.mark.full
def test_extreme_gradients(mesh):
    """Finite ones of any size give finite means; others are seen by all and enter no memory."""
    tx = jaxcomp.compressed_mean(PLAIN, "data")
    matrix = of_rank(2, 40, 64)
    run = jaxcomp.data_parallel(
        lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s), mesh, "data"
    )
    state = jaxcomp.init_state(tx, matrix, mesh, "data")
    for scale in (1e-30, 1e30, 1.0):
        mean, _ = run(state, replicate(scale * matrix, 8))
        assert relative(mean, scale * matrix) < 1e-5
    mean, _ = run(state, replicate(jnp.zeros_like(matrix), 8))
    assert not np.asarray(mean).any()
    mean, _ = run(state, replicate(jnp.full((40, 64), 1e-40), 8))
    np.testing.assert_allclose(mean, 0, atol=1e-37)
    mean, state = run(state, replicate(matrix, 8))
    for bad in (np.nan, np.inf):
        mean, after = run(state, replicate(matrix, 8).at[3, 7, 11].set(bad))
        assert all(not np.isfinite(np.asarray(s.data)[7, 11]) for s in mean.addressable_shards)
        for got, want in zip(*map(jax.tree.leaves, (after.memory, state.memory)), strict=True):
            np.testing.assert_array_equal(got, want)


LAYERS = {
    f"layer{i:02d}": {
        "kernel": jnp.zeros((64, 128 if i % 2 else 96)),
        "bias": jnp.zeros(128 if i % 2 else 96),
    }
    for i in range(8)
}


def loss(params, batch):
    return sum(jnp.mean((batch @ p["kernel"] + p["bias"]) ** 2) for p in params.values())


@pytest.mark.core("plain-expected0")
@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        (PLAIN, ["all-reduce"] * 2),
        (TURNS, ["all-reduce"]),
        (CODED, ["all-gather", "all-gather", "all-reduce"]),
    ],
    ids=name,
)
def test_the_program_moves_what_is_counted(reducer, expected, mesh):
    """One collective for all left factors, one for all right ones; that of the dense leaves may
    join the first, since none waits for the other."""
    tx = optax.chain(jaxcomp.compressed_mean(reducer, "data"), optax.sgd(0.1))

    def train(params, state, batch):
        grads = jax.grad(loss)(jaxcomp.local(params, "data"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jaxcomp.data_parallel(train, mesh, "data")
    state = jax.eval_shape(lambda: jaxcomp.init_state(tx, LAYERS, mesh, "data"))
    compiled = run.lower(LAYERS, state, jax.ShapeDtypeStruct((16, 64), jnp.float32)).compile()
    found = re.findall(r" (all-gather|all-reduce|all-to-all)(?:-start)?\(", compiled.as_text())
    assert sorted(found) == expected
    moved = jaxcomp.collective_bytes(compiled)
    assert sum(moved.values()) == jaxcomp.wire_bytes(reducer, LAYERS, workers=8)
    table = jaxcomp.describe(reducer, LAYERS, workers=8)
    np.testing.assert_allclose(sum(line.payload_bytes for line in table.lines), table.payload_bytes)
    assert "PowerIteration with Residual, as given" in table.picked


def test_link_bytes():
    like = {"w": jnp.zeros((64, 96)), "b": jnp.zeros(10)}
    dense = 2 * 7 * 40 // 8
    left, right = 4 * 64 * 4, 4 * 96 * 4
    assert jaxcomp.wire_bytes(PLAIN, like, workers=8) == 2 * 7 * (left + right) // 8 + dense
    assert jaxcomp.wire_bytes(NARROW, like, workers=8) == 7 * (left + right) // 8 + dense
    assert jaxcomp.wire_bytes(TURNS, like, workers=8) == 2 * 7 * right // 8 + dense
    for reducer in EVERY:
        assert jaxcomp.wire_bytes(reducer, like, workers=1) == 0
    # One of two leaves begins with its rows, the other with its columns.
    pair = {"tall": jnp.zeros((256, 64)), "taller": jnp.zeros((8, 40, 64))}
    assert jaxcomp.wire_bytes(TURNS, pair, workers=2) == 4 * 4 * (320 + 64)


@pytest.mark.full
def test_stacked_layers_are_matrices_of_their_own():
    layers = jnp.stack([of_rank(2, 40, 64, seed=i) for i in range(3)])
    stacked = jaxcomp.codecs.LowRank(rank=2, stacked_axes=1)
    reducer = jaxcomp.PowerIteration(rank=2, rules=(jaxcomp.Rule("*", stacked, min_ndim=3),))
    grads = replicate(layers, 2)
    mean, _, _ = step(reducer, grads, start(reducer, grads))
    assert relative(mean[0], layers) < 1e-5
    merged = jaxcomp.PowerIteration(rank=2)
    mean, _, _ = step(merged, grads, start(merged, grads))
    assert relative(mean[0], layers) > 0.1


def test_state_is_replicated_and_travels(mesh):
    """Factors are the same on all workers, so checkpoints and other worker counts keep them."""
    tx = jaxcomp.compressed_mean(TURNS, "data")
    params = {"w": jnp.zeros((40, 64))}
    state = jaxcomp.init_state(tx, params, mesh, "data")
    specs = jaxcomp.state_specs(state, "data").memory
    assert set(jax.tree.leaves(specs.reducer, is_leaf=lambda x: isinstance(x, P))) == {P()}
    smaller = jaxcomp.resize_workers(tx, jax.device_get(state), params, 3)
    assert smaller.memory.feedback.tree.residual[0].shape[0] == 3
    np.testing.assert_array_equal(smaller.memory.reducer.right[0], state.memory.reducer.right[0])
    back = serialization.from_bytes(
        jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state)
    )
    for got, want in zip(*map(jax.tree.leaves, (back, state)), strict=True):
        np.testing.assert_array_equal(got, want)
    for reducer in EVERY:
        assert pickle.loads(pickle.dumps(reducer)) == reducer
    assert eval(repr(PLAIN), dict(inspect.getmembers(jaxcomp))) == PLAIN


@pytest.mark.full
def test_training_comes_close_to_dense():
    """A regression on eight simulated workers whose gradients have full rank and noise."""
    weights = gaussian(48, 40, seed=7) / 7
    inputs = gaussian(30, 8, 32, 48, seed=8)
    targets = inputs @ weights + 0.1 * gaussian(30, 8, 32, 40, seed=9)

    def objective(params, batch):
        x, y = batch
        return jnp.mean(jnp.sum((x @ params["w"] + params["b"] - y) ** 2, -1))

    def final(codec):
        tx = optax.chain(jaxcomp.compressed_mean(codec, "data"), optax.sgd(0.02))
        params = {"w": jnp.zeros((48, 40)), "b": jnp.zeros(40)}

        def train(carry, batch):
            grads = jax.grad(objective)(jaxcomp.local(carry[0], "data"), batch)
            updates, state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        def everything(batches):
            (params_, _), _ = jax.lax.scan(train, (params, tx.init(params)), batches)
            return params_

        batches = jax.tree.map(lambda x: jnp.tile(x, (6, 1, 1, 1)), (inputs, targets))
        run = jax.jit(jax.vmap(everything, in_axes=1, axis_name="data"))
        return relative(run(batches)["w"][0], weights)

    dense = final(jaxcomp.Dense())
    assert dense < 0.05
    for reducer in (PLAIN, CODED_TURNS):
        assert final(reducer) < 1.3 * dense


@pytest.mark.wrong_types
def test_wrong_arguments_of_power_iteration_say_so():
    for settings_, message in [
        ({"rank": 0}, "`rank` must be at least 1, got 0"),
        ({"rank": 2.0}, "`rank` must be an integer, got 2.0"),
        ({"min_ratio": -1}, "`min_ratio` must be a number at least 0.0, got -1"),
        ({"alternate": "yes"}, "`alternate` must be True or False, got 'yes'"),
        ({"factors": "int8"}, "`factors` must be one of None, 'bfloat16', got 'int8'"),
        ({"factors": jaxcomp.terngrad(bucket_size=None)}, "`factors` must be a codec with buckets"),
        ({"rules": [jaxcomp.Rule("*", None)]}, "`rules` must be a tuple of jaxcomp.Rule"),
        (
            {"rules": (jaxcomp.Rule("*", jaxcomp.sign()),)},
            "`rules` must give leaves a jaxcomp.codecs.Low",
        ),
        ({"feedback": jaxcomp.sign()}, "`feedback` must be a feedback"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            jaxcomp.PowerIteration(**settings_)
    with pytest.warns(UserWarning, match="is biased, and without feedback"):
        jaxcomp.PowerIteration(feedback=jaxcomp.NoFeedback())


def test_the_warning_on_small_leaves_names_what_compresses_them():
    like = {"w": jnp.zeros((16, 24)), "b": jnp.zeros(5)}
    with pytest.warns(UserWarning, match="below min_size=1024.*min_ratio=1"):
        jaxcomp.compressed_mean(PLAIN, "data").init(like)
    assert "min_size=0" not in PLAIN.facts.for_small_leaves
    remedy = eval(PLAIN.facts.for_small_leaves.split(" compresses")[0])  # As a user would paste it.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxcomp.compressed_mean(remedy, "data").init(like)
    assert (
        jaxcomp.describe(remedy, like).payload_bytes < jaxcomp.describe(PLAIN, like).payload_bytes
    )

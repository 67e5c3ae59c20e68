"""Composition with optax and flax: a combination works, or its error says why not."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx, serialization
from flax.training.train_state import TrainState

import jaxcomp

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": jnp.asarray(RNG.standard_normal((40, 64)) * 0.1, jnp.float32),
    "bias": jnp.zeros(64),
}
BATCH = (
    jnp.asarray(RNG.standard_normal((64, 40)), jnp.float32),
    jnp.asarray(RNG.standard_normal((64, 64)), jnp.float32),
)


def loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)


def make_step(tx):
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(jaxcomp.local(params, "data"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    return step


def train(tx, mesh, steps=6, check_vma=True):
    run = jaxcomp.data_parallel(make_step(tx), mesh, "data", check_vma=check_vma)
    params, state, values = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data"), []
    for _ in range(steps):
        params, state, value = run(params, state, BATCH)
        values.append(float(value))
    return params, state, values


def mean(codec=None, **settings):
    return jaxcomp.compressed_mean(codec or jaxcomp.qsgd_inf(bits=8), "data", **settings)


CHAINS = {
    "chain": lambda: optax.chain(mean(), optax.sgd(0.1)),
    "clip": lambda: optax.chain(mean(), optax.clip_by_global_norm(1.0), optax.sgd(0.5)),
    "lars": lambda: optax.chain(mean(), optax.lars(1.0)),
    "lamb": lambda: optax.chain(mean(), optax.lamb(0.01)),
    "masked": lambda: optax.chain(
        optax.masked(mean(), {"kernel": True, "bias": False}),
        optax.masked(mean(jaxcomp.Dense()), {"kernel": False, "bias": True}),
        optax.sgd(0.1),
    ),
    "partition": lambda: optax.partition(
        {
            "a": optax.chain(mean(), optax.sgd(0.1)),
            "b": optax.chain(mean(jaxcomp.Dense()), optax.sgd(0.2)),
        },
        {"kernel": "a", "bias": "b"},
    ),
    "inject_hyperparams": lambda: optax.chain(
        mean(), optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.05, 10))
    ),
    "multi_steps after": lambda: optax.chain(mean(), optax.MultiSteps(optax.sgd(0.1), 2)),
    "local momentum": lambda: optax.chain(
        jaxcomp.per_worker(optax.trace(0.5)), mean(jaxcomp.sign()), optax.sgd(0.05)
    ),
    "local accumulation": lambda: optax.chain(
        jaxcomp.per_worker(optax.MultiSteps(optax.identity(), 2)), mean(), optax.sgd(0.2)
    ),
    "skip_nonfinite around": lambda: jaxcomp.skip_nonfinite(optax.chain(mean(), optax.sgd(0.1))),
    "skip_nonfinite after": lambda: optax.chain(
        mean(jaxcomp.top_k(fraction=0.1)), jaxcomp.skip_nonfinite(optax.adam(0.01))
    ),
    "stats": lambda: optax.chain(mean(jaxcomp.sign(), stats=True), optax.sgd(0.1)),
}


@pytest.mark.core("chain")
@pytest.mark.parametrize("name", CHAINS)
def test_composes_and_trains(name, mesh):
    _, _, values = train(CHAINS[name](), mesh)
    assert np.isfinite(values).all()
    assert values[-1] < values[0]


def test_compression_follows_the_dense_run(mesh):
    dense = train(optax.chain(mean(jaxcomp.Dense()), optax.sgd(0.1)), mesh)[0]
    close = train(optax.chain(mean(), optax.sgd(0.1)), mesh)[0]
    np.testing.assert_allclose(close["kernel"], dense["kernel"], atol=2e-3)
    np.testing.assert_allclose(close["bias"], dense["bias"], atol=2e-3)


def test_local_accumulation_is_one_large_batch(mesh):
    """Two micro-batches accumulated on each worker give the step of the mean gradient."""
    dense = mean(jaxcomp.Dense())
    tx = optax.chain(
        jaxcomp.per_worker(optax.MultiSteps(optax.identity(), 2)), dense, optax.sgd(0.1)
    )
    two, _, _ = train(tx, mesh, steps=2)
    one, _, _ = train(optax.chain(dense, optax.sgd(0.1)), mesh, steps=1)
    np.testing.assert_allclose(two["kernel"], one["kernel"], atol=1e-6)


def test_state_before_the_mean_without_per_worker_says_so(mesh):
    tx = optax.chain(optax.trace(0.9), mean(), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"differs between the workers.*jaxcomp.per_worker"):
        train(tx, mesh, steps=1)


def test_multi_steps_around_the_mean_says_so(mesh):
    tx = optax.MultiSteps(optax.chain(mean(), optax.sgd(0.1)), 2).gradient_transformation()
    with pytest.raises(ValueError, match=r"MultiSteps.*jaxcomp.accumulate"):
        train(tx, mesh, steps=1)


def test_gradients_that_are_summed_already_say_so(mesh):
    tx = mean()
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")

    def step(params, state, batch):
        return tx.update(jax.grad(loss)(params, batch), state)

    run = jaxcomp.data_parallel(step, mesh, "data")
    said = r"the same on all workers.*JAX has summed it.*jaxcomp.value_and_grad\(loss_fn, 'data'\)"
    with pytest.raises(ValueError, match=said):
        run(PARAMS, state, BATCH)


def test_outside_of_a_mapped_axis_says_so():
    tx = mean()
    with pytest.raises(ValueError, match=r"'data' is not bound here.*data_parallel"):
        tx.update(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="is not bound here"):
        jaxcomp.local(PARAMS, "data")


def test_wrong_arguments_of_a_composition_say_so(mesh):
    with pytest.raises(ValueError, match=r"`codec` must be a codec such as jaxcomp.qsgd_inf"):
        jaxcomp.compressed_mean("qsgd", "data")
    with pytest.raises(ValueError, match="`codec` must be a codec"):
        jaxcomp.Link(jaxcomp.Residual())
    with pytest.raises(ValueError, match="`feedback` must be a feedback"):
        jaxcomp.Link(jaxcomp.sign(), jaxcomp.sign())
    with pytest.raises(ValueError, match=r"`decay` must be a number from 0.0 to 1.0, got 2"):
        jaxcomp.Residual(decay=2)
    with pytest.raises(ValueError, match=r"`rules` must be a tuple of jaxcomp.Rule"):
        jaxcomp.Policy(jaxcomp.sign(), rules=("*",))
    with pytest.raises(
        ValueError,
        match=r"every leaf must have a floating dtype of at least 16 bits, got 'n' of int32",
    ):
        jaxcomp.encode(jaxcomp.sign(), 0, {"n": jnp.arange(3)})
    with pytest.raises(ValueError, match=r"`axis_name` must name axes of the mesh .*'rows'"):
        jaxcomp.data_parallel(lambda x: x, mesh, "rows")
    with pytest.raises(ValueError, match="must be a multiple of the 8 workers, got shape"):
        jaxcomp.data_parallel(lambda x: jax.lax.pmean(x, "data"), mesh, "data")(jnp.ones(5))
    with pytest.warns(UserWarning, match="is biased, and without feedback"):
        jaxcomp.Link(jaxcomp.top_k())
    with pytest.warns(UserWarning, match="compresses no leaf"):
        mean().init({"bias": jnp.zeros(5000)})
    mixed = jaxcomp.Policy(jaxcomp.qsgd_inf(), rules=(jaxcomp.Rule("a", jaxcomp.top_k()),))
    with pytest.raises(ValueError, match="must not mix contractive codecs"):
        mean(mixed)
    with pytest.warns(UserWarning, match="is not known to be contractive: .* grows"):
        jaxcomp.Link(jaxcomp.eden(), jaxcomp.Residual())
    for feedback in (jaxcomp.Residual(), jaxcomp.MomentumCorrection()):
        with pytest.raises(ValueError, match=r"`feedback` must be NoFeedback\(\) or a Shift"):
            jaxcomp.Link(jaxcomp.qsgd(), feedback)
    jaxcomp.Link(jaxcomp.qsgd(bits=8), jaxcomp.Residual())  # ω = 0.2
    jaxcomp.Link(jaxcomp.qsgd(), jaxcomp.Residual(decay=0.5))
    for given in (jaxcomp.Dense, jaxcomp.Gather):
        with pytest.raises(ValueError, match=r"must be an instance, got the class"):
            jaxcomp.compressed_mean(given, "data")
    with pytest.raises(ValueError, match="`feedback` must be a feedback"):
        jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual)
    with pytest.raises(ValueError, match="`axis_name` must be the name of a mapped axis"):
        jaxcomp.compressed_mean(jaxcomp.sign(), ["data"])
    typo = jaxcomp.Policy(jaxcomp.sign(), rules=(jaxcomp.Rule("haed/*", None),))
    with pytest.warns(UserWarning, match=r"no leaf is decided by the policy's rules \('haed"):
        jaxcomp.init_state(mean(typo), PARAMS, mesh, "data")
    assert "rule 'haed/*' decides no leaf" in str(jaxcomp.describe(typo, PARAMS))
    payload = jaxcomp.encode(jaxcomp.sign(), 0, PARAMS)
    with pytest.raises(ValueError, match="`payload` must be what `encode` returned"):
        jaxcomp.decode(jaxcomp.Policy(jaxcomp.sign()), 0, payload, PARAMS)


def test_memory_of_many_workers_in_one_worker_says_so(mesh):
    tx = mean(jaxcomp.sign())
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    body = jax.shard_map(
        lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P(),
        check_vma=False,
    )
    grads = jax.tree.map(lambda p: jnp.stack([p] * 8), PARAMS)
    with pytest.raises(ValueError, match=r"must hold one worker's memory.*state_specs"):
        jax.jit(body)(state, grads)


@pytest.mark.full
def test_flax_linen_train_state(mesh):
    model = nn.Dense(64)
    params = model.init(jax.random.key(0), BATCH[0])["params"]
    tx = optax.chain(mean(jaxcomp.sign()), optax.adam(1e-2))
    tx = jaxcomp.on_mesh(tx, mesh, "data")
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, batch):
        def objective(params):
            return jnp.mean((state.apply_fn({"params": params}, batch[0]) - batch[1]) ** 2)

        value, grads = jax.value_and_grad(objective)(jaxcomp.local(state.params, "data"))
        return state.apply_gradients(grads=grads), jax.lax.pmean(value, "data")

    run = jaxcomp.data_parallel(step, mesh, "data")
    values = []
    for _ in range(5):
        state, value = run(state, BATCH)
        values.append(float(value))
    assert values[-1] < values[0]


def test_flax_nnx_optimizer(mesh):
    """`nnx.split` turns `PerWorker` into a mapping; its memory stays split over the workers."""
    model = nnx.Linear(40, 64, rngs=nnx.Rngs(0))
    tx = optax.chain(mean(jaxcomp.sign()), optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"number of workers.*jaxcomp\.on_mesh\(tx, mesh"):
        nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer = nnx.Optimizer(model, jaxcomp.on_mesh(tx, mesh, "data"), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        split_graph, params = nnx.split(model, nnx.Param)

        def objective(params):
            return jnp.mean((nnx.merge(split_graph, params)(batch[0]) - batch[1]) ** 2)

        value, grads = jax.value_and_grad(objective)(jaxcomp.local(params, "data"))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), jax.lax.pmean(value, "data")

    run = jaxcomp.data_parallel(step, mesh, "data")
    placed = run(jaxcomp.place(state, mesh, "data"), BATCH)
    jax.tree.map(np.testing.assert_array_equal, run(state, BATCH), placed)
    four = jax.make_mesh((4,), ("data",))
    other = nnx.Optimizer(model, jaxcomp.on_mesh(tx, four, "data"), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"memory of the mesh's 8 workers, got that of 4"):
        run(nnx.state((model, other)), BATCH)
    values = []
    for _ in range(5):
        state, value = run(state, BATCH)
        values.append(float(value))
    assert values[-1] < values[0]
    residuals = [x for x in jax.tree.leaves(state) if x.ndim == 4 and x.shape[0] == 8]
    residuals += [x for x in jax.tree.leaves(state) if x.ndim == 3 and x.shape[0] == 8]
    assert residuals
    assert all(not (np.asarray(x[0]) == np.asarray(x[1])).all() for x in residuals)


def test_flax_checkpoints_hold_the_state(mesh):
    tx = mean(jaxcomp.sign())
    state = jaxcomp.init_state(tx, PARAMS, mesh, "data")
    data = serialization.to_bytes(state)
    back = serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), data)
    assert isinstance(back.memory.feedback, jaxcomp.PerWorker)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_state_survives_pickle_and_tree_tools(mesh):
    tx = optax.chain(mean(jaxcomp.sign()), optax.adam(1e-2))
    state = jax.device_get(jaxcomp.init_state(tx, PARAMS, mesh, "data"))
    for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert jax.tree.structure(again) == jax.tree.structure(state)
    assert optax.tree.get(state, "mu")["bias"].shape == (64,)
    assert pickle.loads(pickle.dumps(jaxcomp.terngrad())) == jaxcomp.terngrad()


def test_a_step_compiles_once_and_donates(mesh):
    traces = []
    tx = optax.chain(mean(jaxcomp.sign(), stats=True), optax.adam(1e-2))
    inner = make_step(tx)

    def step(*args):
        traces.append(0)
        return inner(*args)

    run = jaxcomp.data_parallel(step, mesh, "data", donate_argnums=(0, 1))
    for _ in range(2):  # A second state of the same transformation: nothing is shared.
        params = jax.tree.map(jnp.copy, PARAMS)
        state = jaxcomp.init_state(tx, params, mesh, "data")
        for _ in range(3):
            params, state, value = run(params, state, jax.device_get(BATCH))
    assert len(traces) == 1
    assert np.isfinite(float(value))


@pytest.mark.full
def test_resumed_run_equals_the_unbroken_one(mesh, tmp_path):
    """State round-trips through orbax, sharded, and the run goes on bit for bit."""
    tx = optax.chain(mean(jaxcomp.top_k(fraction=0.05), stats=True), optax.adam(1e-2))
    run = jaxcomp.data_parallel(make_step(tx), mesh, "data")
    params, state = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, "data")
    for _ in range(3):
        params, state, _ = run(params, state, BATCH)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step3", {"params": params, "state": state})
        saver.wait_until_finished()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            {"params": params, "state": state},
        )
        loaded = saver.restore(tmp_path / "step3", shapes)
    assert isinstance(loaded["state"][0].memory.feedback, jaxcomp.PerWorker)
    resumed, again = loaded["params"], loaded["state"]
    for _ in range(3):
        params, state, _ = run(params, state, BATCH)
        resumed, again, _ = run(resumed, again, BATCH)
    for got, want in zip(
        jax.tree.leaves((resumed, again)), jax.tree.leaves((params, state)), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_resize_keeps_the_mean_residual(mesh):
    tx = optax.chain(mean(jaxcomp.sign()), optax.adam(1e-2))
    params, state, _ = train(tx, mesh, steps=3)
    smaller = jaxcomp.resize_workers(tx, state, params, 4)
    before, after = (s[0].memory.feedback.tree.residual[0] for s in (state, smaller))
    assert before.shape[0] == 8
    assert after.shape[0] == 4
    np.testing.assert_allclose(np.mean(after, 0), np.mean(before, 0), rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(smaller[1][0].mu["kernel"], state[1][0].mu["kernel"])
    grid = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jaxcomp.data_parallel(make_step(tx), grid, "data")
    host = jax.device_get((params, smaller))
    _, _, value = run(*host, BATCH)
    assert np.isfinite(float(value))
    with pytest.raises(ValueError, match="`workers` must be a positive integer, got 0"):
        jaxcomp.resize_workers(tx, state, params, 0)
    with pytest.raises(ValueError, match="`state` must be a state of `tx`"):
        jaxcomp.resize_workers(optax.adam(1.0), state, params, 4)
    other = {"kernel": jnp.ones((80, 64)), "bias": params["bias"]}
    with pytest.raises(ValueError, match="`state` must be a state of `tx` for these `params`"):
        jaxcomp.resize_workers(tx, state, other, 4)


def test_stats_tell_what_the_step_cost_and_lost(mesh):
    tx = optax.chain(mean(jaxcomp.sign(), stats=True), optax.sgd(0.1))
    _, state, _ = train(tx, mesh, steps=3)
    stats = state[0].stats
    assert 0.2 < float(stats.relative_error) < 0.6
    assert 0.2 < float(stats.residual_ratio) < 3
    reducer = jaxcomp.choose_reducer(jaxcomp.sign(), PARAMS, workers=8)
    assert int(stats.link_bytes) == jaxcomp.wire_bytes(reducer, PARAMS, workers=8)
    assert int(stats.payload_bytes) == jaxcomp.describe(jaxcomp.sign(), PARAMS).payload_bytes


def test_keys_of_any_kind_and_their_steps(mesh):
    """The seed decides the noise, the step moves it on, and typed keys are taken at the edge."""
    grads = jax.tree.map(lambda p: jnp.broadcast_to(p + 1.0, (8, *p.shape)), PARAMS)

    def run(key):
        tx = mean(jaxcomp.qsgd_inf(bits=2), key=key)
        step = jaxcomp.data_parallel(
            lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s), mesh, "data"
        )
        first, state = step(jaxcomp.init_state(tx, PARAMS, mesh, "data"), grads)
        second, _ = step(state, grads)
        return np.asarray(first["kernel"]), np.asarray(second["kernel"])

    a, b = run(3)
    c, _ = run(jnp.array([0, 3], jnp.uint32))
    d, _ = run(jax.random.key(9))
    np.testing.assert_array_equal(a, c)
    assert not np.array_equal(a, b)
    assert not np.array_equal(a, d)

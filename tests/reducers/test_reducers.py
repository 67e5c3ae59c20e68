"""Properties of every reducer: the declared bytes, and equal replicas."""

import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import sharding
from helpers.suite import few_or_all

import jaxcomp
from jaxcomp import testing
from jaxcomp.mesh import per_worker
from jaxcomp.reducers import choose

LIKE = {"w": jnp.zeros((48, 130)), "v": jnp.zeros((40, 50)), "b": jnp.zeros(7)}
QSGD, COARSE, SIGN = jaxcomp.qsgd_inf(bits=4), jaxcomp.qsgd_inf(bits=3), jaxcomp.sign()
EF21 = jaxcomp.Link(SIGN, jaxcomp.Shift())
RESIDUAL = jaxcomp.Link(SIGN, jaxcomp.Residual())

ONE_AXIS = {
    "dense": jaxcomp.Dense(),
    "gather": jaxcomp.Gather(QSGD),
    "two_shot": jaxcomp.TwoShot(RESIDUAL, RESIDUAL),
    "two_shot_ef21": jaxcomp.TwoShot(EF21, EF21),
    "chosen": jaxcomp.Link(QSGD),
    "vote": jaxcomp.Vote(),
    "psum": jaxcomp.Psum(jaxcomp.random_k(fraction=0.1)),
    "power": jaxcomp.PowerIteration(rank=2),
    "robust": jaxcomp.Robust(QSGD, jaxcomp.aggregates.CoordinateMedian()),
}
HIERARCHIES = {
    "gather": jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.Gather(RESIDUAL)),
    "two_shot": jaxcomp.Hierarchical(jaxcomp.Dense(), jaxcomp.TwoShot(RESIDUAL, RESIDUAL)),
    "bfloat16": jaxcomp.Hierarchical(jaxcomp.Dense("bfloat16"), jaxcomp.TwoShot(QSGD, QSGD)),
}


def grid(*sizes):
    names = ("slow", "fast")[: len(sizes)] if len(sizes) > 1 else ("data",)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, names), names if len(names) > 1 else names[0]


def compiled(reducer, *sizes):
    mesh, axis = grid(*sizes)
    tx = jaxcomp.compressed_mean(reducer, axis)

    def update(grads, state):
        return tx.update(jaxcomp.local(grads, axis), state)

    run = jaxcomp.data_parallel(update, mesh, axis, batch_argnums=())
    state = jax.eval_shape(lambda: jaxcomp.init_state(tx, LIKE, mesh, axis))
    # What machine code comes of it does not matter to what it sends.
    return run.lower(LIKE, state).compile({"xla_backend_optimization_level": 0})


SENDERS = [name for name in ONE_AXIS if name != "two_shot_ef21"]


@pytest.mark.core("dense-3")
@pytest.mark.parametrize(
    ("name", "workers"),
    few_or_all(
        [*itertools.product(SENDERS, (3, 8)), ("gather", 1), ("two_shot", 1)],
        itertools.product(SENDERS, (1, 2, 3, 4, 8)),
    ),
)
def test_a_device_sends_what_wire_bytes_says(name, workers):
    """Three divides nothing; one sends nothing."""
    moved = sum(jaxcomp.collective_bytes(compiled(ONE_AXIS[name], workers)).values())
    said = jaxcomp.wire_bytes(ONE_AXIS[name], LIKE, workers=workers)
    assert abs(moved - said) <= 1  # XLA may join all-reduces, whose bytes a third rounds up.
    assert (moved == 0) == (workers == 1)


@pytest.mark.core("gather-sizes0")
@pytest.mark.parametrize(
    ("name", "sizes"),
    few_or_all(
        [*((name, (2, 4)) for name in HIERARCHIES), ("two_shot", (3, 2)), ("gather", (1, 1))],
        itertools.product(HIERARCHIES, ((1, 1), (2, 4), (3, 2))),
    ),
)
def test_a_hierarchy_sends_what_wire_bytes_says(name, sizes):
    reducer = HIERARCHIES[name]
    moved = sum(jaxcomp.collective_bytes(compiled(reducer, *sizes)).values())
    assert abs(moved - jaxcomp.wire_bytes(reducer, LIKE, workers=sizes)) <= 1


def test_a_hierarchy_sends_a_share_over_the_slow_links():
    reducer = HIERARCHIES["two_shot"]
    table = jaxcomp.describe(reducer, LIKE, workers=(2, 4))
    assert table.link_bytes == jaxcomp.wire_bytes(reducer, LIKE, workers=(2, 4))
    program = compiled(reducer, 2, 4).as_text()
    slow = re.findall(r".* = .*u32.* (?:all-to-all|all-gather)\(.*", program)
    assert len(slow) == 2
    for line in slow:
        assert sharding.groups_of(line) == [[0, 4], [1, 5], [2, 6], [3, 7]], line
    with pytest.raises(ValueError, match="must be a tuple that ends with"):
        jaxcomp.wire_bytes(reducer, LIKE, workers=8)
    tx = jaxcomp.compressed_mean(reducer, "data")
    with pytest.raises(ValueError, match="at least two axes"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.zeros((2, 4, 300)))
    for wrong in (jaxcomp.Dense(), reducer, 3, jaxcomp.Gather):
        with pytest.raises(ValueError, match="`outer` must be"):
            jaxcomp.Hierarchical(jaxcomp.Dense(), wrong)
    with pytest.raises(ValueError, match="`inner` must be"):
        jaxcomp.Hierarchical(jaxcomp.Gather(QSGD), jaxcomp.Gather(QSGD))


@pytest.mark.full
@pytest.mark.parametrize("name", few_or_all(["gather", "two_shot"], HIERARCHIES))
def test_hierarchies_obey_the_law(name):
    reducer = HIERARCHIES[name]
    loose = {"gather": 1e-5, "two_shot": 3.0, "bfloat16": 1.0}[name]
    testing.check_reducer(reducer, workers=(3, 2), downlink_tolerance=loose)


@pytest.mark.full
def test_statistics_and_workers_over_two_axes():
    """A reducer for one axis takes a tuple of them as one; a hierarchy measures its shares."""
    mesh, axis = grid(2, 3)
    grads = {n: jax.random.normal(jax.random.key(1), (6, *x.shape)) for n, x in LIKE.items()}
    for reducer, workers in ((ONE_AXIS["two_shot"], 6), (HIERARCHIES["two_shot"], (2, 3))):
        tx = jaxcomp.compressed_mean(reducer, axis, stats=True)

        def update(state, grads, tx=tx):
            return tx.update(jax.tree.map(lambda g: g[0], grads), state)

        state = jaxcomp.init_state(tx, LIKE, mesh, axis)
        mean, state = jaxcomp.data_parallel(update, mesh, axis)(state, grads)
        assert mean["w"].shape == LIKE["w"].shape
        assert int(state.stats.link_bytes) == jaxcomp.wire_bytes(reducer, LIKE, workers=workers)
        assert 0.3 < float(state.stats.relative_error) < 0.45
        assert 0.5 < float(state.stats.residual_ratio) < 0.7


@pytest.mark.core("psum")
@pytest.mark.parametrize("name", [*ONE_AXIS, "phases", "hierarchy"])
def test_replicas_stay_alike_for_a_thousand_steps(name):
    """Parameters and everything that is not a worker's own, bit for bit, on eight devices."""
    later = {
        "phases": jaxcomp.ReducerSchedule(
            ((0, jaxcomp.Gather(QSGD)), (500, jaxcomp.Gather(COARSE)))
        ),
        "hierarchy": HIERARCHIES["two_shot"],
    }
    reducer = ONE_AXIS.get(name) or later[name]
    mesh, axis = grid(2, 4) if name == "hierarchy" else grid(8)
    tx = optax.chain(jaxcomp.compressed_mean(reducer, axis), optax.adam(1e-2))
    params = {"w": jnp.ones((16, 130)) * 0.1, "b": jnp.zeros(130)}

    def loss(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - 0.3) ** 2)

    def run(params, state, x):
        def step(carry, t):
            params, state = carry
            grads = jax.grad(loss)(jaxcomp.local(params, axis), x * jnp.cos(t * 0.01))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss(params, x)

        times = jaxcomp.local(jnp.arange(1000.0), axis)
        (params, state), losses = jax.lax.scan(step, (params, state), times)
        kept = jax.tree.leaves((params, per_worker.replicated_part(state)))
        apart = [jnp.any(jax.lax.pmax(y, axis) != jax.lax.pmin(y, axis)) for y in kept]
        return params, jnp.stack(apart), jax.lax.pmean(losses[-1], axis)

    # Without types, nothing but the arithmetic keeps the replicas together.
    train = jaxcomp.data_parallel(run, mesh, axis, check_vma=False)
    state = jaxcomp.init_state(tx, params, mesh, axis)
    x = jax.random.normal(jax.random.key(0), (64, 16))
    _, apart, after = train(params, state, x)
    assert not np.asarray(apart).any()
    assert float(after) < float(loss(params, x))


def test_the_default_is_what_moves_fewest_bytes():
    like = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}

    def picked(codec, workers):
        return jaxcomp.describe(codec, like, workers=workers).picked.split()[1]

    assert [picked(QSGD, n) for n in (1, 2, 3, 64)] == ["Gather", "Gather", "TwoShot", "TwoShot"]
    assert [picked(jaxcomp.random_k(fraction=0.01), n) for n in (2, 3)] == ["Gather", "Psum"]
    assert picked(jaxcomp.top_k(), 64) == "Gather"  # Takes the leaf whole.
    assert picked(EF21, 2) == "TwoShot"
    table = jaxcomp.describe(QSGD, like, workers=8)
    ratio = dict(table.offers)["Gather"] / dict(table.offers)["TwoShot"]
    assert 3.95 < ratio <= 4
    assert f"TwoShot {dict(table.offers)['TwoShot']:,}" in str(table)
    named = jaxcomp.describe(jaxcomp.Gather(QSGD), like, workers=8)
    assert "as given" in named.picked
    assert named.link_bytes == dict(named.offers)["Gather"]
    assert named.offers == table.offers
    mixed = jaxcomp.Policy(jaxcomp.terngrad(), rules=(jaxcomp.Rule("*", SIGN, min_size=9),))
    with pytest.warns(UserWarning, match="not known to be contractive"):
        link = jaxcomp.Link(mixed, jaxcomp.Residual())
    assert [type(r).__name__ for r in choose.candidates(link)] == ["Gather"]


@pytest.mark.full
def test_a_gather_that_sends_more_than_dense_says_so():
    tx = jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.4), "workers")
    grads = jnp.ones((40, 128, 256))
    with pytest.warns(UserWarning, match="more than a dense all-reduce"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="workers")(grads)


@pytest.mark.core("psum")
@pytest.mark.parametrize("name", ["gather", "two_shot", "psum"])
def test_who_takes_no_part_has_no_say_in_shared_scales(name):
    """Neither a NaN nor a huge gradient of an absent worker changes the mean of the others."""
    codec = jaxcomp.terngrad(clip=None, shared=True, bucket_size=64)
    reducer = {
        "gather": jaxcomp.Gather(codec),
        "two_shot": jaxcomp.TwoShot(codec),
        "psum": jaxcomp.Psum(codec),
    }[name]
    tx = jaxcomp.compressed_mean(reducer, "workers", gate=jaxcomp.gates.SampledWorkers(2))
    grads = jax.random.normal(jax.random.key(0), (4, 32, 64))
    state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)
    step = jax.jit(lambda g: jax.vmap(tx.update, axis_name="workers")(g, state)[0])
    plain = step(grads)
    absent = [i for i in range(4) if np.array_equal(step(grads.at[i].set(1e6)), plain)]
    assert len(absent) == 2
    for worker in absent:
        np.testing.assert_array_equal(step(grads.at[worker].set(np.nan)), plain)


@pytest.mark.core("0")
@pytest.mark.parametrize("tree", [{"b": jnp.zeros(10)}, {"e": jnp.zeros((0, 5))}, {}], ids=len)
def test_a_tree_without_a_compressed_leaf_goes_through_every_reducer(tree):
    for name, reducer in ONE_AXIS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            tx = jaxcomp.compressed_mean(reducer, "workers")
            grads = jax.tree.map(lambda x: jnp.ones((3, *x.shape)), tree)
            mean, _ = jax.vmap(
                lambda g, tx=tx: tx.update(g, tx.init(tree)), axis_name="workers", axis_size=3
            )(grads)
        for leaf in jax.tree.leaves(mean):
            np.testing.assert_allclose(leaf, 1, err_msg=name, rtol=1e-6)


def test_workers_of_several_axes_count_together_for_flat_reducers():
    for reducer in (ONE_AXIS["gather"], ONE_AXIS["chosen"], ONE_AXIS["psum"]):
        said = jaxcomp.wire_bytes(reducer, LIKE, workers=(2, 4))
        assert said == jaxcomp.wire_bytes(reducer, LIKE, workers=8)
        assert jaxcomp.describe(reducer, LIKE, workers=(2, 4)).link_bytes == said


@pytest.mark.full
def test_a_downlinks_memory_outlives_fewer_workers():
    """From four workers to two, which gather: what was unsent is sent by the uplinks."""
    tx = jaxcomp.compressed_mean(jaxcomp.sign(), "workers")
    params = {"w": jnp.zeros((64, 64))}
    update = jax.jit(jax.vmap(tx.update, axis_name="workers"))

    def steps(state, workers, number):
        for t in range(number):
            key = jax.random.key(t)
            grads = {"w": jax.random.normal(key, (workers, 64, 64))}
            mean, state = update(grads, state)
        return mean, state

    def outside(path, x):
        return x[:, 0] if per_worker.marked(path) else x[0]

    def inside(path, x):
        return x[:, None] if per_worker.marked(path) else jnp.stack([x] * 2)

    grads = {"w": jnp.zeros((4, 64, 64))}
    state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)
    _, state = steps(state, 4, 3)
    many = jax.tree_util.tree_map_with_path(outside, state)
    fewer = jaxcomp.resize_workers(tx, many, params, 2)
    up, down = (s.tree.residual[0] for s in (many.memory.feedback, many.memory.reducer[1].memory))
    assert float(jnp.abs(down).max()) > 0
    np.testing.assert_allclose(
        fewer.memory.feedback.tree.residual[0][1], up.mean(0) + down.reshape(up[0].shape), atol=1e-6
    )
    _, after = steps(jax.tree_util.tree_map_with_path(inside, fewer), 2, 1)
    assert not jax.tree.leaves(after.memory.reducer)
    # Moved by hand, it would be lost: refused.
    kept = jax.tree.map(lambda x: x[:2] if x.shape[:1] == (4,) else x, many)
    with pytest.raises(ValueError, match=r"not be there.*jaxcomp\.resize_workers"):
        steps(jax.tree_util.tree_map_with_path(inside, kept), 2, 1)

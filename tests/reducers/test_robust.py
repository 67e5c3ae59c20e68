"""A gather whose messages are combined by an aggregate: what reaches the parameters."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxcomp
from jaxcomp import aggregates, testing
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise
from jaxcomp.wire import buffer

WORKERS = 5
LIKE = {"w": jnp.zeros((40, 64)), "b": jnp.zeros(7)}
QSGD = jaxcomp.qsgd_inf(bits=4)
RESIDUAL = jaxcomp.Link(jaxcomp.top_k(fraction=0.1), jaxcomp.Residual())
RNG = np.random.default_rng(0)
MEDIAN, MEAN = aggregates.CoordinateMedian(), aggregates.Mean()
NORM = 3.0
RULES = {
    "mean": MEAN,
    "clipped": aggregates.ClippedMean(NORM),
    "median": MEDIAN,
    "trimmed": aggregates.TrimmedMean(0.25),
    "credible": aggregates.Credible(rule="hard"),
}
ROBUST = {name: jaxcomp.Robust(QSGD, rule) for name, rule in RULES.items()}


def gradients(steps=2, workers=WORKERS):
    return jax.tree.map(
        lambda x: RNG.standard_normal((workers, steps, *x.shape)).astype(np.float32), LIKE
    )


GRADS = gradients()


@functools.cache
def runner(reducer, **settings):
    tx = jaxcomp.compressed_mean(reducer, "data", key=3, **settings)

    def steps(grads):
        def step(state, grad):
            mean, state = tx.update(grad, state)
            return state, mean

        state, means = jax.lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], grads)), grads)
        return means, state

    return jax.jit(jax.vmap(steps, axis_name="data"))


def run(reducer, grads, **settings):
    """The means of all steps, and the last state, with a leading axis of workers."""
    return runner(reducer, **settings)(grads)


def spoilt(worker, value, grads=GRADS, leaf="b"):
    """One element of a leaf, in the first step."""
    changed = grads[leaf].copy()
    changed.reshape(*changed.shape[:2], -1)[worker, 0, 3] = value
    return {**grads, leaf: changed}


def residual_of(state):
    """The residuals of all workers for the compressed leaf."""
    (found,) = [x for x in state.memory.feedback.tree.residual if x.size == WORKERS * 40 * 64]
    return np.asarray(found).reshape(WORKERS, -1)


def assert_equal(got, want):
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.core("mean")
@pytest.mark.parametrize("name", ["mean", "residual", "gated"])
def test_the_mean_has_the_bits_of_a_gather(name):
    """With a residual and under a gate too; small leaves are gathered uncompressed."""
    link = RESIDUAL if name == "residual" else QSGD
    gate = {"gate": jaxcomp.gates.Bernoulli(0.5)} if name == "gated" else {}
    got, state = run(jaxcomp.Robust(link, MEAN), GRADS, **gate)
    want, other = run(jaxcomp.Gather(link), GRADS, **gate)
    assert_equal(got, want)
    if name == "residual":
        assert_equal(residual_of(state), residual_of(other))


@pytest.mark.full
def test_the_mean_passes_the_contract_of_reducers():
    testing.check_reducer(ROBUST["mean"], weighted=False)


@pytest.mark.core("median")
@pytest.mark.parametrize("name", [name for name in ROBUST if name != "mean"])
def test_other_rules_break_the_law_and_nothing_else(name):
    """Replicas are equal, one worker sends nothing, and weights of zero have no influence."""
    with pytest.raises(AssertionError, match=r"breaks the law pmean\(sent\) == part"):
        testing.check_reducer(ROBUST[name], weighted=False)
    assert jaxcomp.wire_bytes(ROBUST[name], LIKE, workers=1) == 0
    means, _ = run(ROBUST[name], GRADS)
    for leaf in jax.tree.leaves(means):
        assert (np.asarray(leaf) == np.asarray(leaf[:1])).all()


@pytest.mark.core("trimmed")
@pytest.mark.parametrize("name", [name for name in ROBUST if name != "mean"])
def test_the_result_is_the_rule_on_the_decoded_messages(name):
    """Also with a share of the workers, by which it is multiplied as a mean is."""
    rule, reducer = RULES[name], ROBUST[name]
    for gate in (None, jaxcomp.gates.SampledWorkers(3)):
        tx = jaxcomp.compressed_mean(reducer, "data", key=3, gate=gate)

        def step(grad, tx=tx, gate=gate):
            state = tx.init(grad)
            mean, _ = tx.update(grad, state)
            key, worker = noise.fold(state.key, state.step), jax.lax.axis_index("data")
            policy = reducer.uplink.policy
            sent = jaxcomp.roundtrip(policy, key, grad, worker=worker.astype(jnp.uint32))
            weight = jnp.ones(())
            if gate is not None:
                gate_key = noise.fold(state.gate.gate_key, state.step)
                weight = gate.open(gate_key, grad, (), "data").weight
            return mean, sent, weight

        first = jax.tree.map(lambda g: jnp.asarray(g[:, 0]), GRADS)
        mean, sent, weights = jax.jit(jax.vmap(step, axis_name="data"))(first)
        assert int(weights.sum()) == (WORKERS if gate is None else 3)
        want = aggregates.combine(rule, sent, weights, rule.init(LIKE, WORKERS)).value
        for got, wanted in zip(*map(jax.tree.leaves, (mean, want)), strict=True):
            np.testing.assert_allclose(got[0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.core("w-median")
@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("leaf", ["b", "w"])
def test_a_hostile_worker(name, leaf):
    """In a small leaf and in a compressed one; means follow a finite message anywhere.

    In the compressed leaf, all other elements of the bucket become zero: they agree with nobody.
    """
    plain, _ = run(ROBUST[name], GRADS, stats=True)
    for value in (np.nan, np.inf, 1e30):
        means, state = run(ROBUST[name], spoilt(1, value, leaf=leaf), stats=True)
        moved = max(np.abs(np.asarray(x)).max() for x in jax.tree.leaves(means))
        followed = value == 1e30 and (name, leaf) in [
            ("mean", "w"),
            ("mean", "b"),
            ("credible", "b"),
        ]
        assert (moved > 1e20) == followed, (value, moved)
        if value != 1e30:
            assert np.isfinite(moved)
        # The second step of a rule without memory is as if nothing had happened.
        if name != "credible":
            last, want = (jax.tree.map(lambda x: x[:, 1], tree) for tree in (means, plain))
            assert_equal(last, want)
        assert int(state.memory.reducer[0].held.excluded[0]) == int(state.stats.excluded[0]) == 0


def test_excluded_messages_are_counted():
    grads = spoilt(3, np.inf, spoilt(1, np.nan))
    means, state = run(ROBUST["median"], jax.tree.map(lambda g: g[:, :1], grads), stats=True)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(means))
    np.testing.assert_array_equal(state.memory.reducer[0].held.excluded, 2)
    np.testing.assert_array_equal(state.stats.excluded, 2)


@pytest.mark.full
def test_a_worker_that_is_excluded_keeps_its_residual():
    """The others go on, so the step counts; its own gradient of that step is lost."""
    reducer = jaxcomp.Robust(RESIDUAL, MEAN)
    for value in (np.nan, np.inf):
        grads = jax.tree.map(lambda g: g[:, ::-1], spoilt(1, value, leaf="w"))
        means, state = run(reducer, grads)
        _, before = run(reducer, jax.tree.map(lambda g: g[:, :1], grads))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves((means, state.memory.feedback)))
        own, was = residual_of(state), residual_of(before)
        np.testing.assert_array_equal(own[1], was[1])
        assert (own[0] != was[0]).any()
    gated, after = run(reducer, grads, gate=jaxcomp.gates.Always())
    assert_equal(gated, means)
    assert_equal(after.memory.feedback, state.memory.feedback)


@pytest.mark.full
@pytest.mark.parametrize("name", ["residual", "credible"])
def test_a_step_without_a_majority_of_finite_messages_is_undone(name):
    reducer = jaxcomp.Robust(RESIDUAL, MEAN) if name == "residual" else ROBUST["credible"]
    grads = jax.tree.map(lambda g: g[:, ::-1], GRADS)
    for worker in (0, 2, 4):
        grads = jax.tree.map(np.copy, grads)
        grads["b"][worker, 1, 0] = np.nan
    means, state = run(reducer, grads)
    _, before = run(reducer, jax.tree.map(lambda g: g[:, :1], grads))
    assert np.isnan(np.asarray(means["w"])[:, 1]).all()
    assert_equal(state.memory, before.memory)


@pytest.mark.full
def test_votes_are_medians_of_signs():
    """Of an odd number of workers: `Vote` without ties, and `Credible` with its weights."""
    ballot = jaxcomp.Policy(jaxcomp.codecs.Ballot(), min_size=0, min_ndim=0)
    votes, _ = run(jaxcomp.Vote(ballot), GRADS)
    medians, _ = run(jaxcomp.Robust(ballot, MEDIAN), GRADS)
    assert_equal(medians, votes)
    grads = {name: g.copy() for name, g in gradients(1, 9).items()}
    common = {name: RNG.standard_normal(x.shape) for name, x in LIKE.items()}
    grads = {name: g + 3 * common[name].astype(np.float32) for name, g in grads.items()}
    honest, _ = run(jaxcomp.Vote(ballot), {name: g[2:] for name, g in grads.items()})
    for name, g in grads.items():
        g[:2] = -np.asarray(honest[name])[0]
    found, state = run(jaxcomp.Robust(ballot, aggregates.Credible(rule="hard")), grads)
    credibility = np.asarray(state.memory.reducer[0].held.everyones.credibility)[0]
    assert credibility[:2].max() < 0.65 < 0.8 < credibility[2:].min()
    wrong = np.concatenate(
        [
            (np.sign(np.asarray(found[name])[0]) != np.asarray(honest[name])[0]).reshape(-1)
            for name in LIKE
        ]
    )
    assert wrong.mean() < 0.01


def test_every_leaf_is_gathered():
    """No leaf goes through an all-reduce, whatever the policy leaves dense."""
    policy = jaxcomp.Policy(QSGD, rules=(jaxcomp.Rule("w", None),))
    reducer = jaxcomp.Robust(policy, MEDIAN)
    table = jaxcomp.describe(reducer, LIKE, workers=8)
    assert table.payload_bytes == 4 * (40 * 64 + 7)
    assert table.link_bytes == 7 * table.payload_bytes
    assert "Robust" in table.picked
    assert jaxcomp.wire_bytes(ROBUST["median"], LIKE, workers=8) == 7 * sum(
        buffer.fused_bytes(jax.eval_shape(lambda x, c=codec: jaxcomp.encode(c, 0, x), x))
        for codec, x in ((QSGD, LIKE["w"]), (jaxcomp.codecs.Identity(), LIKE["b"]))
    )
    widths = run(reducer, {**GRADS, "e": np.zeros((WORKERS, 2, 0, 3), np.float32)})[0]
    assert widths["e"].shape == (WORKERS, 2, 0, 3)


def test_memories_that_need_a_mean_are_refused():
    for feedback in (jaxcomp.Residual(), jaxcomp.MomentumCorrection()):
        link = jaxcomp.Link(jaxcomp.top_k(fraction=0.1), feedback)
        jaxcomp.Robust(link, MEAN)
        for rule in (MEDIAN, aggregates.ClippedMean(1.0), aggregates.Credible()):
            with pytest.raises(ValueError, match="a residual assumes that the steps add up"):
                jaxcomp.Robust(link, rule)
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
    for rule in RULES.values():
        with pytest.raises(ValueError, match="must have no feedback with a mirror"):
            jaxcomp.Robust(link, rule)


def test_what_one_worker_could_set_for_all_is_refused():
    for codec in (jaxcomp.terngrad(shared=True), jaxcomp.alq(bits=3), jaxcomp.thc()):
        with pytest.raises(ValueError, match="a hostile one would set them for all"):
            jaxcomp.Robust(codec, MEDIAN)
    with pytest.raises(ValueError, match="`aggregate` must be an instance of a aggregate"):
        jaxcomp.Robust(QSGD, aggregates.CoordinateMedian)
    with pytest.raises(ValueError, match="`outer` must be a reducer of payloads"):
        jaxcomp.Hierarchical(jaxcomp.Dense(), ROBUST["median"])
    with pytest.raises(ValueError, match="`collectives` must be at least 1"):
        jaxcomp.Robust(QSGD, MEDIAN, collectives=0)


def test_a_biased_codec_warns_without_a_residual_as_advice():
    with pytest.warns(UserWarning, match="a residual cannot send it later"):
        jaxcomp.Robust(jaxcomp.sign(), MEDIAN)
    with pytest.warns(UserWarning, match=r"use Link\(codec, Residual\(\)\)"):
        jaxcomp.Robust(jaxcomp.sign(), MEAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxcomp.Robust(RESIDUAL, MEAN).uplink  # noqa: B018


@pytest.mark.full
def test_credibility_moves_to_another_number_of_workers():
    """All workers know that of each, so that `tx.init` must know their number."""
    tx = jaxcomp.compressed_mean(ROBUST["credible"], "data")
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), LIKE)
    with pytest.raises(ValueError, match=r"`tx\.init` must know the number of workers"):
        tx.init(params)
    rows = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params)
    inside = jax.jit(jax.vmap(tx.init, axis_name="data"))(rows)
    first = jax.tree.map(lambda g: jnp.asarray(g[:, 0]), GRADS)
    _, state = jax.jit(jax.vmap(tx.update, axis_name="data"))(first, inside)
    outside = jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, 0] if per_worker.marked(path) else x[0], state
    )
    held = outside.memory.reducer[0].held.everyones.credibility
    assert held.shape == (WORKERS,)
    moved = jaxcomp.resize_workers(tx, outside, params, 3)
    np.testing.assert_array_equal(
        moved.memory.reducer[0].held.everyones.credibility, held[np.array([0, 1, 3])]
    )
    three = jax.tree.map(lambda x: x[:3], (first, state))
    with pytest.raises(ValueError, match="`state` must be one for these gradients and 3 workers"):
        jax.eval_shape(jax.vmap(tx.update, axis_name="data"), *three)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    made = jaxcomp.init_state(tx, params, mesh, "data")
    assert made.memory.reducer[0].held.everyones.credibility.shape == (8,)


@pytest.mark.full
def test_shards_combine_their_own():
    """In a sharded model, a shard that is not finite is excluded, and the others are not."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=kinds)
    params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
    specs = {"w": PartitionSpec(None, "fsdp"), "b": PartitionSpec("fsdp")}
    grads = {k: RNG.standard_normal((4, *x.shape)).astype(np.float32) for k, x in params.items()}
    grads["b"][2, 3] = np.nan
    for name in ("credible", "clipped"):
        tx = jaxcomp.compressed_mean(ROBUST[name], "data", param_specs=specs, stats=True)

        def step(state, grads, tx=tx):
            return tx.update(jax.tree.map(lambda g: g[0], grads), state)

        state = jaxcomp.init_state(tx, params, mesh, "data")
        means, after = jaxcomp.data_parallel(step, mesh, "data")(state, grads)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(means))
        assert int(after.stats.excluded) == 1
        held = after.memory.tree.reducer[0].held
        np.testing.assert_array_equal(held.excluded, [1, 0])
        if name == "credible":
            kept = np.asarray(held.everyones.credibility) == 1
            np.testing.assert_array_equal(np.argwhere(kept), [[0, 2]])


@pytest.mark.full
def test_local_updates_of_hostile_workers():
    """What workers exchange after a round passes through the reducer too."""
    rounds = jaxcomp.local_updates(
        optax.sgd(0.1), None, "data", every=2, reducer=ROBUST["median"], key=3
    )
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), LIKE)

    def steps(grads):
        def step(carry, grad):
            updates, state = rounds.update(grad, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        (found, _), _ = jax.lax.scan(step, (params, rounds.init(params)), grads)
        return found

    for value in (1e20, np.nan):
        found = jax.jit(jax.vmap(steps, axis_name="data"))(spoilt(1, value))
        for x in jax.tree.leaves(found):
            assert 0.01 < np.abs(np.asarray(x)).max() < 1
            assert (np.asarray(x) == np.asarray(x[:1])).all()

"""Reducers that change over time: one program, and each step uses the phase's reducer."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import testing
from jaxcomp.exchange import legs, reduce as reduce_, state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.numerics import noise
from jaxcomp.planning.columns import short
from jaxcomp.transforms import stats

WORKERS, STEPS = 8, 6
RNG = np.random.default_rng(0)
LIKE = {"kernel": jnp.zeros((32, 40)), "bias": jnp.zeros(40)}
GRADS = [
    jax.tree.map(lambda p: jnp.asarray(RNG.standard_normal((WORKERS, *p.shape)), jnp.float32), LIKE)
    for _ in range(STEPS)
]
FEEDBACK = jaxcomp.MomentumCorrection(momentum=0.9)
FRACTIONS, STARTS = (0.25, 0.1, 0.02), (0, 2, 4)


def link(fraction, feedback=FEEDBACK, **settings):
    """A sparsifier that compiles in a fifth of the time of the largest elements."""
    codec = jaxcomp.random_k(fraction=fraction, unbiased=False, **settings)
    return jaxcomp.Link(codec, feedback)


PHASES = jaxcomp.ReducerSchedule(
    tuple((start, link(fraction)) for start, fraction in zip(STARTS, FRACTIONS, strict=True))
)


def own(tree):
    return jax.tree.map(lambda x: x[0], tree)


@pytest.fixture(scope="module")
def alone():
    """Means, feedback and what was sent of each step, by the reducer of its phase on its own."""

    def step(number, key, grads, memory):
        reducer = jaxcomp.Gather(link(FRACTIONS[number]))
        plan = Plan.of(reducer, LIKE, "data")
        state = state_.init(plan)
        memory = jaxcomp.PerWorker.wrap(memory, "link", "data")
        result = reduce_.reduce(plan, key, grads, state._replace(feedback=memory))
        return result.mean, result.state.feedback.own()

    steps = [
        jax.jit(jax.vmap(functools.partial(step, number), in_axes=(None, 0, 0), axis_name="data"))
        for number in range(3)
    ]
    like = trees.layout(jaxcomp.Policy(jaxcomp.sign(bucket_size=None)), LIKE).batches[0].like
    memory = FEEDBACK.init((like,), ())
    memory = jax.tree.map(lambda x: jnp.stack([x] * WORKERS), memory)
    results = []
    for number, grads in enumerate(GRADS):
        key = noise.fold(noise.raw(3), number)
        mean, memory = steps[number // 2](key, grads, memory)
        results.append(jax.tree.map(np.asarray, (own(mean), memory)))
    return results


TX = jaxcomp.compressed_mean(PHASES, "data", key=3, stats=True)


@pytest.fixture(scope="module")
def typed(mesh):
    """The step, compiled once, and the means and the states before and after each step."""
    step = jaxcomp.data_parallel(lambda s, g: TX.update(own(g), s), mesh, "data")
    states, results = [jaxcomp.init_state(TX, LIKE, mesh, "data")], []
    split = jax.device_put(GRADS, jax.NamedSharding(mesh, jax.P("data")))
    compiled = step.lower(states[0], split[0]).compile()
    for grads in split:
        mean, state = compiled(states[-1], grads)
        results.append(jax.tree.map(np.asarray, mean))
        states.append(state)
    return compiled, split, states, results


def check(results, memories, alone):
    for (mean, memory), (want, wanted) in zip(
        zip(results, memories, strict=True), alone, strict=True
    ):
        np.testing.assert_array_equal(mean["kernel"], want["kernel"])
        np.testing.assert_allclose(mean["bias"], want["bias"], atol=1e-6)
        for got, right in zip(jax.tree.leaves(memory), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(got).reshape(right.shape), right)


def test_each_step_is_that_of_its_phase(typed, alone):
    _, _, states, results = typed
    check(results, [state.memory.feedback.tree for state in states[1:]], alone)
    sent = [np.count_nonzero(mean["kernel"]) for mean in results]
    assert sent[:4] == [320, 320, 128, 128]
    assert max(sent[4:]) <= 26


def test_what_a_step_costs_is_what_its_phase_costs(typed):
    _, _, states, _ = typed
    gathers = [jaxcomp.Gather(link(fraction)) for fraction in FRACTIONS]
    wanted = [jaxcomp.describe(gather, LIKE, workers=8) for gather in gathers]
    for number, state in enumerate(states[1:]):
        assert int(state.stats.payload_bytes) == wanted[number // 2].payload_bytes
        assert int(state.stats.link_bytes) == wanted[number // 2].link_bytes
    assert jaxcomp.wire_bytes(PHASES, LIKE, workers=8) == wanted[-1].link_bytes
    assert wanted[0].payload_bytes > 2 * wanted[1].payload_bytes > 4 * wanted[2].payload_bytes
    described = jaxcomp.describe(PHASES, LIKE, workers=8)
    assert described.payload_bytes == wanted[-1].payload_bytes
    assert described.link_bytes == wanted[-1].link_bytes
    said = str(described)
    assert "reducer ReducerSchedule with MomentumCorrection, as given" in said
    codec = short(link(0.1).codec)
    assert f"from step 2: {codec}, payload {wanted[1].payload_bytes:,} bytes" in said


def test_one_program_holds_a_branch_for_each_phase(typed):
    text = typed[0].as_text()
    assert text.count(" conditional(") == 1
    sizes = [jaxcomp.wire_bytes(link(f).codec, LIKE["kernel"]) for f in FRACTIONS]
    assert text.count(" all-gather(") == len(set(sizes)) == 3
    assert jaxcomp.collective_bytes(text)["all-gather"] == 7 * max(sizes)


def test_a_step_that_is_not_finite_leaves_memory_and_time(typed):
    step, split, states, _ = typed
    before, grads = states[2], split[2]  # At the start of the second phase.
    bad = {**grads, "kernel": grads["kernel"].at[5, 1, 2].set(np.nan)}
    mean, after = step(before, jax.device_put(bad, grads["kernel"].sharding))
    assert np.isnan(np.asarray(mean["kernel"])[1, 2])
    assert int(after.step) == 3
    for got, want in zip(
        jax.tree.leaves(after.memory), jax.tree.leaves(before.memory), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    _, later = step(after, grads)
    assert int(later.memory.reducer.phase_step) == 3


def test_time_moves_with_the_state(typed):
    """To another number of workers, and never beyond the last step there is."""
    _, _, states, _ = typed
    resized = jaxcomp.resize_workers(TX, states[3], LIKE, 4)
    assert int(resized.memory.reducer.phase_step) == 3
    end = states[3].memory.reducer._replace(phase_step=jnp.int32(2**31 - 1))
    nothing = Plan.of(PHASES, {}, sizes=(8,))
    _, after = legs.spread(nothing, noise.raw(0), (), end)
    assert int(after.phase_step) == 2**31 - 1
    assert int(stats._phases(nothing, {}, after)[1]) == 2


@pytest.mark.full
def test_state_is_handed_from_phase_to_phase(mesh):
    """Adaptive levels go on adapting, by agreement within a branch; rules keep codecs apart."""

    def phase(every, bits):
        rule = jaxcomp.Rule("bias", jaxcomp.qsgd_inf(bits=bits))
        adaptive = dataclasses.replace(jaxcomp.alq(bits=3), every=every)
        return jaxcomp.Link(jaxcomp.Policy(adaptive, rules=(rule,)))

    reducer = jaxcomp.ReducerSchedule(((0, phase(1, 8)), (3, phase(100, 4))))
    tx = jaxcomp.compressed_mean(reducer, "data")
    step = jaxcomp.data_parallel(lambda s, g: tx.update(own(g), s), mesh, "data")
    state, levels, errors = jaxcomp.init_state(tx, LIKE, mesh, "data"), [], []
    for grads in GRADS[:5]:
        mean, state = step(state, grads)
        (adapted,) = [memory for memory in state.memory.reducer.current[0].codec.tree if memory]
        levels.append(np.asarray(adapted.levels[0]))
        errors.append(np.abs(mean["bias"] - grads["bias"].mean(0)).max())
    assert (np.asarray(adapted.step) == 5).all()
    assert not np.array_equal(levels[1], levels[2])
    np.testing.assert_array_equal(levels[3], levels[4])
    assert max(errors[:3]) < 0.01 < 0.03 < min(errors[3:])


@pytest.mark.full
def test_schedules_of_reducers_meet_the_contract():
    testing.check_reducer(PHASES)


def test_equal_phases_are_equal_settings():
    again = jaxcomp.ReducerSchedule(PHASES.phases)
    assert again == PHASES
    assert hash(again) == hash(PHASES)
    assert repr(again) == repr(PHASES)


def test_wrong_phases_say_so():
    good = link(0.1)
    for given in ((), [(0, good)], (good,), ((0, good, 1),)):
        with pytest.raises(ValueError, match="`phases` must be a tuple of pairs"):
            jaxcomp.ReducerSchedule(given)
    for starts in ((1, 2), (0, 0), (0, 5, 3)):
        with pytest.raises(ValueError, match=r"starts that increase from 0, as in \(0, 500\), got"):
            jaxcomp.ReducerSchedule(tuple((start, good) for start in starts))
    with pytest.raises(ValueError, match=r"`start` must be an integer, got 0.5"):
        jaxcomp.ReducerSchedule(((0.5, good),))
    for given in (jaxcomp.Dense(), jaxcomp.top_k(), jaxcomp.Gather, 3):
        with pytest.raises(ValueError, match="`phases` must hold links"):
            jaxcomp.ReducerSchedule(((0, given),))
    with pytest.raises(ValueError, match="must have equal feedbacks"):
        jaxcomp.ReducerSchedule(((0, link(0.1, jaxcomp.Residual())), (9, good)))
    with pytest.raises(ValueError, match="codecs of equal bucket_size"):
        jaxcomp.ReducerSchedule(((0, link(0.1, bucket_size=64)), (9, good)))
    dense_bias = jaxcomp.Policy(jaxcomp.top_k(fraction=0.1), min_ndim=1)
    with pytest.raises(ValueError, match="policies with the same rules"):
        jaxcomp.ReducerSchedule(((0, good), (9, jaxcomp.Link(dense_bias, FEEDBACK))))

    def two(first, second):
        rule = jaxcomp.Rule("bias", jaxcomp.top_k(fraction=first))
        return jaxcomp.Link(jaxcomp.Policy(jaxcomp.top_k(fraction=second), (rule,)), FEEDBACK)

    jaxcomp.ReducerSchedule(((0, two(0.1, 0.1)), (9, two(0.1, 0.2))))
    with pytest.raises(ValueError, match="leaves that share a codec in the last phase"):
        jaxcomp.ReducerSchedule(((0, two(0.1, 0.2)), (9, two(0.1, 0.1))))
    other = jaxcomp.ReducerSchedule(
        ((0, jaxcomp.Link(jaxcomp.alq(bits=3))), (9, jaxcomp.Link(jaxcomp.alq(bits=4))))
    )
    with pytest.raises(ValueError, match="`phases` must have reducers with states of equal"):
        jaxcomp.compressed_mean(other, "data").init(LIKE)


def test_the_published_schedules():
    paper = jaxcomp.dgc_warmup(0.001, 10, schedule="quarters")
    assert paper == ((0, 0.25), (10, 0.0625), (20, 0.015625), (30, 0.004), (40, 0.001))
    code = jaxcomp.dgc_warmup(0.001, steps_per_epoch=10)
    assert [start for start, _ in code] == [0, 10, 20, 30, 40, 50]
    np.testing.assert_allclose(
        [fraction for _, fraction in code], [0.316, 0.1, 0.0316, 0.01, 0.00316, 0.001], rtol=2e-3
    )
    assert jaxcomp.dgc_warmup(0.01, 7, epochs=1) == ((0, 0.1), (7, 0.01))
    assert jaxcomp.dgc_warmup(0.01, 7, epochs=0) == ((0, 0.01),)
    assert jaxcomp.dgc_warmup(0.5, 7, schedule="quarters") == ((0, 0.5),)
    for arguments, said in (
        ((0.0, 1), r"`fraction` must be a number in \(0, 1\], got 0.0"),
        ((0.1, 0), "`steps_per_epoch` must be at least 1, got 0"),
        ((0.1, 2.5), "`steps_per_epoch` must be an integer, got 2.5"),
    ):
        with pytest.raises(ValueError, match=said):
            jaxcomp.dgc_warmup(*arguments)
    with pytest.raises(ValueError, match="`epochs` must be from 0 to 5, got 6"):
        jaxcomp.dgc_warmup(0.1, 1, epochs=6, schedule="quarters")
    with pytest.raises(ValueError, match="`schedule` must be one of 'exponential', 'quarters'"):
        jaxcomp.dgc_warmup(0.1, 1, schedule="linear")


@pytest.mark.full
def test_the_whole_recipe_trains(mesh):
    """Clipping, warm-up, momentum correction and momentum for the dense leaf, step by step."""
    reducer = jaxcomp.ReducerSchedule(
        tuple(
            (start, jaxcomp.Link(jaxcomp.top_k(fraction=fraction), FEEDBACK))
            for start, fraction in jaxcomp.dgc_warmup(0.05, 3, epochs=1)
        )
    )
    tx = optax.chain(
        jaxcomp.clip_local(1.0, axis_name="data"),
        jaxcomp.compressed_mean(reducer, axis_name="data"),
        optax.masked(optax.trace(0.9), jaxcomp.dense_leaves(reducer)),
        optax.sgd(0.5),
    )
    inputs = jnp.asarray(RNG.standard_normal((64, 32)), jnp.float32)
    target = inputs @ jnp.asarray(RNG.standard_normal((32, 40)) * 0.1, jnp.float32) + 0.5

    def loss(params, batch):
        return jnp.mean((batch[0] @ params["kernel"] + params["bias"] - batch[1]) ** 2)

    @chex.assert_max_traces(1)
    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(jaxcomp.local(params, "data"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(value, "data")

    run = jaxcomp.data_parallel(step, mesh, "data")
    params, state, values = LIKE, jaxcomp.init_state(tx, LIKE, mesh, "data"), []
    for _ in range(60):
        params, state, value = run(params, state, (inputs, target))
        values.append(float(value))
    assert values[-1] < 0.1 * values[0]

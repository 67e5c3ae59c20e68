"""Workers that train alone for a round: DiLoCo's golden run, exchanges and periods."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.rounds import (
    AXIS,
    CURVATURES,
    EVERYTHING,
    FOUR,
    PARAMS,
    TARGETS,
    WORKERS,
    local_step,
    quadratic,
    trained,
)

import jaxcomp
from jaxcomp.mesh import per_worker


def test_the_golden_run_of_diloco():
    """Least squares on two replicas; the numbers are those of MaxText's integration test."""
    x = jnp.asarray([[[0.0, 1], [1, 0]], [[1, 0], [0, 1]]])
    y = jnp.asarray([[[1.0], [2]], [[2], [3]]])

    def loss_of(params, x, y):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    outer = optax.sgd(1.0, momentum=0.9, nesterov=True)
    tx = jaxcomp.local_updates(optax.sgd(0.1), outer, AXIS, every=3)
    start = {"w": jnp.asarray([[2.0], [1.0]]), "b": jnp.ones(1)}
    params, _, losses, _ = trained(tx, 4, start, loss_of, (x, y))
    np.testing.assert_allclose(losses[:, 0], [1.0, 0.49, 0.2401, 0.2075], atol=1e-4)
    np.testing.assert_allclose(losses.mean(1), [1.0, 0.65, 0.4481, 0.574244], rtol=1e-5)
    np.testing.assert_array_equal(params["w"][1, 0], start["w"])
    for step in (2, 3):
        np.testing.assert_allclose(params["w"][step, 0, :, 0], [1.5345, 1.0494], atol=1e-5)
        np.testing.assert_allclose(params["b"][step, 0], [0.5839], atol=1e-5)


def test_rounds_of_one_step_are_synchronous_training():
    """Up to rounding: the mean of products is not the product of the mean."""
    tx = jaxcomp.local_updates(optax.sgd(0.3), None, AXIS, every=1)
    parent = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS), optax.sgd(0.3))
    got, want = (trained(each, 20)[0]["w"] for each in (tx, parent))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_a_constant_pseudo_gradient_moves_the_centre_by_the_rate_over_one_minus_the_momentum():
    def constant(params, slope, _):
        return jnp.sum(params["w"] * slope)

    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = jaxcomp.local_updates(optax.sgd(0.5), outer, AXIS, every=2)
    slopes = jnp.broadcast_to(TARGETS[:1], TARGETS.shape)
    params = trained(tx, 400, None, constant, (slopes, slopes))[0]["w"][:, 0]
    np.testing.assert_allclose(params[-3] - params[-1], 7.0 * slopes[0], rtol=1e-3, atol=1e-4)


@pytest.mark.core("True")
@pytest.mark.parametrize("keep", [True, False])
def test_inner_state_is_kept_or_begins_anew(keep):
    """With momentum, the first step of a round is longer if momentum is kept."""
    tx = jaxcomp.local_updates(optax.sgd(0.1, 0.9), None, AXIS, every=3, keep_inner=keep)
    params, own, _, _ = trained(tx, 4)
    gradient = CURVATURES * (params["w"][2] - TARGETS)
    moved = params["w"][2] - own["w"][3]
    same = np.allclose(moved, 0.1 * gradient, rtol=1e-3, atol=1e-5)
    assert same != keep


@pytest.mark.full
def test_the_centre_rests_between_exchanges_and_workers_meet_there():
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=4, reducer=EVERYTHING)
    params, own, _, states = trained(tx, 8)
    params, own = params["w"], own["w"]
    for first in (0, 4):
        before = PARAMS["w"] if first == 0 else params[first - 1, 0]
        np.testing.assert_array_equal(params[first : first + 3], np.stack([[before] * 8] * 3))
    assert np.ptp(own[2], axis=0).max() > 0.1
    for last in (3, 7):
        np.testing.assert_array_equal(own[last], params[last])
        np.testing.assert_array_equal(params[last], params[last][:1].repeat(WORKERS, 0))
    assert states.waited[:, 0].tolist() == [1, 2, 3, 0] * 2
    assert states.taken[-1, 0] == 8


def test_each_worker_takes_its_own_number_of_steps():
    numbers = [1, 2, 3, 4, 4, 3, 2, 1]
    tx = jaxcomp.local_updates(optax.sgd(0.1, 0.9), None, AXIS, every=4, local_steps=numbers)
    _, own, _, states = trained(tx, 3)
    moves = [np.any(np.asarray(own["w"][s + 1] != own["w"][s]), (1, 2)) for s in range(2)]
    assert moves[0].tolist() == [n > 1 for n in numbers]
    assert moves[1].tolist() == [n > 2 for n in numbers]
    assert not states.skipped.tree[-1].any()


@pytest.mark.full
def test_a_step_that_is_not_finite_is_left_out_on_its_worker_alone():
    calls = jnp.zeros((WORKERS, 8, 64)).at[3, 0, 0].set(jnp.nan)
    tx = jaxcomp.local_updates(optax.adam(0.1), None, AXIS, every=3)
    params, own, _, states = trained(tx, 3, None, quadratic, (TARGETS + calls, CURVATURES))
    assert np.isfinite(params["w"]).all()
    assert np.isfinite(own["w"]).all()
    assert states.skipped.tree[-1, :, 0].tolist() == [0, 0, 0, 3, 0, 0, 0, 0]
    loose = jaxcomp.local_updates(optax.adam(0.1), None, AXIS, every=3, guard=False)
    params = trained(loose, 3, None, quadratic, (TARGETS + calls, CURVATURES))[0]
    assert not np.isfinite(params["w"][-1]).all()


@pytest.mark.full
def test_workers_that_are_not_drawn_keep_their_message_for_a_later_round():
    """The residual of those who do not take part is all that they have moved."""
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(), min_size=0), jaxcomp.Residual())
    gate = jaxcomp.gates.SampledWorkers(3)
    tx = jaxcomp.local_updates(
        optax.sgd(0.1), None, AXIS, every=2, reducer=jaxcomp.Gather(link), gate=gate
    )
    _, own, _, states = trained(tx, 4)
    mean = states.fragments[0].mean
    assert mean.gate.rounds[:, 0].tolist() == [0, 1, 1, 2]
    assert mean.gate.messages[-1, 0] == 6
    held = mean.memory.feedback.tree.residual[0][1, :, 0].reshape(WORKERS, -1)
    # The first round by hand: two steps from the start.
    moved = PARAMS["w"] - own["w"][0]
    moved = moved + 0.1 * CURVATURES * (own["w"][0] - TARGETS)
    kept = [np.allclose(a, b.reshape(-1), atol=1e-5) for a, b in zip(held, moved, strict=True)]
    assert sum(kept) == WORKERS - 3


@pytest.mark.full
def test_post_local_sgd_begins_as_synchronous_training():
    """Up to rounding; then each worker goes on from the shared velocity."""
    for make in (optax.sgd(0.13, 0.9), optax.adam(0.05)):
        tx = jaxcomp.local_updates(make, None, AXIS, every=4, synchronous=5)
        parent = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS), make)
        found = [trained(each, 13) for each in (tx, parent)]
        (params, own, _, states), (want, *_) = found
        np.testing.assert_allclose(params["w"][:5], want["w"][:5], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(own["w"][:5], params["w"][:5])
        moved = [s for s in range(1, 13) if np.any(params["w"][s] != params["w"][s - 1])]
        assert moved == [1, 2, 3, 4, 8, 12]
        assert states.taken[-1, 0] == 13


def test_a_schedule_of_the_steps_decides_how_long_a_round_is():
    period = optax.piecewise_constant_schedule(1, {3: 4})
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=period)
    params = trained(tx, 12)[0]["w"]
    assert [s for s in range(1, 12) if np.any(params[s] != params[s - 1])] == [1, 2, 6, 10]


@pytest.mark.full
def test_a_period_adapts_to_the_variance():
    """Lower rates leave less variance, so rounds grow; the thresholds are those of the paper."""
    rate = optax.piecewise_constant_schedule(0.2, {60: 0.1})
    period = jaxcomp.gates.AdaptivePeriod(learning_rate=rate, warmup=4, start=2, longest=6)
    tx = jaxcomp.local_updates(optax.sgd(rate), None, AXIS, every=period)
    params, own, _, states = trained(tx, 140)
    steps = states.period.steps[:, 0]
    assert (steps[:8] == 2).all()
    assert steps[59] < steps[-1] <= 6
    level = states.period.level[10, 0]
    before, after = own["w"][0], params["w"][1, 0]
    # The first round by hand: two steps from the same start.
    moved = before - 0.2 * CURVATURES * (before - TARGETS)
    variance = np.mean(np.sum(np.square(moved - moved.mean(0)), (1, 2)))
    np.testing.assert_allclose(after, moved.mean(0), atol=1e-5)
    np.testing.assert_allclose(states.period.level[1, 0], variance / 0.2, rtol=1e-4)
    assert level > 0


@pytest.mark.full
def test_a_round_as_one_program_has_the_same_bits(mesh):
    """With momentum, codes and a residual; and as many losses as steps."""
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(), min_size=0, min_ndim=0), jaxcomp.Residual())
    streamed = {"every": 4, "fragments": 2, "delay": 1, "mix": 0.5}
    cases: list[Any] = [{"every": 3}, streamed]
    for settings in cases:
        every = settings["every"]
        tx = jaxcomp.local_updates(
            optax.adam(0.05), optax.sgd(0.7, 0.9), AXIS, reducer=jaxcomp.Gather(link), **settings
        )
        params = FOUR
        data = jnp.asarray(
            np.random.default_rng(1).standard_normal((2, every, WORKERS, 4, 64)), jnp.float32
        )

        def loss_of(params, target):
            return sum(jnp.mean((x - target) ** 2) for x in params.values())

        def step(params, state, target, tx=tx, loss_of=loss_of):
            params, state, loss = local_step(tx, loss_of)(params, state, target[0])
            return params, state, jax.lax.pmean(loss, AXIS)

        def grad_of(params, target, loss_of=loss_of):
            return jax.value_and_grad(loss_of)(params, target)

        one = jaxcomp.data_parallel(step, mesh, AXIS)
        whole = jaxcomp.data_parallel(jaxcomp.local_round(tx, grad_of, AXIS), mesh, AXIS)
        state = jaxcomp.init_state(tx, params, mesh, AXIS)
        a = b = (params, state)
        for batches in data:
            losses = []
            for batch in batches:
                *a, loss = one(*a, batch)
                losses.append(loss)
            *b, found = whole(*b, jnp.swapaxes(batches, 0, 1).reshape(-1, 4, 64))
            np.testing.assert_allclose(found, losses, rtol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, a, b)


def collectives(tx, mesh, exchange, params=FOUR):
    step = local_step(tx, quadratic, exchange=exchange)

    def own(params, state, target, curvature):
        return step(params, state, target[0], curvature[0])[:2]

    state = jaxcomp.init_state(tx, params, mesh, AXIS)
    run = jaxcomp.data_parallel(own, mesh, AXIS, batch_argnums=(2, 3))
    return jaxcomp.collective_bytes(run.lower(params, state, TARGETS, CURVATURES).compile())


@pytest.mark.full
def test_a_step_without_exchange_has_no_collective_and_a_round_sends_wire_bytes(mesh):
    codec = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=4, bucket_size=64), min_size=0, min_ndim=0)
    make = functools.partial(
        jaxcomp.local_updates, optax.adam(0.1), None, AXIS, reducer=jaxcomp.Gather(codec)
    )
    tx = make(every=3)
    assert collectives(tx, mesh, False) == {}
    sent = collectives(tx, mesh, True)
    assert sum(sent.values()) == (WORKERS - 1) * jaxcomp.wire_bytes(codec, FOUR)
    assert collectives(tx, mesh, None) == sent
    counted = jaxcomp.describe(jaxcomp.Gather(codec), FOUR, workers=WORKERS).link_bytes
    assert sum(sent.values()) == counted
    bare = jaxcomp.local_updates(optax.adam(0.1), None, AXIS, every=3, reducer=codec)
    counted = jaxcomp.describe(codec, FOUR, workers=WORKERS).link_bytes
    assert sum(collectives(bare, mesh, True).values()) == counted
    assert counted != jaxcomp.wire_bytes(codec, FOUR)  # Payload bytes.
    streamed = collectives(make(every=4, fragments=4), mesh, None)
    assert sum(streamed.values()) == sum(sent.values())


@pytest.mark.full
def test_no_collective_runs_in_a_step_without_exchange(mesh, tmp_path):
    """Of a program with a conditional, as a profile of each step of a round sees it."""
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=3)
    step = local_step(tx, quadratic)

    def own(params, state, target, curvature):
        return step(params, state, target[0], curvature[0])[:2]

    run = jaxcomp.data_parallel(own, mesh, AXIS, batch_argnums=(2, 3))
    carry = PARAMS, jaxcomp.init_state(tx, PARAMS, mesh, AXIS)
    for _ in range(3):
        carry = run(*carry, TARGETS, CURVATURES)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    met = []
    for number in range(3):
        folder = tmp_path / str(number)
        jax.block_until_ready(carry)
        with jax.profiler.trace(str(folder), profiler_options=options):
            carry = run(*carry, TARGETS, CURVATURES)
            jax.block_until_ready(carry)
        (path,) = folder.rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        names = [event.name for plane in planes for line in plane.lines for event in line.events]
        assert any("dot" in name or "fusion" in name for name in names)
        met.append(names.count("Rendezvous"))
    assert met == [0, 0, WORKERS]


@pytest.mark.full
def test_the_state_moves_to_other_workers_with_its_mean():
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(), min_size=0), jaxcomp.Residual())
    tx = jaxcomp.local_updates(optax.adam(0.05), optax.sgd(0.7), AXIS, every=4, reducer=link)
    state = jax.tree.map(lambda x: x[-1], trained(tx, 6)[3])
    state = jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, 0] if per_worker.marked(path) else x[0], state
    )
    for workers in (2, 16):
        moved = jaxcomp.resize_workers(tx, state, PARAMS, workers)
        for old, new in (
            (state.fragments[0].offset.tree, moved.fragments[0].offset.tree),
            (
                state.fragments[0].mean.memory.feedback.tree,
                moved.fragments[0].mean.memory.feedback.tree,
            ),
        ):
            for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
                assert len(b) == workers
                np.testing.assert_allclose(a.mean(0), b.mean(0), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "`every` must be from 1 to 2147483647, got 0"),
        ({"every": "4"}, "`every` must be a positive integer, a schedule"),
        ({"every": 6, "fragments": 4}, "multiple of the 4 fragments, got 6; use 4 or 8"),
        ({"every": 6, "delay": 6}, "`delay` must be below 6"),
        ({"every": 6, "fragments": 3, "delay": 2}, "`delay` must be below 2"),
        ({"every": lambda taken: 4, "fragments": 2}, "must be a number for fragments=2"),
        ({"every": 4, "mix": 1.5}, "`mix` must be a number from 0"),
        ({"every": 4, "local_steps": [5] * 8}, "`local_steps` must be from 0 to 4, got 5"),
        ({"every": 4, "local_steps": [0] * 8}, "`local_steps` must have a positive number"),
        ({"every": 4, "synchronous": -1}, "`synchronous` must be at least 0"),
        ({"every": 4, "reducer": "sign"}, "`codec` must be a codec"),
    ],
)
def test_wrong_settings_say_what_would_do(settings, said):
    with pytest.raises(ValueError, match=said):
        jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, **settings)


def test_wrong_use_of_local_updates_says_what_would_do():
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=2, local_steps=[1, 2])
    with pytest.raises(ValueError, match="`inner` must be an optax transformation"):
        jaxcomp.local_updates("sgd", None, AXIS, every=2)  # pyright: ignore
    with pytest.raises(ValueError, match="for each of the 8 workers of 'data', got 2"):
        trained(tx, 1)
    with pytest.raises(ValueError, match="each fragment a leaf"):
        trained(jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=4, fragments=2), 1)
    plain = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=2)

    def without_params(grads):
        return plain.update(grads, plain.init(PARAMS))

    with pytest.raises(ValueError, match="`params` must be given"):
        jax.vmap(without_params, axis_name=AXIS)({"w": TARGETS})
    run = jaxcomp.local_round(optax.sgd(0.1), jax.value_and_grad(quadratic), AXIS)
    with pytest.raises(ValueError, match="`state` must hold the state of"):
        jax.vmap(lambda x: run(PARAMS, (), x[None]), axis_name=AXIS)(TARGETS)

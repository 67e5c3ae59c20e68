"""When local training exchanges, with which weights, and in which precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.rounds import (
    AXIS,
    CURVATURES,
    FOUR,
    PARAMS,
    TARGETS,
    WORKERS,
    local_step,
    quadratic,
    trained,
)
from jax import lax

import jaxcomp
from jaxcomp.transforms import remainder


def everyone(tx, params=PARAMS):
    state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(TARGETS)
    return jax.tree.map(lambda x: jnp.stack([x] * WORKERS), params), state


def program(tx, **settings):
    step = jax.vmap(local_step(tx, quadratic, **settings), axis_name=AXIS)
    return jax.jit(lambda params, state: step(params, state, TARGETS, CURVATURES)[:2])


def test_steps_without_an_exchange_are_known_beforehand():
    """With fragments and a delay, behind other transformations, and if the caller is wrong."""
    tx = optax.chain(
        optax.identity(),
        jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=8, fragments=1, delay=2),
    )
    alone, last, either = (program(tx, exchange=say) for say in (False, True, None))
    want = got = everyone(tx)
    where = []
    for number in range(16):
        want = either(*want)
        left = jaxcomp.steps_alone(got[1])
        where += [number] if left == 0 else []
        got = (alone if left else last)(*got)
    assert where == [5, 7, 13, 15]
    jax.tree.map(np.testing.assert_array_equal, want, got)
    # The last step of a round is not enough with a delay: the others wait for it, and count it.
    wrong = everyone(tx)
    for number in range(1, 17):
        wrong = (last if number % 8 == 0 else alone)(*wrong)
    np.testing.assert_array_equal(wrong[0]["w"], want_after_a_round(either, tx))
    skipped = wrong[1][1].skipped.tree
    assert np.asarray(skipped)[:, 0].tolist() == [8] * WORKERS


def want_after_a_round(either, tx):
    carry = everyone(tx)
    for _ in range(8):
        carry = either(*carry)
    return carry[0]["w"]


def test_an_exchange_that_is_known_to_be_due_is_not_ruled_out():
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=1)
    with pytest.raises(ValueError, match="`exchange` must not be False in a step"):
        jax.eval_shape(program(tx, exchange=False), *everyone(tx))
    with pytest.raises(ValueError, match="`state` must be that of a step that has ended"):
        jax.jit(jaxcomp.steps_alone)(everyone(tx)[1])
    with pytest.raises(ValueError, match="`state` must hold the state of"):
        jaxcomp.steps_alone(optax.sgd(0.1).init(PARAMS))


@pytest.mark.full
def test_a_centre_in_sixteen_bits_moves_as_one_in_thirty_two():
    """Steps that its dtype cannot hold add up: for plain averages, momentum, and in part."""
    makes = (
        functools.partial(jaxcomp.local_updates, optax.sgd(0.01), None, AXIS, every=10),
        functools.partial(
            jaxcomp.local_updates,
            *(optax.sgd(0.01), optax.sgd(0.7, 0.9, nesterov=True), AXIS),
            every=10,
            fragments=1,
            delay=2,
            mix=0.5,
            synchronous=5,
        ),
    )

    def ends(tx, dtype):
        def one(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda x: jnp.full_like(x, 0.01), jaxcomp.view(params, state))
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        def run(_):
            params = {"w": jnp.full((2, 64), 2, dtype), "b": jnp.full(3, 2.0)}
            params, state = lax.scan(one, (params, tx.init(params)), length=200)[0]
            return params, remainder.exact(params, state.fragments[0].rest)

        return jax.jit(jax.vmap(run, axis_name=AXIS))(jnp.arange(2))

    for make in makes:
        wide, exact = ends(make(), "float32")
        moved = 2 - float(wide["w"][0, 0, 0])
        assert 0.01 < moved < 0.2
        jax.tree.map(np.testing.assert_array_equal, wide, exact)
        for dtype in ("bfloat16", "float16"):
            params, exact = ends(make(), dtype)
            assert params["w"].dtype == dtype
            np.testing.assert_allclose(2 - exact["w"], moved, rtol=0.01)
            np.testing.assert_array_equal(params["w"], exact["w"].astype(dtype))
            np.testing.assert_array_equal(params["b"], wide["b"])


@pytest.mark.full
def test_weights_are_those_of_the_mean():
    """Of a weight that is not finite, the worker has none, and goes back to the centre."""
    weights = jnp.asarray([1, 2, 3, 4, 5, 6, 7, jnp.nan])
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=2)
    step = jax.vmap(
        lambda p, s, t, c, w: local_step(tx, quadratic, weight=w)(p, s, t, c), axis_name=AXIS
    )
    params, state = everyone(tx)
    for _ in range(2):
        params, state, _ = step(params, state, TARGETS, CURVATURES, weights)
    own = PARAMS["w"]
    for _ in range(2):
        own = own - 0.1 * CURVATURES * (own - TARGETS)
    want = np.average(own[:7], axis=0, weights=weights[:7])
    np.testing.assert_allclose(params["w"][0], want, rtol=1e-5, atol=1e-6)
    assert state.fragments[0].lost.tree[:, 0].tolist() == [0] * 7 + [1]
    plain = optax.chain(jaxcomp.compressed_mean(jaxcomp.Dense(), AXIS))
    for weight, reducer, said in (
        (jnp.ones(2), jaxcomp.Dense(), "`weight` must be one number"),
        (1.0, plain, "`weight` must be None with a `reducer` that is a transformation without"),
    ):
        tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=2, reducer=reducer)
        with pytest.raises(ValueError, match=said):
            jax.eval_shape(program(tx, weight=weight), *everyone(tx))


@pytest.mark.full
def test_the_variance_is_that_of_the_models_under_any_codec():
    """Each round of two steps from one point; a codec moves the centre, and not the variance."""
    params = {"a": jnp.zeros((4, 64)), "b": jnp.zeros((40, 64))}
    targets = 1 + jax.random.normal(jax.random.key(0), (WORKERS, 40, 64)) / 8
    data = (targets, jnp.ones_like(targets))
    levels = []
    for reducer in (
        jaxcomp.Dense(),
        jaxcomp.Gather(jaxcomp.Policy(jaxcomp.qsgd_inf(bits=2), min_size=0)),
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.top_k(0.02), jaxcomp.Residual())),
    ):
        period = jaxcomp.gates.AdaptivePeriod(learning_rate=0.1, warmup=4, start=2)
        tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=period, reducer=reducer)
        state = trained(tx, 12, params, quadratic, data)[3]
        levels.append(float(state.period.level[-1, 0]))
    np.testing.assert_allclose(levels[1:], levels[0], rtol=0.1)


def test_schedules_of_rounds_that_begin_anew_count_all_steps():
    """The rate of FedPAQ's theorem is constant in a round, and falls from one to the next."""
    seen = optax.GradientTransformation(
        lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)),
        lambda u, s, p=None: (
            jax.tree.map(lambda x: jnp.full_like(x, s.count), u),
            s._replace(count=s.count + 1),
        ),
    )
    inner = optax.chain(optax.trace(0.5), seen)
    tx = jaxcomp.local_updates(inner, None, AXIS, every=3, keep_inner=False, guard=False)
    params = trained(tx, 6)[0]["w"][:, 0]
    np.testing.assert_allclose(params[2] - PARAMS["w"], 0 + 1 + 2, rtol=1e-5)
    np.testing.assert_allclose(params[5] - params[2], 3 + 4 + 5, rtol=1e-5)


@pytest.mark.full
def test_a_round_as_one_program_has_the_steps_of_a_round():
    def run(tx, steps, state=None):
        round_ = jaxcomp.local_round(tx, lambda p, x: jax.value_and_grad(quadratic)(p, *x), AXIS)
        batches = jax.tree.map(lambda x: jnp.stack([x] * steps, 1), (TARGETS, CURVATURES))
        carry = everyone(tx) if state is None else state
        return jax.jit(jax.vmap(round_, axis_name=AXIS))(*carry, batches)

    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=4)
    with pytest.raises(ValueError, match="`batches` must have a leading axis of every=4 steps"):
        run(tx, 6)
    want = run(tx, 4)
    # From the middle of a round, no round is longer.
    state = everyone(tx)
    for _ in range(2):
        state = program(tx)(*state)
    got = run(tx, 4, state)
    np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-6)
    assert got[1].skipped.tree[:, 0].tolist() == [2] * WORKERS
    # Rounds of other lengths end where they do step by step.
    period = jaxcomp.gates.AdaptivePeriod(learning_rate=0.1, warmup=1, start=2)
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=period)
    got, want = run(tx, 5), trained(tx, 5)
    np.testing.assert_allclose(got[0]["w"], want[0]["w"][-1], rtol=1e-6)
    assert got[1].waited[0] == want[3].waited[-1, 0]


def test_a_worker_may_stall_for_a_round():
    numbers = [0, 2, 2, 2, 2, 2, 2, 2]
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=2, local_steps=numbers)
    params, own, _, _ = trained(tx, 2)
    np.testing.assert_array_equal(own["w"][0, 0], PARAMS["w"])
    assert np.any(np.asarray(params["w"][1, 0]) != PARAMS["w"])


def test_steps_that_exchange_nothing_have_no_collective_after_synchronous_ones(mesh):
    tx = jaxcomp.local_updates(optax.sgd(0.1), None, AXIS, every=4, synchronous=3)
    step = local_step(tx, quadratic, exchange=False)
    run = jaxcomp.data_parallel(
        lambda p, s, t, c: step(p, s, t[0], c[0])[:2], mesh, AXIS, batch_argnums=(2, 3)
    )
    state = jaxcomp.init_state(tx, FOUR, mesh, AXIS)
    assert jaxcomp.steps_alone(state) == 0
    text = run.lower(FOUR, state, TARGETS, CURVATURES).compile()
    assert jaxcomp.collective_bytes(text) == {}

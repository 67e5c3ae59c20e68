"""Momentum before compression: the sent part, the unsent part, and the cleared momentum."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import testing
from jaxcomp.base import Feedback, WrappedFeedback
from jaxcomp.exchange import reduce as reduce_, state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import MomentumState
from jaxcomp.numerics import noise

WORKERS, STEPS, DECAY = 4, 7, 0.9
RNG = np.random.default_rng(0)
LIKE = {"kernel": jnp.zeros((32, 40)), "bias": jnp.zeros(40)}
GRADS = [
    jax.tree.map(lambda p: jnp.asarray(RNG.standard_normal((WORKERS, *p.shape)), jnp.float32), LIKE)
    for _ in range(STEPS)
]


def link(codec, **settings):
    return jaxcomp.Link(codec, jaxcomp.MomentumCorrection(DECAY, **settings))


def some(fraction):
    """A sparsifier that compiles in a fifth of the time, for properties of all sparsifiers."""
    return jaxcomp.random_k(fraction=fraction, unbiased=False)


def start(tx, like=LIKE, workers=WORKERS):
    return jax.tree.map(lambda x: jnp.stack([x] * workers), tx.init(like))


def means(tx, grads=GRADS):
    """The mean of each step on worker 0, and the last state, with workers simulated by `vmap`."""
    step, state, got = jax.jit(jax.vmap(tx.update, axis_name="data")), start(tx), []
    for grad in grads:
        mean, state = step(grad, state)
        got.append(jax.tree.map(lambda x: np.asarray(x[0]), mean))
    return got, state


@pytest.mark.core("True-True")
@pytest.mark.parametrize(("nesterov", "masking"), [(False, True), (True, True)], ids=str)
def test_it_is_the_published_recursion(nesterov, masking):
    """Written once more in numpy, element by element, with memory cleared where it was sent."""
    codec = jaxcomp.top_k(fraction=0.1)
    got, state = means(
        jaxcomp.compressed_mean(link(codec, nesterov=nesterov, masking=masking), axis_name="data")
    )
    u = np.zeros((WORKERS, 32 * 40))
    v = np.zeros((WORKERS, 32 * 40))
    k = 128
    for step, grads in enumerate(GRADS):
        g = np.asarray(grads["kernel"], np.float64).reshape(WORKERS, -1)
        if nesterov:
            u = DECAY * (u + g)
            v = v + u + g
        else:
            u = DECAY * u + g
            v = v + u
        total = np.zeros(32 * 40)
        for worker in range(WORKERS):
            chosen = np.argsort(-np.abs(v[worker]))[:k]
            total[chosen] += v[worker, chosen]
            v[worker, chosen] = 0
            if masking:
                u[worker, chosen] = 0
        np.testing.assert_allclose(
            got[step]["kernel"].reshape(-1), total / WORKERS, rtol=1e-4, atol=1e-5
        )
    memory = state.memory.feedback.tree
    np.testing.assert_allclose(memory.velocity[0][:, 0, 0], v, rtol=1e-4, atol=1e-5)
    kept = u if nesterov else DECAY * u  # The next gradient is added to it.
    np.testing.assert_allclose(memory.momentum[0][:, 0, 0], kept, rtol=1e-4, atol=1e-5)


@pytest.mark.core("False")
@pytest.mark.parametrize("nesterov", [False, True])
def test_sending_everything_without_masking_is_sgd_with_momentum(nesterov):
    """Leaves that are sent dense get theirs after the mean: the whole tree follows optax."""
    full = link(jaxcomp.top_k(fraction=1.0), nesterov=nesterov, masking=False)
    trace = optax.trace(DECAY, nesterov=nesterov)
    got, _ = means(
        optax.chain(
            jaxcomp.compressed_mean(full, axis_name="data"),
            optax.masked(trace, jaxcomp.dense_leaves(full)),
            optax.sgd(0.1),
        )
    )
    plain = optax.sgd(0.1, momentum=DECAY, nesterov=nesterov)
    state = plain.init(LIKE)
    for mine, grads in zip(got, GRADS, strict=True):
        want, state = plain.update(jax.tree.map(lambda g: jnp.mean(g, 0), grads), state)
        for name in LIKE:
            np.testing.assert_allclose(mine[name], want[name], rtol=1e-4, atol=1e-6)


def test_sending_everything_with_masking_is_sgd_without_momentum():
    got, state = means(jaxcomp.compressed_mean(link(some(1.0)), axis_name="data"), GRADS[:3])
    for mine, grads in zip(got, GRADS, strict=False):
        np.testing.assert_allclose(mine["kernel"], grads["kernel"].mean(0), rtol=1e-4, atol=1e-6)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.memory.feedback))
    # Nesterov's look ahead is a longer step.
    feedback, like = jaxcomp.MomentumCorrection(DECAY, nesterov=True), {"w": jnp.zeros((2, 9))}
    state = feedback.init(like, like)
    for grads in GRADS[:2]:
        g = {"w": grads["kernel"][:2, 0, :9]}
        message, state = feedback.compensate(g, state)
        np.testing.assert_allclose(message["w"], (1 + DECAY) * g["w"], rtol=1e-6)
        _, state = feedback.update(message, message, message, 1.0, None, state)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_loses_nothing(nesterov):
    """The sent part plus the remaining velocity equals the sum of the velocity over all steps."""
    feedback = jaxcomp.MomentumCorrection(DECAY, nesterov=nesterov)
    like = {"w": jnp.zeros((5, 60))}
    state = feedback.init(like, like)
    arrived, velocities, u = np.zeros((5, 60)), np.zeros((5, 60)), np.zeros((5, 60))
    for _ in range(9):
        g = RNG.standard_normal((5, 60))
        message, state = feedback.compensate({"w": jnp.asarray(g, jnp.float32)}, state)
        u = DECAY * (u + g) if nesterov else DECAY * u + g
        velocities += u + g if nesterov else u
        chosen = RNG.random((5, 60)) < 0.3
        sent = np.where(chosen, np.round(4 * np.asarray(message["w"])) / 4, 0)  # Quantised.
        u[sent != 0] = 0
        part, state = feedback.update(
            message, {"w": jnp.asarray(sent, jnp.float32)}, like, 1.0, None, state
        )
        assert part is like
        arrived += sent
    left = np.asarray(feedback.unsent(state)["w"], np.float64)
    np.testing.assert_allclose(arrived + left, velocities, rtol=1e-5, atol=1e-5)
    assert np.abs(left).max() > 0.1


def test_a_value_that_decodes_to_zero_was_not_sent():
    feedback = jaxcomp.MomentumCorrection(0.5)
    like = {"w": jnp.zeros((1, 4))}
    message, state = feedback.compensate(
        {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]])}, feedback.init(like, like)
    )
    sent = {"w": jnp.array([[0.0, 2.5, 0.0, 4.0]])}
    _, state = feedback.update(message, sent, like, 1.0, None, state)
    np.testing.assert_array_equal(state.velocity["w"], [[1.0, -0.5, 3.0, 0.0]])
    np.testing.assert_array_equal(state.momentum["w"], [[0.5, 0.0, 1.5, 0.0]])


def test_a_worker_that_does_not_take_part_keeps_everything():
    reducer = jaxcomp.Gather(link(some(1.0)))
    like = {"w": jnp.zeros((32, 40))}
    grads = {"w": GRADS[0]["kernel"]}

    def step(grads, weight):
        plan = Plan.of(reducer, like, "data")
        result = reduce_.reduce(plan, noise.raw(0), grads, state_.init(plan), weight=weight)
        return result.mean, result.state.feedback.own()

    weights = jnp.array([1.0, 0.0, 2.0, 1.0])
    mean, memory = jax.jit(jax.vmap(step, axis_name="data"))(grads, weights)
    g = np.asarray(grads["w"])
    want = (g[0] + 2 * g[2] + g[3]) / 4
    np.testing.assert_allclose(mean["w"][0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(memory.velocity[0][1, 0], g[1].reshape(-1))
    np.testing.assert_allclose(memory.momentum[0][1, 0], DECAY * g[1].reshape(-1), rtol=1e-6)
    for other in (0, 2, 3):
        assert not np.asarray(memory.velocity[0][other]).any()
        assert not np.asarray(memory.momentum[0][other]).any()


def test_a_wide_memory_adds_up_what_a_narrow_gradient_cannot():
    like = {"w": jnp.zeros((1, 3), jnp.bfloat16)}
    tiny = {"w": jnp.full((1, 3), 2.0**-10, jnp.bfloat16)}
    ends = {}
    for dtype in ("bfloat16", None):
        feedback = jaxcomp.MomentumCorrection(0.0, dtype=dtype)
        state = feedback.init(like, like)
        state = state._replace(velocity=jax.tree.map(jnp.ones_like, state.velocity))
        for _ in range(8):
            message, state = feedback.compensate(tiny, state)
            assert message["w"].dtype == jnp.bfloat16
            _, state = feedback.update(message, like, like, 1.0, None, state)
        assert state.velocity["w"].dtype == (dtype or "float32")
        ends[dtype] = float(state.velocity["w"][0, 0])
    assert ends == {"bfloat16": 1.0, None: 1 + 8 * 2.0**-10}


def test_a_narrow_velocity_does_not_overflow():
    feedback = jaxcomp.MomentumCorrection(dtype="float16")
    like = {"w": jnp.zeros((1, 3))}
    message, state = feedback.compensate({"w": jnp.full((1, 3), 3e5)}, feedback.init(like, like))
    _, state = feedback.update(message, like, like, 1.0, None, state)
    for leaf in jax.tree.leaves(state):
        assert leaf.dtype == jnp.float16
        assert np.isfinite(np.asarray(leaf, np.float32)).all()


@pytest.fixture(scope="module")
def trained(mesh):
    """A compiled step of eight workers with statistics, and a state after two steps."""
    tx = optax.chain(
        jaxcomp.clip_local(1e3, axis_name="data"),
        jaxcomp.compressed_mean(link(some(0.1)), axis_name="data", stats=True),
    )
    step = jaxcomp.data_parallel(
        lambda s, g: tx.update(jax.tree.map(lambda x: x[0], g), s), mesh, "data"
    )
    grads = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), GRADS[0], GRADS[1])
    state = jaxcomp.init_state(tx, LIKE, mesh, "data")
    for _ in range(2):
        _, state = step(state, grads)
    return tx, step, state, grads


def test_a_step_that_is_not_finite_enters_no_memory(trained):
    _, step, state, grads = trained
    memory = jax.tree.map(np.asarray, state[1].memory)
    for name, bad in (("kernel", np.nan), ("kernel", np.inf), ("bias", np.nan)):
        poisoned = {**grads, name: grads[name].at[3, 0].set(bad)}
        mean, after = step(state, poisoned)
        assert not np.isfinite(np.asarray(mean[name])).all()
        for got, want in zip(
            jax.tree.leaves(after[1].memory), jax.tree.leaves(memory), strict=True
        ):
            np.testing.assert_array_equal(got, want)
    mean, _ = step(after, grads)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(mean))


def test_stats_tell_the_velocity_that_waits(trained):
    _, _, state, grads = trained
    velocity = np.asarray(state[1].memory.feedback.tree.velocity[0])
    ratio = np.linalg.norm(velocity) / np.linalg.norm(np.asarray(grads["kernel"]))
    np.testing.assert_allclose(float(state[1].stats.residual_ratio), ratio, rtol=1e-4)


def test_resizing_keeps_the_mean_of_both_memories(trained):
    tx, _, state, _ = trained
    for workers in (3, 16):
        after = jaxcomp.resize_workers(tx, state, LIKE, workers)
        old, new = state[1].memory.feedback, after[1].memory.feedback
        assert isinstance(new.tree, MomentumState)
        assert old.kind == new.kind
        for x, y in zip(jax.tree.leaves(old.tree), jax.tree.leaves(new.tree), strict=True):
            assert y.shape[0] == workers
            np.testing.assert_allclose(np.mean(y, 0), np.mean(x, 0), rtol=1e-5, atol=1e-7)


def test_momentum_correction_meets_the_contract():
    for settings in ({}, {"nesterov": True}, {"masking": False}, {"dtype": "float32"}):
        testing.check_feedback(jaxcomp.MomentumCorrection(**settings))

    @dataclasses.dataclass(frozen=True)
    class Forgetful(WrappedFeedback):
        feedback: Feedback = jaxcomp.MomentumCorrection()

        def update(self, message, sent, part, share, weight, state):
            return part, jax.tree.map(jnp.zeros_like, state)

    with pytest.raises(AssertionError, match="must lose nothing"):
        testing.check_feedback(Forgetful())


def test_wrong_arguments_of_momentum_correction_say_so():
    with pytest.raises(ValueError, match=r"`momentum` must be a number from 0.0 to 1.0, got 1.5"):
        jaxcomp.MomentumCorrection(1.5)
    with pytest.raises(ValueError, match="`nesterov` must be one of False, True, got 'yes'"):
        jaxcomp.MomentumCorrection(nesterov="yes")
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        jaxcomp.MomentumCorrection(dtype="int4")
    with pytest.raises(ValueError, match="may grow from step to step"):
        jaxcomp.Link(jaxcomp.qsgd(), jaxcomp.MomentumCorrection())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        described = jaxcomp.describe(link(jaxcomp.top_k()), LIKE)
    assert "MomentumCorrection as given" in described.picked


def clipped(max_norm, grads):
    tx = jaxcomp.clip_local(max_norm, axis_name="data")
    return jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(grads)


@pytest.mark.full
def test_clipping_holds_the_mean_of_independent_gradients():
    rng = np.random.default_rng(1)
    grads = {
        "a": jnp.asarray(rng.standard_normal((64, 50, 20)), jnp.float32),
        "b": jnp.asarray(rng.standard_normal((64, 200)), jnp.bfloat16),
        "none": jnp.zeros((64, 0, 3)),
    }
    got = clipped(2.0, grads)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), grads
    )
    own = jax.vmap(optax.tree.norm)(jax.tree.map(lambda x: x.astype(jnp.float32), got))
    np.testing.assert_allclose(own, 2.0 * 8, rtol=1e-3)  # Over the whole tree, √64 = 8.
    mean = optax.tree.norm(jax.tree.map(lambda x: jnp.mean(x.astype(jnp.float32), 0), got))
    np.testing.assert_allclose(mean, 2.0, rtol=0.1)
    small = jax.tree.map(lambda x: x * 2.0**-4, grads)
    for x, y in zip(jax.tree.leaves(small), jax.tree.leaves(clipped(2.0, small)), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_clipping_at_the_ends_of_the_range():
    x = jnp.stack([jnp.full(1000, scale) for scale in (1e-30, 1e30, 2.5e38, 0.0)])
    got = np.asarray(clipped(1.0, x), np.float64)
    np.testing.assert_array_equal(got[0], np.asarray(x[0], np.float64))
    np.testing.assert_allclose(np.linalg.norm(got[1:3], axis=1), 2.0, rtol=1e-4)
    np.testing.assert_array_equal(got[3], 0)
    for bad in (np.nan, np.inf):
        got = np.asarray(clipped(1.0, jnp.ones((2, 9)).at[1, 4].set(bad)))
        assert not np.isfinite(got[1, 4])
        assert np.isfinite(got[0]).all()
    with pytest.raises(ValueError, match="`max_norm` must be a positive number"):
        jaxcomp.clip_local(0.0, axis_name="data")
    with pytest.raises(ValueError, match="'data' is not bound here"):
        jaxcomp.clip_local(1.0, axis_name="data").update(LIKE, optax.EmptyState())

"""Two shots: the law, both directions with feedback, and the memory of slices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.suite import FEW, few_or_all, label, slow

import jaxcomp
from jaxcomp import testing
from jaxcomp.exchange import state as state_
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import memory
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker
from jaxcomp.testing import problems

SIGN = jaxcomp.sign(bucket_size=None)
ALL = {"min_size": 0, "min_ndim": 0}


def both(codec, feedback):
    """The same codec and feedback in both directions, for every leaf."""
    up = jaxcomp.Link(jaxcomp.Policy(codec, **ALL), feedback)
    return jaxcomp.TwoShot(up, jaxcomp.Link(codec, feedback))


@pytest.mark.core("Q(Uniform(steps=*")
@pytest.mark.filterwarnings("ignore:.*is biased.*:UserWarning")
@pytest.mark.parametrize(
    "codec", few_or_all([FEW[4], FEW[8]], [*FEW[1:5:3], *FEW[7:9], *FEW[10:]]), ids=label
)
def test_the_law(codec):
    """Over three workers, which divide nothing; the way down is lossless."""
    testing.check_reducer(jaxcomp.TwoShot(codec), workers=3, tolerance=1e-4)


@pytest.mark.core("Vote")
@pytest.mark.parametrize(
    "reducer",
    [
        jaxcomp.TwoShot(jaxcomp.qsgd_inf(bits=4), jaxcomp.qsgd_inf(bits=8, bucket_size=128)),
        slow(jaxcomp.TwoShot(jaxcomp.eden(bits=4), jaxcomp.eden(bits=4))),
        jaxcomp.choose_reducer(jaxcomp.qsgd_inf(bits=4), jnp.zeros((64, 64)), 5),
        jaxcomp.Vote(),
    ],
    ids=lambda r: type(r).__name__,
)
def test_the_way_down_is_the_same_for_all(reducer):
    loose = 30.0 if isinstance(reducer, jaxcomp.Vote) else 1.0
    testing.check_reducer(reducer, workers=5, downlink_tolerance=loose)


@pytest.fixture
def in_float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.full
def test_ef21_both_ways_is_exact_where_others_plateau(in_float64):
    """One bit an element in both directions, on eight workers that disagree at the solution."""
    problem = problems.quadratics()

    def error(reducer, rate, steps):
        tx = optax.chain(
            jaxcomp.compressed_mean(reducer, "workers"), optax.sgd(rate / problem.smoothness)
        )
        run = problems.descend(tx, problem, steps)
        assert run.alike
        return np.sqrt(run.error[-1])

    assert error(both(SIGN, jaxcomp.Shift()), 0.15, 500) < 1e-12
    assert error(both(jaxcomp.sign(bucket_size=8), jaxcomp.Shift()), 0.3, 400) < 1e-12
    assert 1e-2 < error(both(SIGN, jaxcomp.Residual()), 0.1, 500) < 0.3
    with pytest.warns(UserWarning, match="biased"):
        naive = both(SIGN, jaxcomp.NoFeedback())
    assert error(naive, 0.1, 500) > 0.3


@pytest.mark.full
def test_the_error_of_the_time_average_falls_as_one_over_time():
    """With residuals both ways, what one bit leaves out is sent later: nothing is lost for good."""
    problem = problems.quadratics()
    grads = jnp.einsum("nmd,nm->nd", problem.matrices, problem.targets)[:, None]  # At zero.
    tx = jaxcomp.compressed_mean(both(SIGN, jaxcomp.Residual()), "workers")

    def step(carry, _):
        state, total = carry
        mean, state = jax.vmap(tx.update, axis_name="workers")(grads, state)
        return (state, total + mean[0]), total + mean[0]

    @jax.jit
    def run():
        state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)
        return jax.lax.scan(step, (state, jnp.zeros_like(grads[0])), None, length=400)[1]

    exact, times = jnp.mean(grads, axis=0), np.array([1, 10, 100, 400])
    off = [
        jnp.linalg.norm(run_sum / t - exact)
        for run_sum, t in zip(run()[times - 1], times, strict=True)
    ]
    errors = np.array(off) / float(jnp.linalg.norm(exact))
    assert errors[2] < 0.05
    assert (np.diff(np.log(errors[1:])) / np.diff(np.log(times[1:])) < -0.8).all(), errors


PARAMS = {"w": jnp.zeros((40, 130)), "v": jnp.zeros((33, 50), jnp.bfloat16), "b": jnp.zeros(7)}


def noisy(number, workers=8):
    keys = jax.random.split(jax.random.key(number), 3)
    return {
        name: jax.random.normal(key, (workers, *leaf.shape)).astype(leaf.dtype)
        for key, (name, leaf) in zip(keys, PARAMS.items(), strict=True)
    }


@pytest.mark.parametrize("feedback", [jaxcomp.Residual(), jaxcomp.Shift()], ids=str)
def test_a_state_cannot_be_made_outside(feedback):
    """`tx.init` knows no workers there, and the memory of a slice depends on their number."""
    tx = jaxcomp.compressed_mean(both(jaxcomp.sign(), feedback), "data")
    with pytest.raises(ValueError, match=r"`tx\.init` must know .* jaxcomp\.init_state"):
        tx.init(PARAMS)


@pytest.mark.full
def test_memory_moves_to_another_number_of_workers():
    """Residuals of both directions keep their sums; the slices are computed again."""
    tx = jaxcomp.compressed_mean(both(jaxcomp.sign(), jaxcomp.Residual()), "workers")

    def trained(workers, state):
        step = jax.jit(jax.vmap(tx.update, axis_name="workers"))
        mean, state = step(noisy(1, workers), state)
        return mean, state

    def outside(state):
        """As `shard_map` has it: memory with an axis of workers, the rest without."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x[:, 0] if per_worker.marked(path) else x[0], state
        )

    _, state = trained(8, jax.jit(jax.vmap(tx.init, axis_name="workers"))(noisy(0, 8)))
    before = outside(state)
    after = jaxcomp.resize_workers(tx, before, PARAMS, 3)
    for old, new in zip(
        before.memory.feedback.tree.residual, after.memory.feedback.tree.residual, strict=True
    ):
        np.testing.assert_allclose(
            jnp.mean(old.astype(jnp.float32), 0), new[0].astype(jnp.float32), rtol=1e-2, atol=1e-2
        )
    for old, new in zip(
        before.memory.reducer[1].memory.tree.residual,
        after.memory.reducer[1].memory.tree.residual,
        strict=True,
    ):
        assert new.shape[0] == 3
        rows, moved = (x.reshape(-1, x.shape[-1]) for x in (old, new))
        kept = min(len(rows), len(moved))
        np.testing.assert_array_equal(rows[:kept], moved[:kept])
        assert not np.asarray(rows[kept:]).any()
        assert not np.asarray(moved[kept:]).any()
    again = jax.tree_util.tree_map_with_path(
        lambda path, x: x[:, None] if per_worker.marked(path) else jnp.stack([x] * 3), after
    )
    mean, _ = trained(3, again)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(mean))
    with pytest.raises(ValueError, match="one for these"):
        trained(2, jax.tree.map(lambda x: x[:2], again))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", slow("int8")])
def test_narrow_memories(dtype):
    """A residual in eight bits stays close to the exact one, and loses nothing it could keep."""
    feedback = jaxcomp.Residual(dtype=dtype)
    testing.check_feedback(feedback)
    reducer = jaxcomp.TwoShot(jaxcomp.Link(jaxcomp.sign(), feedback))
    state = state_.init(Plan.of(reducer, PARAMS, "workers", (1,)))
    held = sum(x.nbytes for x in jax.tree.leaves(state.feedback))
    plain = sum(x.size for x in jax.tree.leaves(trees.layout(SIGN, PARAMS).likes))
    assert held < {"int8": 1.3, "bfloat16": 2.5}[dtype] * plain

    def outcome(kind):
        tx = jaxcomp.compressed_mean(
            jaxcomp.Gather(jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual(dtype=kind))), "workers"
        )
        grads = {"w": noisy(0)["w"]}

        def step(carry, _):
            state, total = carry
            mean, state = jax.vmap(tx.update, axis_name="workers")(grads, state)
            return (state, total + mean["w"][0]), None

        state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)
        total = jnp.zeros(PARAMS["w"].shape)
        (_, total), _ = jax.lax.scan(step, (state, total), None, length=60)
        exact = jnp.mean(grads["w"], 0)
        return float(jnp.linalg.norm(total / 60 - exact) / jnp.linalg.norm(exact))

    wide, narrow = outcome(None), outcome(dtype)
    assert narrow < 1.3 * wide + 0.01


def test_illegal_pairs_say_what_would_work():
    with pytest.raises(ValueError, match=r"Shift\(step=1.0\), EF21"):
        jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift(step=0.5))
    with pytest.raises(ValueError, match=r"at most 1/\(1 \+ ω\)"):
        jaxcomp.Link(jaxcomp.qsgd(bits=2), jaxcomp.Shift(step=1.0))
    with pytest.raises(ValueError, match="neither unbiased nor contractive"):
        jaxcomp.Link(jaxcomp.terngrad(), jaxcomp.Shift())
    whole = jaxcomp.Link(jaxcomp.qsgd(bits=2, bucket_size=None), jaxcomp.Shift())
    with pytest.raises(ValueError, match=r"at most 1/\(1 \+ ω\)"):  # Known where the size is.
        jaxcomp.compressed_mean(jaxcomp.Gather(whole), "data").init(PARAMS)
    with pytest.raises(ValueError, match="buckets no longer than those of `up`"):
        jaxcomp.TwoShot(jaxcomp.qsgd_inf(bucket_size=64), jaxcomp.qsgd_inf(bucket_size=128))
    with pytest.raises(ValueError, match="PowerIteration"):
        jaxcomp.TwoShot(jaxcomp.Link(jaxcomp.codecs.LowRank(rank=2), jaxcomp.Residual()))
    with pytest.raises(ValueError, match="rules of `up`"):
        jaxcomp.TwoShot(
            jaxcomp.qsgd_inf(), jaxcomp.Link(jaxcomp.Policy(jaxcomp.qsgd_inf(), min_size=7))
        )
    with pytest.raises(ValueError, match="neither unbiased nor contractive"):
        jaxcomp.Vote(jaxcomp.Link(jaxcomp.codecs.Ballot(), jaxcomp.Shift()))
    with pytest.raises(ValueError, match=r"must be jaxcomp.codecs.Ballot\(\)"):
        jaxcomp.Vote(jaxcomp.qsgd_inf())
    for wrong in (0.0, 1.5, True, "1"):
        with pytest.raises(ValueError, match="`step` must be"):
            jaxcomp.Shift(step=wrong)
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        jaxcomp.Shift(dtype="int8")


@pytest.mark.full
def test_residuals_in_units_of_the_step():
    """With the rate before the mean it is the published form, `p = γₜg + e`, whatever `γₜ` is."""
    rates = np.array([0.0, 1.0, 0.5, 2.0, 0.25, 0.125], np.float32)

    def schedule(step):
        return jnp.asarray(rates)[step]

    def rate(step):
        return jnp.maximum(schedule(step), 1e-6)

    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.top_k(fraction=0.25), **ALL), jaxcomp.Residual())
    tx = optax.chain(
        optax.scale_by_schedule(rate),
        jaxcomp.compressed_mean(jaxcomp.Gather(link), "workers"),
        optax.scale_by_schedule(lambda step: 1 / rate(step)),
        optax.sgd(schedule),
    )
    grads = jax.random.normal(jax.random.key(0), (6, 3, 16))
    state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads[0])
    waiting = np.zeros((3, 16), np.float32)
    for gamma, now in zip(rates, grads, strict=True):
        updates, state = jax.vmap(tx.update, axis_name="workers")(now, state)
        message = max(gamma, 1e-6) * np.asarray(now) + waiting
        kept = np.abs(message) >= np.sort(np.abs(message), axis=1)[:, -4:-3]
        sent = np.where(kept, message, 0)
        waiting = message - sent
        wanted = -sent.mean(axis=0) if gamma else np.zeros(16)
        np.testing.assert_allclose(updates[0], wanted, rtol=1e-5, atol=2e-6)


def test_padding_never_enters_a_memory():
    """The last bucket of a leaf may hold one element; a sign codec decodes its padding to signs."""
    tx = jaxcomp.compressed_mean(
        jaxcomp.Gather(jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(), **ALL), jaxcomp.Residual())),
        "workers",
    )
    grads = jax.random.normal(jax.random.key(0), (2, 513))
    state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)
    step = jax.jit(jax.vmap(tx.update, axis_name="workers"))
    for _ in range(20):
        mean, state = step(grads, state)
    assert float(jnp.abs(mean).max()) < 10
    residual = state.memory.feedback.tree.residual[0]
    assert not np.asarray(residual[..., 1, 1:]).any()


def test_a_wide_residual_adds_up_what_a_narrow_gradient_cannot():
    link = jaxcomp.Link(jaxcomp.Policy(SIGN, **ALL), jaxcomp.Residual(dtype="float32"))
    tx = jaxcomp.compressed_mean(jaxcomp.Gather(link), "workers", gate=jaxcomp.gates.Every(1001))
    grads = jnp.full((1, 8), 1e-3, jnp.bfloat16)

    def step(state, _):
        return jax.vmap(tx.update, axis_name="workers")(grads, state)[1], None

    state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)
    state, _ = jax.lax.scan(step, state, None, length=1000)
    waiting = state.memory.feedback.tree.residual[0]
    np.testing.assert_allclose(waiting, 1000 * float(grads[0, 0]), rtol=1e-3)


def test_what_a_narrower_memory_cannot_hold_is_its_largest():
    for dtype in (jnp.bfloat16, jnp.float32):
        held = memory.store(jnp.array([1e30, 65500.0, -1e30], dtype), "float16")
        np.testing.assert_array_equal(held, np.array([65504, 65504, -65504], np.float16))


@pytest.mark.core("Gather")
@pytest.mark.parametrize("reducer", [jaxcomp.Gather, lambda up: jaxcomp.TwoShot(up, up)])
def test_padding_never_enters_a_mirror(reducer):
    """It would grow by a sign's scale in every step, and overflow in float16."""
    link = jaxcomp.Link(jaxcomp.Policy(jaxcomp.sign(bucket_size=64), **ALL), jaxcomp.Shift())
    tx = jaxcomp.compressed_mean(reducer(link), "workers")
    grads = jax.random.normal(jax.random.key(0), (2, 65)).astype(jnp.float16) * 200
    state = jax.jit(jax.vmap(tx.init, axis_name="workers"))(grads)

    def step(state, _):
        return jax.vmap(tx.update, axis_name="workers")(grads, state)[1], None

    state, _ = jax.lax.scan(step, state, None, length=600)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.memory))
    largest = max(
        float(jnp.abs(x.astype(jnp.float32)).max()) for x in jax.tree.leaves(state.memory)
    )
    assert largest < 2000

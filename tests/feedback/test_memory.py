"""No memory contains non-finite values, for any wrapper, and a run recovers from a bad step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.spoiling import AXIS, assert_equal, assert_finite, runner
from helpers.suite import slow

import jaxcomp

STEPS, BAD = 24, 6
"""The step that is spoilt comes after a few others, so that memories are in use."""
RNG = np.random.default_rng(0)
GRADS = RNG.standard_normal((STEPS, 4, 64, 64))
SIGNS = np.where(RNG.random((64, 64)) < 0.5, -1.0, 1.0)


def stated(mean, rate=0.1):
    return jaxcomp.skip_nonfinite(optax.chain(mean, optax.sgd(rate)))


ROTATED = jaxcomp.codecs.Rotated(codec=jaxcomp.sign())


@pytest.mark.core("Cosine(codec=Spa*")
@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (jaxcomp.demo(), 32752),
        (ROTATED, 32752),
        (jaxcomp.Link(ROTATED, jaxcomp.Shift()), 49128),
        slow(jaxcomp.ecsq(bits=2), 49128),
    ],
    ids=str,
)
def test_one_large_step_does_not_stop_training(codec, value):
    """One worker's own message decodes beyond float16, or its residual is, and the mean is not."""
    tx = stated(jaxcomp.compressed_mean(codec, AXIS))
    grads = jnp.asarray(GRADS, jnp.float16).at[BAD, 2].set(jnp.asarray(value * SIGNS, "f2"))
    state, skipped, finite, moved = runner(tx, grads)(grads)
    assert_finite(state)
    assert finite.all()
    assert skipped[-1] <= 1
    assert moved[BAD + 1 :].all()


@pytest.mark.core("Always()")
@pytest.mark.parametrize("gate", [None, jaxcomp.gates.Always()], ids=str)
def test_a_shift_that_left_its_range_is_undone_on_all_workers(gate):
    """A bad step has no effect: the mean of all shifts must equal the mirror."""
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
    tx = stated(jaxcomp.compressed_mean(jaxcomp.Gather(link), AXIS, gate=gate))
    # Shifts are in float32, and a scale is at most 2¹²⁶: the fourth step reaches 2¹²⁸.
    grads = jnp.asarray(GRADS, jnp.float32).at[BAD - 3 : BAD, 2].set(3e38)
    # All elements but one have changed by 3e38, and one bit an element says so of that one too.
    spoilt = grads.at[BAD, 2].set(0).at[BAD, 2, 0, 0].set(3e38)
    run = runner(tx, grads)
    state, skipped, finite, _ = run(spoilt)
    assert_finite(state)
    assert finite.all()
    assert skipped[-1] == 1
    want, skipped, _, _ = run(spoilt, [BAD])
    assert skipped[-1] == 0
    assert_equal(state.inner, want.inner)


@pytest.mark.core("True")
@pytest.mark.parametrize("outside", [True, False])
def test_a_spoilt_round_of_gradients_is_left_out(outside):
    """A non-finite gradient may occur anywhere in the round, and on any worker."""
    chain = optax.chain(jaxcomp.compressed_mean(jaxcomp.sign(), AXIS), optax.adam(0.1))
    skip, every = jaxcomp.skip_nonfinite, 4
    if outside:
        tx = skip(jaxcomp.accumulate(chain, AXIS, every=every))
    else:
        tx = jaxcomp.accumulate(skip(chain), AXIS, every=every)
    grads = jnp.asarray(GRADS, jnp.float16)
    run = runner(tx, grads)
    for bad in (np.nan, np.inf):
        spoilt = grads.at[5, 3, 1, 2].set(bad).at[6, 3, 1, 2].set(bad)
        state, _, finite, moved = run(spoilt)
        assert_finite(state)
        assert finite.all()
        assert list(np.flatnonzero(moved)) == [3, 11, 15, 19, 23]
        assert_equal(state.inner.inner, run(spoilt, range(4, 8))[0].inner.inner)
    # The largest float twice is a sum out of the range of float16, but not of the sum's float32.
    moved = run(grads.at[5, 3, 1, 2].set(65504).at[6, 3, 1, 2].set(65504))[-1]
    assert list(np.flatnonzero(moved)) == [3, 7, 11, 15, 19, 23]


def test_neolithic_recovers():
    mean = jaxcomp.algorithms.neolithic(jaxcomp.sign(), AXIS, stages=2)
    method = jaxcomp.accumulate(optax.chain(mean, optax.sgd(0.1)), AXIS, every=2)
    grads = jnp.asarray(GRADS, jnp.float32).at[BAD, 2, 0, 0].set(np.nan)
    state, _, finite, moved = runner(jaxcomp.skip_nonfinite(method), grads)(grads)
    assert_finite(state)
    assert finite.all()
    assert moved.sum() == STEPS // 2 - 1


@pytest.mark.full
def test_local_state_outside_of_the_skip_is_kept():
    """The worker with the bad gradient skips it; if the whole chain is wrapped, all skip it."""
    local = jaxcomp.per_worker(optax.trace(0.9))
    mean = jaxcomp.compressed_mean(jaxcomp.sign(), AXIS)
    grads = jnp.asarray(GRADS, jnp.float32)
    spoilt = grads.at[BAD, 2, 0, 0].set(np.nan)
    state, skipped, _, moved = runner(optax.chain(local, stated(mean)), grads)(spoilt)
    assert_finite(state)
    assert skipped[-1] == 1
    assert moved[np.arange(STEPS) != BAD].all()
    whole = jaxcomp.skip_nonfinite(optax.chain(local, mean, optax.sgd(0.1)))
    run = runner(whole, grads)
    (state, skipped, *_), (other, *_) = run(spoilt), run(spoilt, [BAD])
    assert skipped[-1] == 1
    assert_equal(state.inner, other.inner)


def test_infinite_state_that_means_something_may_stay():
    """A best loss begins at infinity."""
    plateau = optax.contrib.reduce_on_plateau(patience=2)
    tx = jaxcomp.skip_nonfinite(optax.chain(optax.sgd(0.1), plateau))
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.ones(3)}, state, params, value=1.0)
    assert int(state.skipped) == 0
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-6)
    assert float(state.inner[1].best_value) == 1.0


def test_a_second_moment_out_of_range_is_skipped():
    """Its root divides the update to zero for good, and the updates show nothing."""
    tx, params = jaxcomp.skip_nonfinite(optax.adam(0.1)), {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)
    _, state = tx.update({"w": jnp.asarray([1, 300, 1], jnp.float16)}, state, params)
    assert int(state.skipped) == 1
    assert_finite(state)


REGULARIZERS = [None, jaxcomp.optimizers.L1(0.1), jaxcomp.optimizers.L2Ball(1.0)]


@pytest.mark.parametrize("make", ["prox_adagrad", "rda_adagrad"])
@pytest.mark.parametrize("regularizer", REGULARIZERS, ids=str)
def test_what_is_not_finite_shows_in_the_update(make, regularizer):
    """Also a sum of squares out of range, under which an element would never move again."""
    tx = getattr(jaxcomp.optimizers, make)(0.1, regularizer)
    params = jnp.full(3, 0.1)
    for bad in (jnp.nan, jnp.inf, 3e38):
        updates, _ = tx.update(jnp.array([1.0, bad, 1.0]), tx.init(params), params)
        assert not np.isfinite(np.asarray(updates))[1]
    safe = jaxcomp.skip_nonfinite(tx)
    _, state = safe.update(jnp.array([1.0, jnp.nan, 1.0]), safe.init(params), params)
    updates, state = safe.update(jnp.ones(3), state, params)
    assert_finite(state)
    assert (np.asarray(updates) != 0).all()


MODEL = {"w": jnp.zeros((96, 96)), "b": jnp.zeros(7)}


def stepper(tx, workers):
    mesh = jax.sharding.Mesh(jax.devices()[:workers], (AXIS,))

    def step(state, grads):
        return tx.update(jax.tree.map(lambda g: g[0], grads), state, MODEL)

    return mesh, jaxcomp.data_parallel(step, mesh, AXIS)


def gradients(workers, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((workers, *x.shape)), jnp.float32), MODEL
    )


@pytest.mark.full
@pytest.mark.parametrize("wrapped", ["skipped", "accumulated"])
def test_a_state_made_outside_the_mesh_may_be_skipped(wrapped):
    """Such a state has its final shapes, and each worker gets a copy of its memory."""
    tx = stated(jaxcomp.compressed_mean(jaxcomp.top_k(fraction=0.1), AXIS))
    if wrapped == "accumulated":
        tx = jaxcomp.skip_nonfinite(jaxcomp.accumulate(tx, AXIS, every=1))
    mesh, step = stepper(tx, 8)
    placed = jaxcomp.place(tx.init(MODEL), mesh, AXIS)
    made = jaxcomp.init_state(tx, MODEL, mesh, AXIS)
    grads = gradients(8)
    nan = {**grads, "b": grads["b"].at[3, 0].set(jnp.nan)}
    updates, first = step(placed, nan)  # Skipped at once.
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))
    updates, state = step(first, grads)
    wanted, other = step(made, grads)
    jax.tree.map(np.testing.assert_array_equal, updates, wanted)
    inner, other = (
        s.inner.inner.inner if wrapped == "accumulated" else s.inner for s in (state, other)
    )
    assert_equal(inner, other)


@pytest.mark.core("1-8")
@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 8), (2, 8)])
def test_a_resized_state_may_be_skipped(before, after):
    tx = stated(jaxcomp.compressed_mean(jaxcomp.sign(), AXIS))
    mesh, step = stepper(tx, before)
    _, state = step(jaxcomp.init_state(tx, MODEL, mesh, AXIS), gradients(before))
    state = jaxcomp.resize_workers(tx, state, MODEL, after)
    unsent = state.inner[0].memory.feedback.tree.residual[0].mean(0)
    mesh, step = stepper(tx, after)
    state = jaxcomp.place(state, mesh, AXIS)
    grads = gradients(after, 1)
    nan = {**grads, "b": grads["b"].at[0, 0].set(jnp.nan)}
    updates, skipped = step(state, nan)
    assert int(skipped.skipped) == int(state.skipped) + 1
    assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))
    kept = skipped.inner[0].memory.feedback.tree.residual[0]
    np.testing.assert_allclose(kept.mean(0), unsent, atol=1e-6)
    updates, _ = step(skipped, grads)
    wanted, _ = step(state, grads)
    jax.tree.map(np.testing.assert_array_equal, updates, wanted)

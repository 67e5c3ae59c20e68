"""Every mode of a step: after one bad step, the run is in the state without that step."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import methods
from helpers.spoiling import AXIS, assert_equal, assert_finite, runner
from helpers.suite import EVERY, label, slow

import jaxcomp

WORKERS, BAD = 3, 7
SHAPE = (2, 1024)
RNG = np.random.default_rng(0)
DTYPES = ("float16", "bfloat16", "float32")
SIGN = jaxcomp.sign()
EF21 = jaxcomp.Link(SIGN, jaxcomp.Shift())


REDUCERS = {
    "gather": jaxcomp.Gather(jaxcomp.Link(SIGN, jaxcomp.Residual())),
    "gather_ef21": jaxcomp.Gather(EF21),
    "two_shot": jaxcomp.TwoShot(jaxcomp.Link(SIGN, jaxcomp.Residual()), jaxcomp.qsgd()),
    "two_shot_ef21": jaxcomp.TwoShot(EF21, EF21),
    "two_shot_ef21_residual": jaxcomp.TwoShot(EF21, jaxcomp.Link(SIGN, jaxcomp.Residual())),
    "rotated_ef21": jaxcomp.Gather(
        jaxcomp.Link(jaxcomp.codecs.Rotated(codec=jaxcomp.sign()), jaxcomp.Shift())
    ),
    "diana": jaxcomp.Gather(jaxcomp.Link(jaxcomp.qsgd(bits=4, bucket_size=64), jaxcomp.Shift(0.3))),
    "dgc": jaxcomp.Gather(jaxcomp.Link(jaxcomp.top_k(0.1), jaxcomp.MomentumCorrection())),
    "nesterov": jaxcomp.Gather(
        jaxcomp.Link(jaxcomp.top_k(0.1), jaxcomp.MomentumCorrection(nesterov=True))
    ),
    "wide": jaxcomp.Gather(jaxcomp.Link(SIGN, jaxcomp.Residual(dtype="float32"))),
    "narrow": jaxcomp.Gather(jaxcomp.Link(SIGN, jaxcomp.Residual(dtype="float16"))),
    "eight_bits": jaxcomp.Gather(jaxcomp.Link(SIGN, jaxcomp.Residual(dtype="int8"))),
    "phases": jaxcomp.ReducerSchedule(
        tuple(
            (start, jaxcomp.Link(jaxcomp.top_k(fraction), jaxcomp.Residual()))
            for start, fraction in ((0, 0.3), (10, 0.1))
        )
    ),
    "power": jaxcomp.PowerIteration(rank=1, min_ratio=0),
    "power_in_turns": jaxcomp.PowerIteration(rank=1, min_ratio=0, alternate=True),
    "psum": jaxcomp.Psum(jaxcomp.random_k(0.1)),
    "vote": jaxcomp.Vote(),
    "dense": jaxcomp.Dense(),
}
GATES = {
    "every": jaxcomp.gates.Every(3),
    "bernoulli": jaxcomp.gates.Bernoulli(0.5),
    "censored": jaxcomp.gates.Censored(0.5),
}


def everywhere(codec):
    return jaxcomp.Policy(codec, min_size=0, min_ndim=0)


def of_reducer(reducer, **settings):
    mean = jaxcomp.compressed_mean(reducer, AXIS, **settings)
    return jaxcomp.skip_nonfinite(optax.chain(mean, optax.trace(0.9), optax.sgd(0.01)))


def bad_steps(grads):
    """Name to gradients of which one step is bad, on one worker."""
    largest = float(jnp.finfo(grads.dtype).max)
    signs = jnp.asarray(np.where(RNG.random(grads.shape[2:]) < 0.5, -1, 1), grads.dtype)
    one = grads.at[BAD, 1, 0, 5]
    return {
        "nan": one.set(jnp.nan),
        "inf": one.set(-jnp.inf),
        "largest": one.set(largest),
        "all_largest": grads.at[BAD, 1].set(signs * jnp.asarray(largest, grads.dtype)),
        "all_large": grads.at[BAD, 1].set(signs * jnp.asarray(0.6 * largest, grads.dtype)),
    }


def cases(few, every):
    """Short runs of few in one dtype, and long runs of all in every dtype."""
    return [(one, "float16", 24) for one in few] + [
        slow(one, dtype, 200) for one in every for dtype in DTYPES
    ]


def check(tx, dtype, steps, shape=SHAPE, exact=True, round_of=1):
    grads = jnp.asarray(RNG.standard_normal((steps, WORKERS, *shape)), dtype)
    run, first = runner(tx, grads), BAD - BAD % round_of
    without, *_ = run(grads, range(first, first + round_of))
    for name, spoilt in bad_steps(grads).items():
        state, skipped, finite, _ = run(spoilt)
        assert_finite(state, name)
        assert finite.all(), name
        assert skipped[-1] <= 1, (name, skipped)
        if exact and name in ("nan", "inf"):
            assert skipped[-1] == 1, name
            assert_equal(state.inner, without.inner, name)


SOME_CODECS = [jaxcomp.eden(bits=4, bucket_size=512, scale="minimum_error"), jaxcomp.natural()]


@pytest.mark.parametrize(("codec", "dtype", "steps"), cases(SOME_CODECS, EVERY), ids=label)
def test_a_codec_recovers(codec, dtype, steps):
    check(of_reducer(everywhere(codec)), dtype, steps)


@pytest.mark.parametrize(
    ("name", "dtype", "steps"), cases(["two_shot_ef21_residual", "nesterov"], REDUCERS)
)
def test_a_reducer_recovers(name, dtype, steps):
    check(of_reducer(REDUCERS[name]), dtype, steps)


@pytest.mark.parametrize(("name", "dtype", "steps"), cases(["bernoulli"], GATES))
def test_a_gate_recovers(name, dtype, steps):
    """A non-participating worker drops only its own bad gradient."""
    links = [EF21] if name == "censored" else [EF21, jaxcomp.Link(SIGN, jaxcomp.Residual())]
    for link in links:
        check(of_reducer(jaxcomp.Gather(link), gate=GATES[name]), dtype, steps, exact=False)


EXACT = {
    # Its workers take local steps, of which the bad one is left out by its worker alone.
    "zero_one_adam": False,
    # Non-participating workers drop only their own bad gradient.
    "clag": False,
    "censored_heavy_ball": False,
}


@pytest.mark.parametrize(
    ("name", "dtype", "steps"), cases(["neolithic", "qcmd_adagrad"], methods.METHODS)
)
def test_a_method_recovers(name, dtype, steps):
    tx = jaxcomp.skip_nonfinite(methods.build(name, rate=0.01))
    exact, round_of = EXACT.get(name, True), methods.ROUNDS.get(name, 1)
    check(tx, dtype, steps, (1, methods.SIZE), exact, round_of)


@pytest.mark.core("choco_sgd-float16-24")
@pytest.mark.parametrize(("name", "dtype", "steps"), cases(["choco_sgd", "noloco"], methods.GOSSIP))
def test_a_decentralised_method_recovers(name, dtype, steps):
    """Only the worker with a bad gradient leaves out a step; all go on mixing."""
    tx = methods.build(name, rate=0.01)
    grads = jnp.asarray(RNG.standard_normal((steps, WORKERS, 1, methods.SIZE)), dtype)
    run = runner(tx, grads)
    for kind, spoilt in bad_steps(grads).items():
        state, skipped, finite, moved = run(spoilt)
        assert_finite(state, kind)
        assert finite.all(), kind
        assert not moved.any(), kind  # The parameters stay where training began.
        if kind in ("nan", "inf") and name != "gradient_tracking":
            assert skipped[-1] == 1, kind
        # An estimate of the mean gradient leaves out the bad gradient, not the step.
        assert skipped[-1] <= 1, (kind, skipped)
        assert skipped[BAD - 1] == 0, kind

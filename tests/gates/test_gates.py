"""Rounds and participation: the draws of gates, and the methods with gates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.gated import ALL, GRADS, IDENTITY, LIKE, WORKERS, gather, own

import jaxcomp
from jaxcomp import testing
from jaxcomp.layout import batches
from jaxcomp.numerics import noise
from jaxcomp.testing import problems

GATES = [
    jaxcomp.gates.Always(),
    jaxcomp.gates.Every(3),
    jaxcomp.gates.Every(1),
    jaxcomp.gates.Phase(2, 9),
    jaxcomp.gates.Bernoulli(0.3),
    jaxcomp.gates.Bernoulli(1.0),
    jaxcomp.gates.SampledWorkers(2),
    jaxcomp.gates.Coin(0.4, rescaled=True),
    jaxcomp.gates.Censored(1.0),
]


# Draws of gates.


@pytest.mark.parametrize("gate", GATES, ids=repr)
def test_the_contract(gate):
    testing.check_gate(gate)


def test_times():
    def opens(gate, steps=12):
        def step(state, _):
            go, weight, state = gate.open(None, (), state, "data")
            assert weight is None
            return state, go

        return np.flatnonzero(jax.lax.scan(step, gate.init(()), None, length=steps)[1]).tolist()

    assert opens(jaxcomp.gates.Every(4)) == [3, 7, 11]
    assert opens(jaxcomp.gates.Every(4, offset=0)) == [0, 4, 8]
    assert opens(jaxcomp.gates.Every(4, offset=6)) == [6, 10]
    assert opens(jaxcomp.gates.Every(1)) == list(range(12))
    assert opens(jaxcomp.gates.Phase(5)) == list(range(5, 12))
    assert opens(jaxcomp.gates.Phase(0, 2)) == [0, 1]
    late = jaxcomp.gates.Phase(3).init(())._replace(gate_step=jnp.int32(2**31 - 1))
    go, _, state = jaxcomp.gates.Phase(3).open(None, (), late, "data")
    assert bool(go)
    assert int(state.gate_step) == 2**31 - 1
    assert not jaxcomp.gates.Every(1).closes
    assert not jaxcomp.gates.Phase(0).closes
    assert jaxcomp.gates.Every(1, offset=1).closes


def drawn(gate, steps=4000):
    """Participation, `[steps, workers]`, and the first bit of each worker's own noise."""

    def one(key, worker):
        go, weight, _ = gate.open(key, (), (), "data")
        own = batches.batch_key(key, 0, worker)
        seed = noise.seeds(own.own, own.first, 1)
        bit = noise.below(1, *seed, jnp.zeros((1,), jnp.uint32))[0]
        return go, jnp.float32(go) if weight is None else weight, bit

    keys = jax.vmap(noise.fold, in_axes=(None, 0))(noise.raw(3), jnp.arange(steps))
    everyone = jax.vmap(one, in_axes=(None, 0), axis_name="data")
    go, weight, bits = jax.jit(jax.vmap(everyone, in_axes=(0, None)))(keys, jnp.arange(WORKERS))
    assert (go == go[:, :1]).all()
    return np.asarray(go[:, 0]), np.asarray(weight), np.asarray(bits)


@pytest.mark.parametrize(
    ("gate", "rate"),
    [
        (jaxcomp.gates.Bernoulli(0.3), 0.3),
        (jaxcomp.gates.SampledWorkers(3), 3 / 8),
        (jaxcomp.gates.Coin(0.1), 0.1),
    ],
    ids=lambda x: repr(x),
)
def test_draws(gate, rate):
    go, weight, bits = drawn(gate)
    error = 6 / np.sqrt(len(go))
    np.testing.assert_allclose(weight.mean(0), rate, atol=error * np.sqrt(rate * (1 - rate)))
    np.testing.assert_array_equal(go, weight.any(1))
    # Independent of the noise of codecs and of the step before.
    centred = weight - rate
    assert np.abs((centred * (2 * bits - 1)).mean(0)).max() < error
    assert np.abs((centred[1:] * centred[:-1]).mean(0)).max() < error
    between = (centred[:, :, None] * centred[:, None]).mean(0)[~np.eye(WORKERS, dtype=bool)]
    if isinstance(gate, jaxcomp.gates.SampledWorkers):
        assert (weight.sum(1) == 3).all()
        expected = rate * 2 / 7 - rate**2
    else:
        expected = rate * (1 - rate) if isinstance(gate, jaxcomp.gates.Coin) else 0
    np.testing.assert_allclose(between, expected, atol=error)


def test_rare_and_sure_draws():
    def weight(gate):
        return np.asarray(
            jax.vmap(lambda _: gate.open(noise.raw(0), (), (), "data")[1], axis_name="data")(
                jnp.arange(WORKERS)
            )
        )

    assert weight(jaxcomp.gates.Bernoulli(1.0)).all()
    assert weight(jaxcomp.gates.SampledWorkers(8)).all()
    assert not weight(jaxcomp.gates.Bernoulli(1e-12)).any()
    assert bool(jaxcomp.gates.Coin(1.0).open(noise.raw(0), (), (), "data").go)


def test_an_adaptive_period_keeps_the_reference_of_its_warm_up():
    """The thresholds are parts of the mean of variance over rate of the first rounds."""
    rate, variances = 0.5, np.array([1.0, 3.0, 1.3, 1.4, 2.5, 2.7, 90.0, 1.3], np.float32)
    period = jaxcomp.gates.AdaptivePeriod(rate, warmup=2)
    after, state, steps = jax.jit(period.after), period.init(), []
    for variance in variances:
        state = after(state, 0, variance)
        steps.append(int(state.steps))
    reference = variances[:2].mean() / rate
    assert float(state.level) == reference
    later = variances[2:] / (rate * reference)
    changes = (later < 0.7).astype(int) - (later > 1.3)
    assert steps == [4, 4, *(4 + np.cumsum(changes))]


# Methods that are made of gates.


@pytest.fixture
def in_float64():
    with jax.enable_x64(True):
        yield


def everything(codec, feedback):
    return gather(jaxcomp.Policy(codec, **ALL), feedback)


def test_artemis_is_exact_where_sampling_alone_plateaus(in_float64):
    """Full gradients of workers that disagree at the solution, some of them in each step.

    A shift may have DIANA's whole step, `1/(1 + ω)`, however few workers participate.
    """
    problem = problems.quadratics()
    codec = jaxcomp.qsgd_inf(bits=4, bucket_size=64)

    def error(feedback, gate):
        mean = jaxcomp.compressed_mean(everything(codec, feedback), "workers", gate=gate)
        tx = optax.chain(mean, optax.sgd(0.2 / problem.smoothness))
        found = problems.descend(tx, problem, 1500)
        assert found.alike
        return found.error[-1]

    longest = jaxcomp.Shift(1 / (1 + codec.variance_bound(64)))
    assert error(longest, jaxcomp.gates.Bernoulli(0.3)) < 1e-22
    assert error(jaxcomp.NoFeedback(), jaxcomp.gates.SampledWorkers(4)) > 1e-4


def test_censored_heavy_ball(in_float64):
    """Like heavy ball with fewer messages; a smooth worker never sends twice in a row."""
    problem = problems.quadratics()
    rate = 0.5 / problem.smoothness
    limit = 0.1 / rate**2
    start = {"x": jnp.zeros((1, 50))}
    curvature = np.einsum("nmd,nme->nde", problem.matrices, problem.matrices)
    smooth = np.linalg.eigvalsh(curvature)[:, -1] + problem.ridge

    def trained(gate, steps=60):
        reducer = everything(IDENTITY, jaxcomp.Shift())
        tx = optax.chain(
            jaxcomp.compressed_mean(reducer, "data", gate=gate), optax.sgd(rate, momentum=0.4)
        )

        def one(params, matrix, target, state):
            residual = matrix @ params["x"][0] - target
            grads = {"x": (matrix.T @ residual + problem.ridge * params["x"][0])[None]}
            return tx.update(grads, state, params)

        def step(carry, _):
            params, state = carry
            updates, after = jax.vmap(one, (None, 0, 0, 0), axis_name="data")(
                params, problem.matrices, problem.targets, state
            )
            before, now = (s[0].memory.feedback.own.tree[0] for s in (state, after))
            params = jax.tree.map(lambda p, u: p + u[0], params, updates)
            sent = jnp.any(now != before, axis=(1, 2, 3))
            return (params, after), (problem.error(params["x"][0]), sent)

        state = jax.vmap(lambda _: tx.init(start), axis_name="data")(jnp.arange(8))
        (_, state), (error, sent) = jax.jit(
            lambda s: jax.lax.scan(step, (start, s), None, length=steps)
        )(state)
        return np.asarray(error), np.asarray(sent), state[0].gate

    def reach(error):
        return int(np.argmax(error < 1e-16))

    plain, _, _ = trained(None)
    open_, sent, _ = trained(jaxcomp.gates.Censored(0.0))
    assert sent[0].all()
    np.testing.assert_allclose(open_, plain, rtol=1e-9, atol=1e-12)
    error, sent, gate = trained(jaxcomp.gates.Censored(limit))
    assert int(gate.messages[0]) == sent.sum()
    assert int(gate.rounds[0]) == sent.any(1).sum()
    assert (smooth**2 <= limit).any()
    until = reach(error)
    assert 0 < until <= 1.2 * reach(plain)
    assert sent[:until].sum() < 0.85 * WORKERS * reach(plain)
    twice = sent[1:until] & sent[: until - 1]
    assert not twice[:, smooth**2 <= limit].any()


def test_censoring_at_any_scale():
    """Norms whose squares leave the range of 32-bit floats; and NaN is sent, so that it shows."""
    gate = jaxcomp.gates.Censored(4.0)

    def sends(size, step):
        known = gate.init(LIKE)._replace(gate_known=jnp.asarray(True))
        tree = {"w": jnp.full((8, 3, 3), 1.0) * jnp.asarray(size).reshape(-1, 1, 1)}
        params = jax.tree.map(lambda x: x.at[0].set(step), LIKE | {"w": jnp.zeros(1)})
        known = known._replace(gate_params=jax.tree.map(jnp.zeros_like, params))
        params["b"] = jnp.zeros_like(params["b"])
        opened = jax.vmap(lambda t: gate.open(None, t, known, "data", params), axis_name="data")(
            tree
        )
        return np.asarray(opened.weight).tolist()

    for scale in (1e-30, 1.0, 1e25, 1e37):
        sizes = np.array([0, 0.5, 0.66, 0.67, 1, 2, np.inf, np.nan]) * scale
        assert sends(sizes, scale) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_wrong_settings_say_so():
    for make, said in (
        (lambda: jaxcomp.gates.Every(0), "`k` must be from 1 to"),
        (lambda: jaxcomp.gates.Every(2, offset=-1), "`offset` must be from 0"),
        (lambda: jaxcomp.gates.Phase(3, 3), "`stop` must be from 4"),
        (lambda: jaxcomp.gates.Bernoulli(0.0), "`p` must be a positive number, got 0"),
        (lambda: jaxcomp.gates.Coin(1.5), "`p` must be a number from 0.0 to 1.0, got 1.5"),
        (lambda: jaxcomp.gates.Coin(0.5, rescaled=2), "`rescaled` must be one of"),
        (lambda: jaxcomp.gates.SampledWorkers(0), "`r` must be at least 1, got 0"),
        (lambda: jaxcomp.gates.Censored(-1.0), "`threshold` must be a number at least 0"),
    ):
        with pytest.raises(ValueError, match=said):
            make()
    residual = gather(jaxcomp.sign(), jaxcomp.Residual())
    with pytest.raises(ValueError, match="`gate` must be an instance of a gate"):
        jaxcomp.compressed_mean(residual, "data", gate=jaxcomp.gates.Every)
    with pytest.raises(ValueError, match=r"got Residual\(.*\): use Link\(codec, Shift\(\)\)"):
        jaxcomp.compressed_mean(residual, "data", gate=jaxcomp.gates.Censored(1.0))
    with pytest.warns(UserWarning, match="loses the gradients of closed steps"):
        jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), "data", gate=jaxcomp.gates.Every(2))
    link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Shift())
    two_shot = jaxcomp.TwoShot(link)
    with pytest.raises(ValueError, match=r"jaxcomp.Gather\(link\), or a downlink with a"):
        jaxcomp.compressed_mean(two_shot, "data", gate=jaxcomp.gates.Every(2))
    jaxcomp.compressed_mean(
        two_shot, "data", gate=jaxcomp.gates.SampledWorkers(2)
    )  # Which never closes.
    phases = jaxcomp.ReducerSchedule(((0, two_shot), (1, two_shot)))
    with pytest.raises(ValueError, match="phases that give every device the whole mean"):
        jaxcomp.compressed_mean(phases, "data", gate=jaxcomp.gates.Every(2))


def test_wrong_use_says_so():
    def update(codec, feedback, gate, params=LIKE):
        tx = jaxcomp.compressed_mean(gather(codec, feedback), "data", gate=gate)
        grads = own(GRADS)
        state = jax.vmap(lambda _: tx.init(LIKE), axis_name="data")(jnp.arange(WORKERS))
        jax.eval_shape(
            jax.vmap(lambda g, s: tx.update(g, s, params), axis_name="data"), grads, state
        )

    with pytest.raises(ValueError, match="`r` must be at most the number of workers, 8, got 9"):
        update(IDENTITY, jaxcomp.NoFeedback(), jaxcomp.gates.SampledWorkers(9))
    with pytest.raises(ValueError, match=r"tx.update\(grads, state, params\)"):
        update(IDENTITY, jaxcomp.Shift(), jaxcomp.gates.Censored(1.0), None)

"""Predictors: by hand, alike on server and clients after losses, and better than no prediction."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated
from jaxcomp.codecs import L2, BestOf
from jaxcomp.federated import (
    AdamStep,
    MeanStep,
    Predictors,
    Regression,
    Unchanged,
    Uplink,
    server,
)

RNG = np.random.default_rng(0)
SHAPE = (24, 32)


def path(rounds):
    """Parameters that move steadily, with noise."""
    drift = RNG.normal(size=SHAPE) * 0.01
    steps = drift + 0.002 * RNG.normal(size=(rounds, *SHAPE))
    return np.cumsum(np.concatenate([RNG.normal(size=(1, *SHAPE)), -steps]), axis=0)


def mean_of_three(seen):
    return np.zeros(SHAPE) if len(seen) < 4 else (seen[-4] - seen[-1]) / 3


def adam(seen):
    mean, square = np.zeros(SHAPE), np.zeros(SHAPE)
    for old, new in itertools.pairwise(seen):
        mean = 0.8 * mean + 0.2 * (old - new)
        square = 0.9 * square + 0.1 * (old - new) ** 2
    return 1e-3 * mean / (np.sqrt(square) + 1e-4)


def regression(seen):
    """AdamW of two groups, written out."""
    a, b = np.full(SHAPE, 0.99), np.zeros(SHAPE)
    moments = {name: [np.zeros(SHAPE), np.zeros(SHAPE)] for name in "ab"}
    for number, (old, new) in enumerate(itertools.pairwise(seen), start=1):
        error = 2 * (b + a * old - new)
        for name, gradient, rate in (("a", error * old, 1e-3), ("b", error, 1e-4)):
            first, second = moments[name]
            first[:] = 0.9 * first + 0.1 * gradient
            second[:] = 0.999 * second + 0.001 * gradient**2
            direction = first / (1 - 0.9**number)
            direction = direction / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
            whole = a if name == "a" else b
            whole -= rate * (direction + 1e-3 * whole)
    return seen[-1] - (b + a * seen[-1])


@pytest.mark.parametrize(
    ("predictor", "reference"),
    [
        (Unchanged(), lambda seen: np.zeros(SHAPE)),
        (MeanStep(), mean_of_three),
        (AdamStep(), adam),
        (Regression(), regression),
    ],
    ids=["unchanged", "mean", "adam", "regression"],
)
def test_a_predictor_is_its_formula(predictor, reference):
    seen = path(6)
    params = {"w": jnp.float32(seen[0])}
    state = predictor.init(params)
    for number in range(6):
        guess = predictor.predict(state, params)["w"]
        np.testing.assert_allclose(guess, reference(seen[: number + 1]), rtol=2e-3, atol=2e-6)
        after = {"w": jnp.float32(seen[number + 1])}
        state, params = predictor.learn(state, params, after), after


CLIENTS = 5
PARAMS = {"w": path(1)[0].astype(np.float32), "v": np.zeros(70, np.float32)}
CODEC = jaxcomp.Policy(BestOf(rate=1e-3), min_size=64, min_ndim=0)
METHOD = federated.Method(
    federated.LocalSteps(lambda p, x: jnp.mean((p["w"] - x) ** 2), optax.sgd(1.0)),
    Uplink(CODEC, Predictors()),
)


@jax.jit
def client(key, number, update, shared, params):
    """A client's message, and what it believes the server to read."""
    memory = federated.uplink.init(METHOD.uplink, PARAMS)
    plan = METHOD.uplink.plan(PARAMS)
    made = federated.uplink.message(
        METHOD.uplink, plan, key, number, 1.0, update, memory, shared, params
    )
    guesses = METHOD.uplink.side.at_client(shared, (), params)
    return made.payload, federated.uplink.read(plan, key, number, made.payload, guesses)


@jax.jit
def serve(key, total, number, weight, payload, state):
    guesses = METHOD.uplink.side.at_server(state.shared, (), state.params)
    plan = METHOD.uplink.plan(PARAMS)
    return server.add(METHOD, plan, key, total, number, weight, payload, guesses)


@pytest.mark.full
def test_clients_that_follow_the_parameters_stay_in_step_through_losses():
    """Each keeps predictors of its own, and reads of its messages what the server reads."""
    state = server.init(METHOD, PARAMS, 8)
    side = METHOD.uplink.side
    learn = jax.jit(side.learn)
    own = [side.shared(state.params) for _ in range(CLIENTS)]
    modes, drift = set(), {n: RNG.normal(size=np.shape(x)) * 0.01 for n, x in PARAMS.items()}
    for number in range(8):
        key = server.round_key(jnp.array([1, 2], jnp.uint32), number)
        total = server.nothing(METHOD, PARAMS)
        arrives = RNG.random(CLIENTS) < (0.0 if number == 3 else 0.6)
        for who in range(CLIENTS):
            update = jax.tree.map(
                lambda d: jnp.asarray(d + 0.001 * RNG.normal(size=d.shape), jnp.float32), drift
            )
            payload, believed = client(key, who, update, own[who], state.params)
            modes.update(int(m) for part in payload.batches for m in part.mode)
            total, accepted, read = serve(
                key, total, who, jnp.float32(arrives[who]), payload, state
            )
            assert bool(accepted) == arrives[who]
            jax.tree.map(np.testing.assert_array_equal, believed, read)
        before = state.params
        state, _ = server.step(
            METHOD, key, state, total, server.Weights(jnp.float32(CLIENTS), jnp.float32(CLIENTS))
        )
        if arrives.any():  # Else the server sends nothing new.
            own = [learn(mine, before, state.params) for mine in own]
        for mine in own:
            jax.tree.map(np.testing.assert_array_equal, mine, state.shared)
    assert len({mode // 2 for mode in modes}) >= 3


@pytest.mark.full
def test_a_simulation_keeps_the_predictors_of_its_parameters():
    data = RNG.normal(size=(CLIENTS, 2, *SHAPE)).astype(np.float32)
    settings = {"sampling": federated.Exactly(3)}
    method = federated.Method(METHOD.work, METHOD.up, **settings)
    sim = federated.Simulation(
        method,
        PARAMS,
        CLIENTS,
        lambda numbers, _: data[numbers],
        chunk=2,
        faults=federated.Faults(lost=0.5),
        messages=1_000,
    )
    side, mine, moved = method.uplink.side, None, 0
    for _ in range(6):
        before = sim.params
        mine = side.shared(before) if mine is None else mine
        report = sim.round()
        assert 0 <= report.up <= 3 * 2 * jaxcomp.wire_bytes(CODEC, PARAMS)
        if report.accepted:
            mine, moved = jax.jit(side.learn)(mine, before, sim.params), moved + 1
        jax.tree.map(np.testing.assert_array_equal, mine, sim.state.shared)
    assert 2 <= moved < 6 or report.accepted


@pytest.mark.full
def test_predictions_lower_the_error_where_updates_are_steady():
    """Not the number of symbols: that of a residual does not depend on its size."""
    target = np.full(SHAPE, 100, np.float32)
    work = federated.LocalSteps(lambda p, x: jnp.sum(jnp.abs(p["w"] - x)), optax.sgd(0.01))
    # In short buckets: of long ones, the noise of three steps is larger than a step.
    codec = BestOf(rate=0.0, scales=(L2(),), bucket_size=16)
    codec = jaxcomp.Policy(codec, min_size=64)
    batches = lambda numbers, _: np.broadcast_to(target, (len(numbers), 2, *SHAPE))  # noqa: E731

    def error(bank, rounds=16):
        method = federated.Method(work, Uplink(codec, Predictors(bank)))
        sim = federated.Simulation(method, {"w": PARAMS["w"]}, CLIENTS, batches)
        sim.run(rounds)
        return float(np.sqrt(np.mean((sim.params["w"] - PARAMS["w"] - 0.02 * rounds) ** 2)))

    assert error((Unchanged(), MeanStep())) < 0.8 * error((Unchanged(),))


def test_wrong_use_of_predictors_names_the_argument():
    with pytest.raises(ValueError, match="`bank` must be a tuple of predictors"):
        Predictors(())
    with pytest.raises(ValueError, match="`bank` must be an instance of a predictor"):
        Predictors((Unchanged,))
    with pytest.raises(ValueError, match="`rates` must be two learning rates"):
        Regression(rates=0.1)
    with pytest.raises(ValueError, match="`b1` must be below 1"):
        AdamStep(b1=1.0)
    with pytest.raises(ValueError, match="`number` must be at least 1"):
        MeanStep(0)
    with pytest.raises(ValueError, match="`rate` must be a number at least"):
        federated.predictive_coding(lambda p, x: 0.0, rate=-1.0)

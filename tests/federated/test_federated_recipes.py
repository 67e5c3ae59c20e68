"""Federated methods by name: one round of each equals the same round written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated
from jaxcomp.federated import server

CLIENTS, STEPS, RATE = 6, 3, 0.05
ROWS, COLUMNS = 48, 32


def loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@pytest.fixture(scope="module")
def problem():
    """The first parameters, and the batches of every client."""
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(0, 0.3, (ROWS, COLUMNS)), "b": rng.normal(0, 0.3, COLUMNS)}
    x = rng.normal(size=(CLIENTS, STEPS, 5, ROWS))
    y = rng.normal(size=(CLIENTS, STEPS, 5, COLUMNS))
    return jax.tree.map(lambda a: a.astype(np.float32), (params, (x, y)))


def simulated(method, problem, rounds=1, **settings):
    params, data = problem
    batches = lambda numbers, round: jax.tree.map(lambda a: a[numbers], data)  # noqa: E731
    sim = federated.Simulation(method, params, CLIENTS, batches, chunk=3, **settings)
    return sim, sim.run(rounds)


def by_hand(params, data, client, steps=STEPS):
    """`φ − θ` after a client's steps of SGD, in float64."""
    w, b = (params[name].astype(np.float64) for name in ("w", "b"))
    start = w, b
    for step in range(steps):
        x, y = (part[client, step].astype(np.float64) for part in data)
        error = 2 * (x @ w + b - y) / y.size
        w, b = w - RATE * x.T @ error, b - RATE * error.sum(0)
    return {"w": start[0] - w, "b": start[1] - b}


def cohort(method, number=0):
    key = server.round_key(jnp.zeros(2, jnp.uint32), number)
    return method.sampling.cohort(key, CLIENTS), key


def mean_of(trees, weights=None):
    return jax.tree.map(lambda *xs: np.average(np.stack(xs), axis=0, weights=weights), *trees)


def assert_close(got, want, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, want)


@pytest.mark.core("2")
@pytest.mark.parametrize("participants", [None, 2])
def test_fedavg_is_the_weighted_mean_of_the_participants(problem, participants):
    params, data = problem
    method = federated.fedavg(loss, learning_rate=RATE, participants=participants)
    weights = np.arange(1.0, CLIENTS + 1)
    sim, (report,) = simulated(method, problem, weights=weights)
    numbers, _ = cohort(method)
    assert report.accepted == len(numbers) == (participants or CLIENTS)
    moved = mean_of([by_hand(params, data, i) for i in numbers], weights[numbers])
    assert_close(sim.params, jax.tree.map(np.subtract, params, moved))
    assert report.up == len(numbers) * 4 * (ROWS + 1) * COLUMNS


@pytest.mark.full
def test_fedpaq_averages_the_quantized_differences(problem):
    params, data = problem
    codec = jaxcomp.qsgd(bits=3)
    method = federated.fedpaq(codec, loss, learning_rate=RATE, participants=4)
    sim, (report,) = simulated(method, problem)
    numbers, key = cohort(method)
    sent = [
        jaxcomp.roundtrip(
            method.uplink.policy,
            key,
            jax.tree.map(jnp.float32, by_hand(params, data, i)),
            worker=i,
        )
        for i in numbers
    ]
    want = jax.tree.map(np.subtract, params, mean_of(sent))
    off = np.abs(np.asarray(sim.params["w"]) - want["w"])
    # The last bits of a difference decide a few of the roundings.
    assert np.mean(off > 1e-6) < 0.01
    np.testing.assert_allclose(sim.params["b"], want["b"], atol=2e-6)
    assert report.up == 4 * jaxcomp.wire_bytes(method.uplink.policy, params)


def test_genqsgd_quantizes_both_ways_after_each_client_s_own_steps(problem):
    params, data = problem
    up, down = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=6)
    method = federated.genqsgd(up, loss, learning_rate=RATE, down=down)
    counts = np.array([3, 1, 2, 3, 1, 0])
    sim, _ = simulated(method, problem, steps=lambda numbers, _: counts[numbers])
    moved = mean_of([by_hand(params, data, i, counts[i]) for i in range(CLIENTS)])
    off = np.asarray(sim.params["w"]) - (params["w"] - moved["w"])
    step = np.abs(moved["w"]).max() / (2**5 - 1)
    assert 0 < np.abs(off).max() < 1.2 * step
    assert abs(off.mean()) < 6 * step / np.sqrt(off.size)
    np.testing.assert_allclose(sim.params["b"], params["b"] - moved["b"], atol=2e-6)


def ternary(x, fraction):
    """The largest elements of a matrix as their mean magnitude."""
    k = int(np.ceil(fraction * x.size))
    places = np.argsort(-np.abs(x), axis=None, kind="stable")[:k]
    found = np.zeros(x.size)
    found[places] = np.sign(x.reshape(-1)[places]) * np.abs(x.reshape(-1)[places]).mean()
    return found.reshape(x.shape)


@pytest.mark.full
def test_stc_sends_one_magnitude_and_keeps_the_rest_on_both_sides(problem):
    params, data = problem
    fraction = 0.02
    method = federated.stc(loss, learning_rate=RATE, fraction=fraction)
    sim, reports = simulated(method, problem, rounds=3)
    now = {name: params[name].astype(np.float64) for name in params}
    kept, server_kept = np.zeros((CLIENTS, ROWS, COLUMNS)), np.zeros((ROWS, COLUMNS))
    for _ in range(3):
        moved = [by_hand(now, data, i) for i in range(CLIENTS)]
        given = np.stack([one["w"] for one in moved]) + kept
        sent = np.stack([ternary(x, fraction) for x in given])
        kept = given - sent
        update = sent.mean(0) + server_kept
        down = ternary(update, fraction)
        server_kept = update - down
        now = {"w": now["w"] - down, "b": now["b"] - mean_of(moved)["b"]}
    assert_close(sim.params, now, atol=1e-5)
    held = sim.table.read(np.arange(CLIENTS)).memory.feedback
    np.testing.assert_allclose(
        np.asarray(jax.tree.leaves(held)[0]).reshape(kept.shape), kept, atol=1e-5
    )
    # A sign, a position and no value: far below the 4 bytes of an element that was sent.
    each = (reports[0].up / CLIENTS - 4 * COLUMNS) / (fraction * ROWS * COLUMNS)
    assert each < 1.7


@pytest.mark.full
def test_the_methods_learn(problem):
    latest = {}
    for name, method in {
        "fedavg": federated.fedavg(loss, learning_rate=RATE),
        "fedpaq": federated.fedpaq(jaxcomp.qsgd_inf(bits=4), loss, learning_rate=RATE),
        "stc": federated.stc(loss, learning_rate=RATE, fraction=0.1),
    }.items():
        _, reports = simulated(method, problem, rounds=25)
        latest[name] = reports[-1].loss / reports[0].loss
    assert latest["fedavg"] < 0.9
    assert latest["fedpaq"] < 1.01 * latest["fedavg"]
    assert latest["stc"] < 1.1 * latest["fedavg"]


def test_wrong_use_of_federated_methods_names_the_argument():
    with pytest.raises(ValueError, match="`codec` must be unbiased"):
        federated.fedpaq(jaxcomp.top_k(0.1), loss, learning_rate=RATE)
    with pytest.raises(ValueError, match="`down` must be unbiased"):
        federated.genqsgd(jaxcomp.qsgd(), loss, learning_rate=RATE, down=jaxcomp.sign())
    with pytest.raises(ValueError, match="`fraction` must be a number"):
        federated.stc(loss, learning_rate=RATE, fraction=0)
    with pytest.raises(ValueError, match="`r` must be at least 1, got 0"):
        federated.fedavg(loss, learning_rate=RATE, participants=0)
    with pytest.raises(ValueError, match="`loss` must be an instance of a latent"):
        federated.fedvote(loss, optimizer=optax.sgd(0.1))

"""Methods by their names over Flower: the bits of the simulation, and a buffer of messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import named
from helpers.nodes import (
    AtOnce,
    Grid,
    SlowGrid,
    context_of,
    identity,  # noqa: F401
    sha,
)

from jaxcomp import federated

pytest.importorskip("flwr")

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import closing
from jaxcomp_site import polling


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(polling, "SOONEST", 0.01)
    monkeypatch.setattr(closing, "Thread", AtOnce)


def over_flower(name, method):
    """The strategy after the rounds; clients of FedBuff are late as in the simulation."""
    params = named.params_of(name, named.start())

    def batches(context, number, round):
        return jax.tree.map(lambda x: x[0], named.data([number], round))

    late = name == "fedbuff"
    faults = federated.Faults() if late else named.faults_of(name)

    def app():
        return flower.client_app(method, params, batches, faults=faults)

    def due(round, node):
        return round + named.delays(np.array([node - 100]), round)[0]

    apps = {100 + client: app for client in range(named.CLIENTS)}
    grid = SlowGrid(apps, due) if late else Grid(apps)
    quorum = flower.Quorum(messages=named.CLIENTS, deadline=0.2, oldest=2) if late else None
    strategy = flower.CompressedFedAvg(
        method,
        params,
        named.CLIENTS,
        weights=named.WEIGHTS,
        quorum=quorum,
        min_available_nodes=1 if late else named.CLIENTS,
    )
    strategy.start(grid, num_rounds=named.ROUNDS)
    return strategy, grid


@pytest.mark.core("scaffold", "fedbuff")
@pytest.mark.parametrize("name", named.NAMES)
def test_compressed_both_ways_it_has_the_bits_of_the_simulation(name):
    method = named.method(name, **named.CODECS)
    strategy, _ = over_flower(name, method)
    sim = named.simulated(name, given=method, messages=1_000)
    assert sha(strategy.params) == sha(sim.params)
    assert sum(report.accepted for report in strategy.reports) > named.ROUNDS
    assert (strategy.up, strategy.down) == (sim.ledger.up, sim.ledger.down)


@pytest.mark.full
@pytest.mark.parametrize("name", named.NAMES)
def test_dense_over_flower_it_is_the_method_in_float64(name):
    strategy, _ = over_flower(name, named.method(name))
    got = strategy.params.params if name == "scaffold" else strategy.params
    for key, want in named.reference(name).items():
        np.testing.assert_allclose(got[key], want, rtol=0, atol=1e-6)


FEATURES = 96


def given(number, round):
    return np.random.default_rng([number, round]).integers(-9, 10, (2, FEATURES))


def test_a_buffer_takes_three_messages_of_any_age_and_divides_by_their_number():
    """Five clients that answer at once: two wait for the next buffer, and count for less."""

    def loss(w, x):
        return -jnp.sum(w * x)

    method = federated.fedbuff(None, loss, learning_rate=1.0)
    zero = np.zeros(FEATURES, np.float32)

    def batches(context, number, round):
        return given(number, round).astype(np.float32)

    grid = SlowGrid(
        {100 + node: lambda: flower.client_app(method, zero, batches) for node in range(5)},
        lambda round, node: round,
    )
    quorum = flower.Quorum(messages=3, deadline=60.0, buffer=True)
    strategy = flower.CompressedFedAvg(method, zero, 5, quorum=quorum, min_available_nodes=1)
    strategy.start(grid, num_rounds=3)
    assert [report.accepted for report in strategy.reports] == [3, 3, 3]
    buffers = [[(0, 0), (1, 0), (2, 0)], [(3, 0), (4, 0), (0, 1)], [(1, 1), (2, 1), (0, 2)]]
    want = 0
    for number, messages in enumerate(buffers):
        sums = [given(n, began).sum(0) * (1 + number - began) ** -0.5 for n, began in messages]
        want = want + sum(sums) / 3
    np.testing.assert_allclose(strategy.params, want, rtol=1e-5, atol=1e-5)
    assert dict(strategy.late) == {1: 4}
    asked = [{node - 100 for round, node in grid.told if round == one} for one in range(3)]
    assert asked == [{0, 1, 2, 3, 4}, {0, 1, 2}, {0, 3, 4}]  # Who waits is not asked again.


def test_a_client_whose_variate_is_gone_is_refused():
    method = named.method("scaffold", participants=None)
    strategy, grid = over_flower("scaffold", method)
    grid.contexts[102] = context_of(102)
    strategy.start(grid, num_rounds=2)
    assert strategy.refused["memory lost"] >= 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: flower.Quorum(3, 1.0).check(named.method("scaffold")),
            "`oldest` must be 0 with control variates",
        ),
        (lambda: flower.Quorum(3, 1.0, oldest=0, buffer=True), "`oldest` must be positive"),
        (lambda: flower.Quorum(3, 1.0, buffer=1), "`buffer` must be True or False"),
        (
            lambda: flower.compress_mod(
                named.method("scaffold"), federated.add_control(named.start())
            ),
            "`method` must have no control variates behind compress_mod",
        ),
        (
            lambda: flower.CompressedFedAvg(
                named.method("fedbuff"), named.start(), 5, weighted_by_key="num-examples"
            ),
            '`weighted_by_key` must be None with a mean over "messages"',
        ),
    ],
)
def test_wrong_settings_of_named_methods(make, says):
    with pytest.raises(ValueError, match=says):
        make()

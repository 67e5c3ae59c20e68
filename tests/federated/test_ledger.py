"""What the ledger of a simulation counts, beside what a server sends."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import clients as world

import jaxcomp
from jaxcomp import federated


@pytest.mark.full
def test_a_round_that_moved_nothing_sends_nothing_to_those_who_follow():
    """Where no message arrives, clients that were there before catch up for no bytes."""
    sim = world.few(faults=federated.Faults(lost=0.999))
    reports = sim.run(6)
    whole = sum(leaf.nbytes for leaf in map(np.asarray, sim.params.values()))
    assert [report.accepted for report in reports] == [0] * 6
    assert sim.ledger.down == world.FEW * whole  # Each of them once, when it is first asked.


@pytest.mark.full
def test_a_broken_and_an_idle_client_are_not_in_the_loss_and_cost_no_bytes():
    """One client's data are NaN, another takes no step."""

    def batches(numbers, round):
        x, y = (part.copy() for part in world.batches(numbers, round))
        x[numbers == 0] = np.nan
        return x, y

    method = dataclasses.replace(world.METHOD, sampling=federated.Everyone())
    sim = federated.Simulation(
        method,
        world.params(),
        world.CLIENTS,
        batches,
        steps=lambda numbers, round: np.where(numbers == 1, 0, world.STEPS),
        chunk=8,
    )
    report = sim.round()
    assert report.accepted == world.CLIENTS - 1
    assert report.up == (world.CLIENTS - 1) * jaxcomp.wire_bytes(world.POLICY, sim.params)
    assert 0.5 < report.loss < 5


@pytest.mark.full
def test_old_parameters_compile_once():
    """Rounds with few past parameters, and with all, take one program."""
    sim = world.few(faults=federated.Faults(old=0.5, longest=3), messages=0)
    sim.run(5)
    assert sim._program._compiled(0)._cache_size() == 1


@pytest.mark.full
def test_predictors_are_sent_to_new_clients_alone():
    """Eleven numbers a parameter, which others compute from the parameters of each round."""
    policy = jaxcomp.Policy(jaxcomp.codecs.BestOf(rate=0.1), min_size=64, min_ndim=0)
    method = federated.Method(world.WORK, federated.Uplink(policy, federated.Predictors()))
    sim = federated.Simulation(method, world.params(), 3, world.batches, chunk=3)
    reports = sim.run(3)
    model = sum(x.nbytes for x in jax.tree.leaves(sim.params))
    whole = model + sum(x.nbytes for x in jax.tree.leaves(sim.state.shared))
    assert 11 * model < whole < 13 * model
    assert [report.down for report in reports] == [3 * whole, 3 * model, 3 * model]

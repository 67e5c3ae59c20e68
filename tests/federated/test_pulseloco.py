"""PULSELoCo: DiLoCo where all is visible, and beyond it no update lost and no message refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated
from jaxcomp.adapters import flower

SITES, STEPS, SHAPE = 3, 2, (40, 64)


def loss(params, batch):
    """Its gradient is the batch, whatever the parameters are."""
    return sum(jnp.sum(w * batch) for w in params)


def batches(times):
    """Integers without a zero, as many units as `times`."""

    def given(numbers, round):
        draws = [np.random.default_rng([number, round]) for number in numbers]
        units = [d.integers(1, 4, (STEPS, *SHAPE)) * d.choice([-1, 1], SHAPE) for d in draws]
        return np.stack(units).astype(np.float32) * np.float32(times)

    return given


FIRST = [np.linspace(lowest, 1, 2560, dtype=np.float32).reshape(SHAPE) for lowest in (-1, 0.5)]
OUTER = {"inner": optax.sgd(1.0), "learning_rate": 1.0, "momentum": 0.0}


def simulation(method, times, **settings):
    return federated.Simulation(method, FIRST, SITES, batches(times), key=3, **settings)


@pytest.mark.parametrize("fragments", [1, pytest.param(2, marks=pytest.mark.full)])
def test_it_is_diloco_where_everything_is_visible(fragments):
    """Sites move every parameter by one or more in each round, from at most 30."""
    pulse = federated.pulseloco(jaxcomp.visible(1.0), loss, inner=optax.sgd(1.0))
    dense = federated.diloco(None, loss, inner=optax.sgd(1.0))
    found = []
    for method in (pulse, dense):
        sim = simulation(dataclasses.replace(method, fragments=fragments), 1.0)
        sim.run(3)
        found.append(sim.params)
        assert np.abs(np.asarray(sim.params)).max() < 64
    jax.tree.map(np.testing.assert_array_equal, *found)
    moved = np.abs(np.asarray(found[0]) - np.asarray(FIRST))
    assert (moved > 0.1).mean() > 0.9


@pytest.mark.full
def test_no_update_is_lost_however_few_are_visible():
    """The server's sum and all residuals are what the sites moved: in units that add exactly."""
    unit, rounds = 2.0**-13, 6
    method = federated.pulseloco(jaxcomp.visible(0.2), loss, **OUTER)
    sim = simulation(method, unit, faults=federated.Faults(lost=0.3), messages=SITES)
    gone, reports = np.zeros((2, *SHAPE)), []
    for _ in range(rounds):
        before = np.asarray(sim.params, np.float64)
        reports += sim.run(1)
        gone += reports[-1].accepted * (before - np.asarray(sim.params, np.float64))
    assert 0 < sum(report.accepted for report in reports) < rounds * SITES
    [rows] = sim.table.read(np.arange(SITES)).memory.feedback.residual
    kept = np.asarray(rows, np.float64).reshape(SITES, 2, *SHAPE).sum(0)
    moved = sum(batches(unit)(range(SITES), number).sum((0, 1)) for number in range(rounds))
    np.testing.assert_array_equal(
        np.round((gone + kept) / unit), np.broadcast_to(moved / unit, kept.shape)
    )
    assert 0.3 < np.mean(kept != 0) < 0.99
    assert sum(report.up for report in reports) < rounds * SITES * 4 * 5120 / 2


def test_late_messages_are_welcome():
    """A message is decoded from itself, whichever parameters its site began from."""
    quorum = flower.Quorum(messages=2, deadline=1.0, oldest=4)
    quorum.check(federated.pulseloco(jaxcomp.visible(), loss))
    guessed = federated.Uplink(jaxcomp.wyner_ziv(), federated.LastMean())
    work = federated.LocalSteps(loss, optax.sgd(1.0))
    with pytest.raises(ValueError, match="`oldest` must be 0 with LastMean"):
        quorum.check(federated.Method(work, guessed))

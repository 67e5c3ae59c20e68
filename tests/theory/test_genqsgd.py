"""The planner of GenQSGD: the published table, its baselines, and classes that differ."""

import dataclasses
import itertools

import pytest

from jaxcomp.planning import Loss, Machine, plan_genqsgd
from jaxcomp.theory.genqsgd import Problem

LOSS = Loss(100_352, gap=2.5, gradient=33.63, smoothness=0.084, noise=33.18, learning_rate=0.01)
SERVER = Machine(1, cycles=100, frequency=3e9, power=20, rate=7.5e7, levels=2**32)


def planned(bits, seconds=1e5, **settings):
    fast = Machine(5, cycles=1e8, frequency=2e10 / 11, power=1.5, rate=5e6, levels=2**bits)
    slow = dataclasses.replace(fast, frequency=2e9 / 11)
    return plan_genqsgd(LOSS, [fast, slow], SERVER, error=0.25, seconds=seconds, **settings)


@pytest.mark.parametrize(
    ("bits", "settings", "energy", "chosen"),
    [
        (14, {}, 6738.55, (835, (4, 4), 2)),
        (32, {}, 11029.55, (744, (4, 4), 3)),
        (10, {}, 62539.07, None),
        (14, {"steps": 1}, 14868.8, None),
        (32, {"steps": 1}, 27175.4, None),
        (14, {"batch": 1}, 8128.6, None),
        (32, {"batch": 1}, 14280.5, None),
        (32, {"steps": 1, "batch": 1}, 36132.3, (3240, (1, 1), 1)),
    ],
)
def test_the_published_table(bits, settings, energy, chosen):
    """The method, mini-batch SGD (one step), and parallel-restart SGD (batches of one)."""
    plan = planned(bits, **settings)
    assert plan.energy == pytest.approx(energy, abs=0.06)
    assert plan.error <= 0.25
    assert chosen is None or (plan.rounds, plan.steps, plan.batch) == chosen


def test_eight_bits_meet_no_plan():
    assert planned(8) is None
    assert planned(8, per_class=True) is None


def test_classes_take_different_numbers_of_steps_where_time_is_short():
    """Slow workers take fewer; the result is the best of all that were counted out."""
    plan, even = planned(14, 3500, per_class=True), planned(14, 3500)
    assert plan.steps == (4, 3)
    assert plan.seconds <= 3500
    assert plan.energy < 0.95 * even.energy
    fast = Machine(5, cycles=1e8, frequency=2e10 / 11, power=1.5, rate=5e6, levels=2**14)
    slow = dataclasses.replace(fast, frequency=2e9 / 11)
    best = min(
        found.energy
        for a, b, batch in itertools.product(range(1, 9), range(1, 9), range(1, 9))
        if (found := _given(fast, slow, (a, b), batch, 3500))
    )
    assert plan.energy == pytest.approx(best, rel=1e-12)


def _given(fast, slow, steps, batch, seconds):
    return Problem(LOSS, (fast, slow), SERVER, 0.25, seconds).plan(steps, batch)


def test_with_time_enough_classes_agree():
    assert planned(14, per_class=True) == planned(14)


def test_wrong_use_says_what_would_do():
    with pytest.raises(ValueError, match=r"`learning_rate` must be at most 1/smoothness = 11.9"):
        dataclasses.replace(LOSS, learning_rate=12.0)
    with pytest.raises(ValueError, match="`number` must be at least 1, got 0"):
        dataclasses.replace(SERVER, number=0)
    with pytest.raises(ValueError, match="`error` must be a positive number, got 0"):
        plan_genqsgd(LOSS, [SERVER], SERVER, error=0, seconds=1.0)
    with pytest.raises(ValueError, match="`classes` must have at least one class"):
        plan_genqsgd(LOSS, [], SERVER, error=0.25, seconds=1.0)
    with pytest.raises(ValueError, match="`steps` must be None with per_class=True"):
        planned(14, per_class=True, steps=2)

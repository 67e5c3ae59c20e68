"""The planner of GenQSGD: the published table, its baselines, and classes that differ."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxcomp.planning import Loss, Machine, plan_genqsgd
from jaxcomp.theory.genqsgd_problem import Problem

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


@pytest.mark.full
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
    return Problem(LOSS, (fast, slow), SERVER, 0.25, seconds).choice(steps, batch)


def test_with_time_enough_classes_agree():
    assert planned(14, per_class=True) == planned(14)


def drawn(seed):
    """A random problem of two or three classes, with limits that a random plan just meets."""
    rng = np.random.default_rng(seed)

    def power(low, high):
        return 10 ** rng.uniform(low, high)

    smoothness = power(-1.5, 0.5)
    loss = Loss(
        size=int(power(2, 5)),
        gap=power(-0.5, 1),
        gradient=power(-0.5, 1.2),
        smoothness=smoothness,
        noise=power(-0.5, 1.3),
        learning_rate=power(-2.5, -0.5) / smoothness,
    )
    classes = tuple(
        Machine(
            int(rng.integers(1, 8)),
            cycles=power(7, 9),
            frequency=power(8, 10),
            power=power(-1, 1),
            rate=power(4, 7),
            levels=2 ** int(rng.integers(3, 20)),
        )
        for _ in range(rng.integers(2, 4))
    )
    server = dataclasses.replace(SERVER, rate=power(6, 8), levels=2 ** int(rng.integers(8, 30)))
    free = Problem(loss, classes, server, 1e30, 1e30)
    steps = rng.integers(1, 9, len(classes)).astype(float)
    batch, rounds = int(rng.integers(1, 12)), int(power(1, 4))
    error = free.floor(steps, batch) + free.first / (free.numbers @ steps * rounds)
    seconds = rounds * free.round_seconds(steps, batch)
    given = dataclasses.replace(free, error=float(error) * power(0, 0.1))
    if seed % 2 == 0:  # Most of these are too short for equal steps.
        grid = plans(given)
        took = given.rounds(grid[..., :-1], grid[..., -1])
        took *= given.round_seconds(grid[..., :-1], grid[..., -1])
        equal = np.all(grid[..., :-1] == grid[..., :1], axis=-1)
        return dataclasses.replace(given, seconds=float(took.min() * took[equal].min()) ** 0.5)
    return dataclasses.replace(given, seconds=float(seconds) * power(0, 0.1))


def plans(setting, most=16):
    """Every plan of up to so many steps and batches, `[..., steps and batch]`."""
    axes = [np.arange(1.0, most + 1)] * (len(setting.classes) + 1)
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1)


def test_no_plan_of_random_problems_is_better_than_the_one_for_each_class():
    """Against all of up to 16 steps and batches, also where no equal steps meet the limits."""
    uneven = 0
    for seed in range(24):
        setting = drawn(seed)
        grid = plans(setting)
        least = setting.energy(grid[..., :-1], grid[..., -1]).min()
        assert np.isfinite(least)
        given = setting.loss, setting.classes, setting.server
        limits = {"error": setting.error, "seconds": setting.seconds}
        plan = plan_genqsgd(*given, **limits, per_class=True)
        assert plan.energy <= least * (1 + 1e-9), seed
        assert plan.error <= setting.error * (1 + 1e-9)
        assert plan.seconds <= setting.seconds
        uneven += plan_genqsgd(*given, **limits) is None
    assert uneven >= 10


def test_no_exchange_of_a_step_between_many_classes_helps():
    """Twelve classes, of which brute force could not try all plans."""
    rng = np.random.default_rng(3)
    fast = Machine(2, cycles=1e8, frequency=2e9, power=1.5, rate=5e5, levels=2**14)
    classes = [dataclasses.replace(fast, frequency=2e9 / by) for by in rng.uniform(1, 12, 12)]
    limits = {"error": 0.25, "seconds": 4630.0}
    plan = plan_genqsgd(LOSS, classes, SERVER, **limits, per_class=True)
    assert plan.seconds <= 4630
    assert plan.error <= 0.25
    assert plan.energy < 0.96 * plan_genqsgd(LOSS, classes, SERVER, **limits).energy
    setting = Problem(LOSS, tuple(classes), SERVER, **limits)
    for one, other in itertools.product(np.eye(12), repeat=2):  # No exchange of a step helps.
        steps = np.array(plan.steps) + one - other
        if steps.min() >= 1:
            assert setting.energy(steps, plan.batch) >= plan.energy


def test_wrong_use_of_genqsgd_plans_says_what_would_do():
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

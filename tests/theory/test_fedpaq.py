"""FedPAQ's cost model: drawn rounds, the plan against all of them, and its optimum in τ."""

import dataclasses
import math

import numpy as np
import pytest

from jaxcomp.planning import (
    Clients,
    Smooth,
    fedpaq_longest,
    fedpaq_round,
    fedpaq_time,
    plan_fedpaq,
)
from jaxcomp.theory.genqsgd_problem import Loss
from jaxcomp.theory.qsgd import qsgd_bits, qsgd_variance

LOSS = Smooth(size=1000, gap=2.0, smoothness=1.0, noise=3.0)
CLIENTS = Clients(20, shift=1e-4, tail=1e-4, bandwidth=1e6)
GIVEN = {"participants": [10], "levels": [16], "batch": 10}


def test_a_round_is_the_mean_of_drawn_ones():
    """The slowest of five clients, whose times are drawn."""
    draw = np.random.default_rng(0)
    clients = dataclasses.replace(CLIENTS, tail=3e-4)
    work = 7 * 10 * (1e-4 + 3e-4 * draw.exponential(size=(200_000, 5)))
    sent = 5 * (32 + 1000 + 1000 * 2) / 1e6
    found = fedpaq_round(clients, 1000, steps=7, participants=5, levels=4, batch=10)
    assert found == pytest.approx(work.max(axis=1).mean() + sent, rel=5e-3)
    dense = fedpaq_round(clients, 1000, steps=7, participants=5, levels=None, batch=10)
    assert dense - found == pytest.approx(5 * 32_000 / 1e6 - sent)


def test_at_fixed_iterations_more_local_steps_are_always_faster():
    settings = {"iterations": 600, "participants": 10, "levels": 4}
    times = [fedpaq_time(CLIENTS, 1000, steps=k, **settings) for k in (1, 2, 5, 10, 20, 60, 600)]
    assert (np.diff(times) < 0).all()
    each = fedpaq_round(CLIENTS, 1000, steps=7, participants=10, levels=4)
    assert fedpaq_time(CLIENTS, 1000, steps=7, **settings) == 86 * each


def test_to_an_error_the_best_number_of_steps_is_inside_the_sweep():
    times = [plan_fedpaq(LOSS, CLIENTS, error=0.05, steps=k, **GIVEN).seconds for k in range(1, 40)]
    at = int(np.argmin(times))
    assert 1 < at < 20
    assert times[0] > 3 * times[at]
    assert times[-1] > 3 * times[at]
    plan = plan_fedpaq(LOSS, CLIENTS, error=0.05, **GIVEN)
    assert (plan.steps, plan.seconds) == (at + 1, times[at])
    # On a slow link messages are dear, so rounds are longer; on a fast one they are shorter.
    slow, fast = (
        plan_fedpaq(LOSS, dataclasses.replace(CLIENTS, bandwidth=speed), error=0.05, **GIVEN)
        for speed in (1e4, 1e9)
    )
    assert slow.steps >= plan.steps > fast.steps


def test_the_plan_is_the_fastest_of_all():
    plan = plan_fedpaq(LOSS, CLIENTS, error=0.1, levels=(1, 16, None), batch=10)
    tried = [
        plan_fedpaq(
            LOSS, CLIENTS, error=0.1, levels=[s], participants=[r], steps=k, batch=10
        ).seconds
        for s in (1, 16, None)
        for r in range(1, 21)
        for k in range(1, 25)
    ]
    assert plan.seconds == min(tried)
    assert plan.participants < 20


def test_a_plan_meets_the_error_with_the_fewest_rounds():
    plan = plan_fedpaq(LOSS, CLIENTS, error=0.05, **GIVEN)
    settings = {"participants": plan.participants, "levels": plan.levels}
    iterations = plan.rounds * plan.steps
    assert plan.learning_rate == pytest.approx(1 / math.sqrt(iterations))
    assert plan.seconds == pytest.approx(
        fedpaq_time(CLIENTS, 1000, iterations=iterations, steps=plan.steps, batch=10, **settings)
    )
    q, n, r = qsgd_variance(1000, 16), 20, 10
    spread = q / n + 4 * (1 + q) * (n - r) / (r * (n - 1))

    def bound(total):
        drift = 0.9 * (1 + 1 / n) * (plan.steps - 1) / total
        return (2 * 2.0 + 0.9 * (1 / n + spread)) / math.sqrt(total) + drift

    assert plan.error == pytest.approx(bound(iterations))
    assert plan.error <= 0.05
    assert plan.steps <= fedpaq_longest(CLIENTS, 1000, iterations=iterations, **settings)
    fewer = iterations - plan.steps
    longest = (math.sqrt(spread**2 + 0.8) - spread) / 8 * math.sqrt(fewer)
    assert bound(fewer) > 0.05 or plan.steps > longest


def test_the_longest_round_grows_with_the_root_of_the_iterations():
    clients = dataclasses.replace(CLIENTS, number=50)
    found = [
        fedpaq_longest(clients, 1000, iterations=total, participants=50, levels=None)
        for total in (50, 10_000, 1_000_000)
    ]
    assert found == [0, 11, 111]  # √0.8 / 8 · √T: nothing is lost where all send everything.
    few = fedpaq_longest(clients, 1000, iterations=1_000_000, participants=5, levels=1)
    assert few < 15


def test_the_bound_holds_in_a_simulation():
    """A quadratic with ten clients, five of which send dithered messages with one scale each."""
    size, n, r, steps, levels = 50, 10, 5, 3, 8
    loss = Smooth(size=size, gap=0.5 * size, smoothness=1.0, noise=2.0)
    clients = dataclasses.replace(CLIENTS, number=n)
    plan = plan_fedpaq(loss, clients, error=2.5, levels=[levels], participants=[r], steps=steps)
    draw, x, squares = np.random.default_rng(0), np.ones(size), []
    for _ in range(plan.rounds):
        y = np.tile(x, (n, 1))
        for _ in range(steps):
            squares.append(np.sum(y.mean(axis=0) ** 2))
            noise = draw.standard_normal((n, size)) * 2.0 / math.sqrt(size)
            y = y - plan.learning_rate * (y + noise)
        moved = (y - x)[draw.permutation(n)[:r]]
        norm = np.linalg.norm(moved, axis=1, keepdims=True) / levels
        x = x + (np.floor(moved / norm + draw.random(moved.shape)) * norm).mean(axis=0)
    assert np.mean(squares) <= plan.error


def test_both_planners_count_qsgd_alike():
    loss = Loss(1000, gap=1.0, gradient=1.0, smoothness=1.0, noise=1.0, learning_rate=0.1)
    for levels in (1, 5, 31, 32, 100):
        assert loss.variance(levels) == qsgd_variance(1000, levels)
        assert loss.bits(levels) == qsgd_bits(1000, levels)
    assert qsgd_variance(1000, 100) == pytest.approx(0.1)
    assert qsgd_variance(1000, 1) == pytest.approx(math.sqrt(1000))
    assert qsgd_bits(1000, 8) == 32 + 4000


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dataclasses.replace(LOSS, noise=0), "`noise` must be a positive number, got 0"),
        (lambda: dataclasses.replace(CLIENTS, tail=-1.0), "`tail` must be a number at least 0"),
        (
            lambda: fedpaq_round(CLIENTS, 1000, steps=1, participants=21, levels=1),
            "`participants` must be from 1 to 20, got 21",
        ),
        (
            lambda: fedpaq_round(CLIENTS, 1000, steps=0, participants=1, levels=1),
            "`steps` must be at least 1, got 0",
        ),
        (
            lambda: fedpaq_longest(CLIENTS, 1000, iterations=1, participants=1, levels=0.5),
            "`levels` must be a number at least 1",
        ),
        (lambda: plan_fedpaq(LOSS, CLIENTS, error=0), "`error` must be a positive number"),
        (lambda: plan_fedpaq(LOSS, CLIENTS, error=1, levels=[]), "at least one number to try"),
        (lambda: qsgd_bits(10, 0.5), "`levels` must be a number at least 1"),
    ],
)
def test_wrong_use_of_fedpaq_plans_says_what_would_do(call, said):
    with pytest.raises(ValueError, match=said):
        call()

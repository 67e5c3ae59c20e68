"""Choices under a total price, in comparison with all choices."""

import itertools

import numpy as np
import pytest

from jaxcomp.theory import knapsack


def least(prices, errors, room):
    """The smallest total error of all choices within the room."""
    numbers = [range(len(row)) for row in prices]
    fitting = [c for c in itertools.product(*numbers) if knapsack.total(prices, c) <= room]
    return min(knapsack.total(errors, c) for c in fitting)


@pytest.mark.parametrize("scale", [1, 10**7])
@pytest.mark.parametrize("seed", range(5))
def test_the_error_is_the_least_one(seed, scale):
    """Also where one item is most of the price; large prices are rounded to units."""
    rng = np.random.default_rng(seed)
    prices = [(scale * np.cumsum(rng.integers(1, 20, 4))).tolist() for _ in range(4)]
    prices.append([40 * scale, 80 * scale, 120 * scale, 160 * scale])
    errors = [np.sort(rng.random(4))[::-1].tolist() for _ in range(5)]
    for room in np.linspace(sum(map(min, prices)), sum(map(max, prices)), 7):
        choice = knapsack.fill(prices, errors, room)
        assert knapsack.total(prices, choice) <= room
        best = least(prices, errors, room)
        assert knapsack.total(errors, choice) == pytest.approx(best, rel=0.02)
    assert knapsack.total(errors, choice) == pytest.approx(best)  # With room for all.


def test_convex_errors_are_spent_optimally_where_all_steps_cost_the_same():
    """Reverse water-filling: errors σ² 4⁻ᵇ, one bit at a time to the largest one."""
    variances = [1.0, 0.3, 0.01, 8.0]
    errors = [[v * 4.0**-b for b in range(1, 9)] for v in variances]
    prices = [[float(b) for b in range(1, 9)]] * 4
    for room in range(4, 33):
        bits = [1 + c for c in knapsack.fill(prices, errors, room)]
        assert sum(bits) == room
        best = [1] * 4
        for _ in range(room - 4):
            now = [v * 4.0**-b if b < 8 else -1 for v, b in zip(variances, best, strict=True)]
            best[int(np.argmax(now))] += 1
        assert bits == best


def test_a_choice_that_is_cheaper_and_better_is_taken():
    assert knapsack.fill([[5, 3]], [[1.0, 0.5]], 5) == [1]
    assert knapsack.fill([[5, 3]], [[1.0, 0.5]], 0) == [1]  # No choice fits.
    assert knapsack.fill([], [], 0) == []

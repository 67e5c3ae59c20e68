"""The CEO bound: golden numbers, closed forms against water filling, and minima found by force."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize

from jaxcomp import theory

UNEQUAL = [0.3, 0.1, 2.0, 0.7]


@pytest.mark.parametrize(
    ("ratio", "bits", "unbinned", "saved"),
    [(0.1, 19.591, 57.227, 0.66), (1.0, 17.312, 24.407, 0.29), (10.0, 10.258, 10.503, 0.02)],
)
def test_golden_gain_of_correlation(ratio, bits, unbinned, saved):
    """32 workers at twice the least distortion."""
    noise = [ratio] * 32
    wanted = 2 * theory.ceo_range(1.0, noise)[0]
    rate = theory.ceo_rate(wanted, 1.0, noise)
    apart = theory.ceo_unbinned_rate(wanted, 1.0, noise)
    assert (rate, apart) == (pytest.approx(bits, abs=1e-3), pytest.approx(unbinned, abs=1e-3))
    assert 1 - rate / apart == pytest.approx(saved, abs=5e-3)


@pytest.mark.parametrize("workers", [1, 2, 8, 33])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_closed_form_is_water_filling(workers, ratio):
    noise = [3 * ratio] * workers
    low, high = theory.ceo_range(3.0, noise)
    tried = low + (high - low) * np.linspace(1e-3, 1, 50)
    want = theory.ceo_symmetric_rate(tried, 3.0, 3 * ratio, workers)
    np.testing.assert_allclose(theory.ceo_rate(tried, 3.0, noise), want, rtol=1e-9, atol=1e-12)


def test_the_curve_falls_from_infinity_to_zero_and_is_convex():
    low, high = theory.ceo_range(1.0, UNEQUAL)
    assert low == pytest.approx(1 / (1 + sum(1 / each for each in UNEQUAL)))
    tried = np.linspace(low, high, 400)[1:]
    rates = theory.ceo_rate(tried, 1.0, UNEQUAL)
    assert rates[-1] == 0 == theory.ceo_unbinned_rate(high, 1.0, UNEQUAL)
    assert (np.diff(rates) < 0).all()
    assert (np.diff(rates, 2) > 0).all()
    near = [theory.ceo_rate(low * (1 + 10.0**-k), 1.0, UNEQUAL) for k in (3, 6, 9)]
    # Each of four workers gives half a bit for each halving of the distance.
    np.testing.assert_allclose(np.diff(near), 4 * 1.5 * math.log2(10), rtol=1e-2)
    assert (theory.ceo_unbinned_rate(tried, 1.0, UNEQUAL) >= rates - 1e-9).all()


def test_one_worker_without_noise_is_shannons_curve():
    rate = theory.ceo_rate([0.25, 0.01], 1.0, [1e-12])
    np.testing.assert_allclose(rate, -0.5 * np.log2([0.25, 0.01]), rtol=1e-9)


@pytest.mark.parametrize(("share", "speaking"), [(1.1, 4), (1.5, 2), (3.0, 1)])
def test_no_allocation_has_a_smaller_sum(share, speaking):
    wanted = share * theory.ceo_range(1.0, UNEQUAL)[0]
    found = theory.ceo_allocation(wanted, 1.0, UNEQUAL)
    noise, need = np.array(UNEQUAL), 1 / wanted - 1
    brute = optimize.minimize(
        np.sum,
        np.full(4, 3.0),
        bounds=[(0, 30)] * 4,
        constraints={"type": "ineq", "fun": lambda r: np.sum((1 - 4.0**-r) / noise) - need},
        options={"ftol": 1e-11, "maxiter": 1000},
    )
    assert brute.success
    np.testing.assert_allclose(found.private, brute.x, atol=1e-4)
    assert sum(found.private) == pytest.approx(brute.fun, abs=1e-6)
    assert found.speaking == sum(noise < found.water) == speaking
    assert sum(found.rates) == pytest.approx(theory.ceo_rate(wanted, 1.0, UNEQUAL))
    assert sum(found.alone) == pytest.approx(theory.ceo_unbinned_rate(wanted, 1.0, UNEQUAL))


def by_force(rates, noise):
    """The least distortion over a grid of `r`, from all sets of workers."""
    grid = [np.linspace(0, rate, 61) for rate in rates]
    private = np.stack(np.meshgrid(*grid, indexing="ij"), -1).reshape(-1, len(noise))
    gained = (1 - 4.0**-private) / noise
    sets = np.array(list(itertools.product([0, 1], repeat=len(noise))))
    log_precision = (rates - private) @ sets.T + 0.5 * np.log2(1 + gained @ (1 - sets.T))
    return 4.0 ** -log_precision.min(axis=1).max()


@pytest.mark.parametrize("rates", [(2.0, 2.0, 2.0), (3.0, 0.5, 1.0), (0.0, 2.0, 1.0), (1, 0, 0)])
def test_the_rate_region_is_that_of_all_sets(rates):
    noise = np.array([0.5, 0.2, 1.5])
    found = theory.ceo_distortion(rates, 1.0, noise)
    forced = by_force(np.array(rates), noise)
    assert found <= forced * (1 + 1e-9)  # The grid does not have the best point.
    assert found == pytest.approx(forced, rel=1e-2)


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_rates_of_the_allocation_are_on_the_edge(workers):
    noise = np.random.default_rng(workers).uniform(0.1, 3, workers).tolist()
    wanted = 1.5 * theory.ceo_range(1.0, noise)[0]
    rates = np.array(theory.ceo_allocation(wanted, 1.0, noise).rates)
    assert theory.ceo_distortion(rates, 1.0, noise) == pytest.approx(wanted, rel=1e-6)
    assert theory.ceo_achievable(rates, wanted, 1.0, noise)
    assert not theory.ceo_achievable(0.999 * rates, wanted, 1.0, noise)
    assert not theory.ceo_achievable(rates[::-1], wanted, 1.0, noise)


def test_equal_rates_of_equal_workers_reach_the_sum():
    sum_rate = theory.ceo_symmetric_rate(0.05, 1.0, 0.2, 8)
    assert theory.ceo_distortion([sum_rate / 8] * 8, 1.0, [0.2] * 8) == pytest.approx(0.05)
    assert theory.ceo_distortion([0.0] * 8, 1.0, [0.2] * 8) == 1


def test_blocks_against_a_general_optimizer():
    signals, sizes = [1.0, 0.1, 0.4, 0.0], [1, 2, 3, 4]
    noises = [[0.1] * 4, [0.5, 0.1, 0.3, 0.2], UNEQUAL, [1.0] * 4]
    found = theory.ceo_vector(0.06, signals, noises, sizes)
    weights = np.array(sizes) / 10
    assert weights @ found.distortions == pytest.approx(0.06, rel=1e-6)
    assert found.distortions[-1] == found.rates[-1] == 0
    low = [theory.ceo_range(s, n)[0] for s, n in zip(signals[:3], noises, strict=False)]

    def bits(distortions):
        blocks = zip(distortions, signals, noises, weights, strict=False)
        return sum(w * theory.ceo_rate(min(d, s), s, n) for d, s, n, w in blocks)

    brute = optimize.minimize(
        bits,
        np.array(low) * 1.5,
        bounds=[(1.001 * a, b) for a, b in zip(low, signals, strict=False)],
        constraints={"type": "ineq", "fun": lambda d: 100 * (0.06 - weights[:3] @ d)},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    assert brute.success
    assert found.rate == pytest.approx(bits(found.distortions[:3]))
    assert found.rate == pytest.approx(brute.fun, rel=1e-5)
    steps = 1e-6 * np.array(found.distortions[:3])
    for one in range(3):
        step = np.eye(3)[one] * steps
        here = np.array(found.distortions[:3])
        slope = (bits(here - step) - bits(here + step)) / (2 * steps[one] * weights[one])
        assert slope == pytest.approx(found.slope, rel=1e-4)


def test_a_block_that_is_not_worth_it_is_not_sent():
    found = theory.ceo_vector(0.3, [1.0, 0.1], [[0.1] * 8] * 2)
    assert found.distortions == (pytest.approx(0.5), 0.1)
    assert found.rates == (pytest.approx(theory.ceo_rate(0.5, 1.0, [0.1] * 8)), 0)
    nothing = theory.ceo_vector(0.55, [1.0, 0.1], [[0.1] * 8] * 2)
    assert nothing.rate == pytest.approx(0, abs=1e-9)


def test_one_block_is_the_scalar_bound():
    found = theory.ceo_vector(0.07, [1.0], [UNEQUAL])
    assert found.rate == pytest.approx(theory.ceo_rate(0.07, 1.0, UNEQUAL))


def test_a_higher_distortion_costs_fewer_bits_in_all():
    noise = [0.1] * 8
    settings = {"rounds": 100.0, "growth": 2000.0}
    low, high = theory.ceo_range(1.0, noise)
    best = theory.ceo_total_cost(1.0, noise, overhead=2.0, **settings)
    tried = np.geomspace(1.0001 * low, high, 5000)
    costs = (100 + 2000 * tried) * (theory.ceo_rate(tried, 1.0, noise) + 2.0)
    assert best.bits <= costs.min()
    assert best.bits == pytest.approx(costs.min(), rel=1e-4)
    fine = theory.ceo_total_cost(1.0, noise, overhead=2.0, distortion=1.05 * low, **settings)
    assert best.distortion > 3 * fine.distortion
    assert best.rounds > fine.rounds
    assert best.bits < 0.5 * fine.bits
    # The more a round costs beside its bits, the finer its gradients should be.
    finer = theory.ceo_total_cost(1.0, noise, overhead=20.0, **settings)
    assert low < finer.distortion < best.distortion


def test_without_overhead_the_cheapest_training_sends_nothing():
    settings = {"rounds": 100.0, "growth": 2000.0}
    with pytest.raises(ValueError, match=r"`overhead` must be larger, 0.833 bits is enough"):
        theory.ceo_total_cost(1.0, [0.1] * 8, overhead=0.01, **settings)
    found = theory.ceo_total_cost(1.0, [0.1] * 8, overhead=0.84, **settings)
    assert found.distortion < 0.1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: theory.ceo_range(0.0, [1.0]), "`signal` must be a positive number, got 0"),
        (lambda: theory.ceo_range(1.0, []), "`noise` must have one variance for each worker"),
        (lambda: theory.ceo_range(1.0, 0.1), "`noise` must have one variance for each worker"),
        (lambda: theory.ceo_rate(0.5, 1.0, [-1.0]), r"`noise` must be a number in \(0, inf\)"),
        (
            lambda: theory.ceo_rate(0.2, 1.0, [0.5, 0.5]),
            r"`distortion` must be a number in \(0.2, 1.0\]",
        ),
        (lambda: theory.ceo_rate([0.3, 1.1], 1.0, [0.5, 0.5]), r"in \(0.2, 1.0\]"),
        (lambda: theory.ceo_symmetric_rate(0.5, 1.0, 0.1, 0), "`workers` must be at least 1"),
        (lambda: theory.ceo_distortion([1.0], 1.0, [0.5, 0.5]), "each of the 2 workers"),
        (lambda: theory.ceo_distortion([-1.0], 1.0, [0.5]), r"`rates` must be a number in \[0"),
        (lambda: theory.ceo_achievable([1.0], 0, 1.0, [0.5]), "`distortion` must be a positive"),
        (lambda: theory.ceo_vector(0.5, [0.0], [[1.0]]), "at least one of them positive"),
        (lambda: theory.ceo_vector(0.5, [1.0], [1.0]), r"shape \(blocks, workers\) with 1"),
        (lambda: theory.ceo_vector(0.5, [1.0], [[1.0]], [1, 2]), "`sizes` must have 1 numbers"),
        (lambda: theory.ceo_vector(0.5, [1.0], [[1.0]]), "`distortion` must be above 0.5"),
        (
            lambda: theory.ceo_total_cost(1.0, [0.1], rounds=1, growth=0, overhead=1),
            "`growth` must be a positive number, got 0",
        ),
    ],
)
def test_wrong_use_of_ceo_bounds_says_what_would_do(call, said):
    with pytest.raises(ValueError, match=said):
        call()

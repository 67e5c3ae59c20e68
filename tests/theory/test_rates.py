"""The best rates under compression, by the formulas of the paper."""

import math

import pytest

from jaxcomp.theory import rates

SETTINGS = {"smoothness": 2.0, "gap": 3.0}


@pytest.mark.parametrize(("given", "slowed"), [({"omega": 4.0}, 5.0), ({"delta": 0.1}, 10.0)])
def test_the_rate_is_noise_over_all_workers_and_the_delay_of_compression(given, slowed):
    for rounds, workers, noise in ((100, 1, 0.0), (1000, 16, 0.5), (10, 3, 2.0)):
        want = noise * math.sqrt(6.0 / (workers * rounds)) + slowed * 6.0 / rounds
        got = rates.compressed_rate(rounds, workers, noise=noise, **SETTINGS, **given)
        assert got == pytest.approx(want, rel=1e-12)

"""The laws of magnitudes: recovered where they are true, and found wanting where they are not."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxcomp
from jaxcomp.sparsify import fitted
from jaxcomp.theory import fit_laws

DRAW = np.random.default_rng(0)
SIZE = 200_000
TRUE = {
    "exponential": (stats.expon(scale=3.0), 1.0, 3.0),
    "gamma": (stats.gamma(0.4, scale=2.0), 0.4, 2.0),
    "pareto": (stats.genpareto(0.2, scale=0.5), 0.2, 0.5),
}


@pytest.mark.parametrize("name", TRUE)
def test_the_true_law_is_recovered_and_fits_best(name):
    law, shape, scale = TRUE[name]
    signs = DRAW.choice([-1.0, 1.0], SIZE)
    found = fit_laws(signs * law.rvs(SIZE, random_state=1))
    one = {each.name: each for each in found.laws}[name]
    assert one.shape == pytest.approx(shape, rel=0.05)
    assert one.scale == pytest.approx(scale, rel=0.05)
    assert one.distance < 0.01
    assert found.best.distance <= one.distance
    assert one.kept == pytest.approx((1, 1, 1), rel=0.15)


@pytest.mark.parametrize("name", TRUE)
def test_distances_are_those_of_scipy(name):
    """And the distribution and thresholds of a law are inverse to each other."""
    x = DRAW.standard_normal(3000)
    one = {each.name: each for each in fit_laws(x).laws}[name]
    found = stats.kstest(np.abs(x), lambda y: 1 - one.above(y)).statistic
    assert one.distance == pytest.approx(found, abs=1e-12)
    for share in (0.5, 0.1, 0.001):
        assert one.above(one.threshold(share)) == pytest.approx(share)


@pytest.mark.full
def test_thresholds_are_those_of_one_stage_of_sidco():
    x = DRAW.standard_normal(4096).astype(np.float32)
    for law in fit_laws(x).laws:
        rule = fitted.Fitted(fraction=0.01, law=law.name, stages=1)
        level = float(rule.threshold(jnp.asarray(x)[None])[0, 0])
        # For 41 of 4,096 elements; sidco reads the gamma law from a table.
        assert law.threshold(41 / 4096) == pytest.approx(level, rel=5e-4)


def test_a_law_that_is_wrong_is_told_from_a_right_one():
    """A threshold of the exponential law keeps too few of a normal vector, far out."""
    found = fit_laws(DRAW.standard_normal(SIZE))
    exponential = found.laws[0]
    assert exponential.distance > 0.05
    assert exponential.kept[2] < 0.5
    assert "exponential" in str(found)


@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_the_unit_does_not_matter(unit):
    x = DRAW.laplace(size=5000)
    one, other = fit_laws(x), fit_laws(x * unit)
    for a, b in zip(one.laws, other.laws, strict=True):
        assert b.distance == pytest.approx(a.distance, rel=1e-6)
        assert b.scale == pytest.approx(a.scale * unit, rel=1e-6)


def test_zeros_constants_and_dtypes():
    x = np.concatenate([DRAW.laplace(size=5000), np.zeros(5000)])
    found = fit_laws(x, (0.1,))
    assert found.zeros == 0.5
    assert found.laws[0].kept[0] == pytest.approx(1, rel=0.1)  # A share of all elements.
    assert all(np.isfinite(law.distance) for law in fit_laws(np.ones(100)).laws)
    assert fit_laws(jnp.ones(8, jnp.bfloat16)).elements == 8
    assert fit_laws(np.float32([-2.0])).laws[0].scale == 2


@pytest.mark.parametrize(
    ("x", "shares", "said"),
    [
        (np.zeros(5), (0.1,), "must have an element that is not zero, got 5 zeros"),
        (np.zeros(0), (0.1,), "must have an element that is not zero, got 0 zeros"),
        (np.array([1, np.nan]), (0.1,), "`gradient` must be finite"),
        (np.arange(5), (0.1,), "must have a floating dtype, got int64"),
        (np.ones(5), (0,), "`shares` must be"),
        (np.ones(5), 0.1, "`shares` must be a tuple or a list"),
    ],
)
def test_wrong_use_of_fit_laws_says_what_would_do(x, shares, said):
    with pytest.raises(ValueError, match=said):
        jaxcomp.theory.fit_laws(x, shares)

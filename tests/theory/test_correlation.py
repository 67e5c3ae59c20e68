"""Statistics of stacked gradients against what was drawn, and the joint entropy of signs."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from jaxcomp.theory import ceo_vector, gradient_statistics, sign_entropy


def drawn(signal, noise, elements=200_000):
    draw = np.random.default_rng(0)
    common = math.sqrt(signal) * draw.standard_normal(elements)
    apart = draw.standard_normal((len(noise), elements)) * np.sqrt(noise)[:, None]
    return (common + apart).astype(np.float32)


def test_variances_are_found_again():
    noise = [0.5, 1.0, 2.0, 4.0]
    one = gradient_statistics(drawn(0.8, noise)).whole
    assert one.elements == 200_000
    assert one.signal == pytest.approx(0.8, rel=0.02)
    np.testing.assert_allclose(one.noise, noise, rtol=0.03)
    assert one.mean_noise == pytest.approx(1.875, rel=0.01)
    assert one.ratio == pytest.approx(1.875 / 0.8, rel=0.03)
    assert one.correlation == pytest.approx(0.8 / 2.675, rel=0.03)


def test_two_workers_share_their_noise():
    one = gradient_statistics(drawn(1.0, [0.5, 1.5])).whole
    assert one.noise[0] == one.noise[1] == pytest.approx(1.0, rel=0.02)


def test_a_tree_has_its_leaves_and_all_of_them():
    tree = {
        "a": {"w": jnp.asarray(drawn(1.0, [1.0] * 3)).reshape(3, 400, 500)},
        "b": jnp.ones((3, 7)),
    }
    found = gradient_statistics(tree)
    assert set(found.leaves) == {"a/w", "b"}
    assert (found.leaves["b"].signal, found.leaves["b"].mean_noise) == (1.0, 0.0)
    assert found.leaves["b"].correlation == 1.0
    assert found.whole.elements == 200_007
    for name in ("signal", "mean_noise"):
        mean = sum(one.elements * getattr(one, name) for one in found.leaves.values()) / 200_007
        assert getattr(found.whole, name) == pytest.approx(mean, rel=1e-6)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in (lines[2], lines[3], lines[4])] == ["a/w", "b", "all"]
    assert "200,007" in lines[4]


def test_noise_alone_has_no_signal():
    one = gradient_statistics(drawn(1e-12, [1.0] * 8)).whole
    assert one.signal < 0.003
    opposite = np.array([[1.0, 1.0], [-1.0, -1.0]])
    one = gradient_statistics(opposite).whole
    assert (one.signal, one.ratio, one.correlation) == (0.0, math.inf, 0.0)
    assert gradient_statistics(np.zeros((2, 3))).whole.correlation == 0.0


def test_they_are_what_the_bound_takes():
    tree = {"a": drawn(1.0, [1.0] * 4, 1000), "b": drawn(0.1, [1.0] * 4, 500)}
    leaves = gradient_statistics(tree).leaves.values()
    found = ceo_vector(
        0.3,
        [one.signal for one in leaves],
        [one.noise for one in leaves],
        [one.elements for one in leaves],
    )
    assert found.rates[0] > found.rates[1] >= 0


@pytest.mark.parametrize(
    ("gradients", "said"),
    [
        ({}, "`gradients` must have at least one array"),
        (np.ones((1, 3)), r"`gradients` must have shape \(workers, ...\) .* got \(1, 3\)"),
        ({"w": np.ones((2, 0))}, r"`gradients`\['w'\] must have shape"),
        ({"w": np.float32(1)}, r"got \(\)"),
        ([np.ones((2, 3)), np.ones((4, 3))], r"same number of workers .* got \[2, 4\]"),
        ({"w": np.array([[1.0], [np.nan]])}, r"`gradients`\['w'\] must be finite"),
    ],
)
def test_wrong_gradients(gradients, said):
    with pytest.raises(ValueError, match=said):
        gradient_statistics(gradients)


@pytest.mark.parametrize(("ratio", "saved"), [(0.1, 0.49), (1.0, 0.14), (10.0, 0.007)])
def test_golden_gain_of_signs(ratio, saved):
    assert 1 - sign_entropy(8, 1.0, ratio) / 8 == pytest.approx(
        saved, abs=5e-3 if saved > 0.1 else 5e-4
    )


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 1.0, 30.0])
def test_two_signs_agree_as_the_arcsine_says(ratio):
    agree = 0.5 + math.asin(1 / (1 + ratio)) / math.pi
    want = 1 - agree * math.log2(agree) - (1 - agree) * math.log2(1 - agree)
    assert sign_entropy(2, 2.0, 2 * ratio) == pytest.approx(want, abs=1e-10)


def test_three_signs_by_quadrature():
    def chance(signs):
        def density(x):
            return stats.norm.pdf(x) * np.prod(stats.norm.cdf(np.array(signs) * x / 0.5))

        return integrate.quad(density, -10, 10)[0]

    chances = [chance(signs) for signs in itertools.product([-1, 1], repeat=3)]
    assert sum(chances) == pytest.approx(1)
    assert sign_entropy(3, 1.0, 0.25) == pytest.approx(-sum(p * math.log2(p) for p in chances))


def test_limits_of_signs():
    assert sign_entropy(1, 1.0, 1.0) == pytest.approx(1, abs=1e-12)
    assert sign_entropy(8, 1.0, 1e9) == pytest.approx(8, abs=1e-6)
    assert sign_entropy(8, 1.0, 1e-12) == pytest.approx(1, abs=1e-3)
    rates = [sign_entropy(workers, 1.0, 1.0) / workers for workers in (1, 4, 16, 256, 2000)]
    assert (np.diff(rates) < 0).all()
    # For many workers a sign costs its entropy given the signal, and little more.
    draw = np.random.default_rng(0).standard_normal(100_000)
    given = stats.bernoulli(stats.norm.cdf(draw)).entropy().mean() / math.log(2)
    assert rates[-1] == pytest.approx(given, abs=0.01)


def test_wrong_signs():
    with pytest.raises(ValueError, match="`workers` must be at least 1, got 0"):
        sign_entropy(0, 1.0, 1.0)
    with pytest.raises(ValueError, match="`noise` must be a positive number, got 0"):
        sign_entropy(2, 1.0, 0.0)

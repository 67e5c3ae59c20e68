"""The limits: numbers known from elsewhere, conditions that define them, worst cases attained."""

import fractions
import math

import numpy as np
import pytest

from jaxcomp.theory import limits, worst_case

LAWS = ["gaussian", "laplace"]
PI_E_6 = math.pi * math.e / 6


def moments(law, low, high):
    """Mass, first and second moment between two edges on one side of zero, by quadrature."""
    panels = np.linspace(low, high, 2 + int(2 * (high - low)))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half = np.diff(panels)[:, None] / 2
    x = panels[:-1, None] + half * (1 + nodes)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if law == "laplace":
        density = np.exp(-math.sqrt(2) * np.abs(x)) / math.sqrt(2)
    return np.array([np.sum(half * weights * density * x**power) for power in range(3)])


def nmse(x, scale, grid):
    """Exact relative variance of stochastic rounding to a grid on [0, 1]."""
    r = np.abs(x) / scale
    above = np.clip(np.searchsorted(grid, r), 1, len(grid) - 1)
    return float(scale**2 * np.sum((r - grid[above - 1]) * (grid[above] - r)) / np.sum(x * x))


def inputs(size):
    """Gaussian powers, from dense to heavy-tailed, and inputs with few different magnitudes."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        yield rng.standard_normal(size) ** rng.integers(1, 8)
        yield rng.choice([1.0, 2.0 ** -rng.integers(1, 9), 0.3], size, p=[0.02, 0.9, 0.08])


@pytest.mark.parametrize(
    ("law", "errors"),
    [
        ("gaussian", [0.363380, 0.117482, 0.034548, 0.009501, 0.002505]),
        ("laplace", [0.5, 0.176195, 0.054476, 0.015373, 0.004102]),
    ],
)
def test_lloyd_max_golden_errors(law, errors):
    got = [limits.lloyd_max(2**bits, law)[2] for bits in range(1, 6)]
    np.testing.assert_allclose(got, errors, atol=5.1e-7)


def test_lloyd_max_golden_levels():
    for levels, law, positive in [
        (4, "gaussian", [0.4528, 1.5104]),
        (8, "gaussian", [0.2451, 0.7560, 1.3439, 2.1519]),
        (4, "laplace", [0.4198, 1.8340]),
        (2, "gaussian", [math.sqrt(2 / math.pi)]),
        (2, "laplace", [math.sqrt(0.5)]),
    ]:
        centroids = limits.lloyd_max(levels, law)[1]
        np.testing.assert_allclose(centroids[levels // 2 :], positive, atol=5.1e-5)
    np.testing.assert_allclose(limits.lloyd_max(2)[2], 1 - 2 / math.pi, rtol=1e-14)
    # A ternary Laplace quantizer: threshold 1/√2 and centroid √2, of energy 2/e.
    np.testing.assert_allclose(limits.lloyd_max(3, "laplace")[2], 1 - 2 / math.e, rtol=1e-13)
    assert [round(limits.lloyd_max(n)[2], 4) for n in (3, 5, 6, 7)] == [
        0.1902,
        0.0799,
        0.058,
        0.044,
    ]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("levels", [2, 3, 4, 7, 16, 51, 256])
def test_lloyd_max_meets_both_conditions(law, levels):
    thresholds, centroids, mse = limits.lloyd_max(levels, law)
    assert thresholds.shape == (levels - 1,)
    assert centroids.shape == (levels,)
    np.testing.assert_array_equal(centroids, -centroids[::-1])
    np.testing.assert_array_equal(thresholds, -thresholds[::-1])
    assert (np.diff(centroids) > 0).all()
    np.testing.assert_array_equal(thresholds, (centroids[1:] + centroids[:-1]) / 2)
    edges = np.concatenate([[-30.0], thresholds, [30.0]])
    error = 0.0
    for low, high, level in zip(edges[:-1], edges[1:], centroids, strict=True):
        sides = [(low, min(high, 0.0)), (max(low, 0.0), high)]
        mass, first, second = sum(moments(law, a, b) for a, b in sides if a < b)
        assert abs(first / mass - level) < 1e-9
        error += second - 2 * level * first + level**2 * mass
    np.testing.assert_allclose(mse, error, rtol=1e-9)


@pytest.mark.parametrize(("law", "limit"), [("gaussian", math.pi * 3**0.5 / 2), ("laplace", 4.5)])
def test_lloyd_max_tends_to_the_companding_limit(law, limit):
    errors = np.array([limits.lloyd_max(levels, law)[2] for levels in range(2, 257)])
    assert (np.diff(errors) < 0).all()
    scaled = errors * np.arange(2, 257) ** 2
    assert (scaled < limit).all()
    np.testing.assert_allclose(scaled[-1], limit, rtol=0.01)


def test_lloyd_max_is_shared_and_read_only():
    first, second = limits.lloyd_max(16), limits.lloyd_max(16)
    assert first[1] is second[1]
    for array in first[:2]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    ("law", "errors"),
    [
        ("gaussian", [0.789, 0.617, 0.348, 0.0889, 0.0222, 0.00556]),
        ("laplace", [0.671, 0.486, 0.262, 0.0729, 0.0190, 0.0048]),
    ],
)
def test_entropy_coded_golden_errors(law, errors):
    got = limits.entropy_coded_scalar([0.25, 0.5, 1, 2, 3, 4], law)
    for value, want in zip(got, errors, strict=True):
        assert abs(value - want) <= 0.5 * 10.0 ** -len(str(want).split(".")[1])


@pytest.mark.parametrize("law", LAWS)
def test_entropy_coded_tends_to_a_quarter_of_a_bit(law):
    bits = np.array([6.0, 8.0, 10.0])
    ratio = limits.entropy_coded_scalar(bits, law) / limits.shannon_lower_bound(bits, law)
    np.testing.assert_allclose(ratio, PI_E_6, rtol=3e-4)
    np.testing.assert_allclose(ratio[-1], PI_E_6, rtol=2e-6)


@pytest.mark.parametrize("law", LAWS)
def test_curves_fall_in_their_order(law):
    bits = np.array([0, 1e-3, 0.01, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8])
    shannon = limits.shannon_lower_bound(bits, law)
    curve = limits.rate_distortion(bits, law)
    scalar = limits.entropy_coded_scalar(bits, law)
    for errors in (shannon, curve, scalar):
        assert (np.diff(errors) < 0).all()
    assert curve[0] == pytest.approx(1, abs=1e-12)
    assert scalar[0] == 1
    assert (shannon <= curve * (1 + 1e-12)).all()
    assert (curve <= scalar * (1 + 1e-12)).all()
    assert (curve <= limits.rate_distortion(bits) * (1 + 1e-12)).all()  # No law is harder.
    for width in range(1, 7):  # An entropy coder never hurts.
        assert scalar[bits == width].sum() <= limits.lloyd_max(2**width, law)[2]
    # Convex, so that sharing time between two rates gains nothing.
    slopes = np.diff(curve) / np.diff(bits)
    assert (np.diff(slopes) > 0).all()


def test_gaussian_curve_is_exact():
    np.testing.assert_array_equal(limits.rate_distortion([0, 0.5, 1, 5]), [1, 0.5, 0.25, 4**-5])
    np.testing.assert_array_equal(limits.shannon_lower_bound(2.0), 1 / 16)
    np.testing.assert_allclose(limits.shannon_lower_bound(0, "laplace"), 0.865255979, rtol=1e-9)
    assert limits.rate_distortion(0.5) == 0.5
    assert limits.rate_distortion(np.ones((2, 3))).shape == (2, 3)
    assert limits.rate_distortion([]).shape == (0,)


@pytest.mark.parametrize("slope", [0.6, 0.9, 3.0])
def test_laplace_curve_agrees_with_blahut(slope):
    """Any output law gives a code, so a point on or above the curve: here, nearly on it."""
    nodes, weights = np.polynomial.legendre.leggauss(100)
    x = 10 * (1 + nodes)  # Magnitudes only: outputs come in pairs ±y.
    chance = weights * np.exp(-math.sqrt(2) * x)
    chance /= chance.sum()
    y = np.concatenate([np.arange(0, 6, 0.06), np.arange(6, 14, 0.2)])
    squares = [(x[:, None] - y) ** 2, (x[:, None] + y) ** 2]
    kernel = sum(np.exp(-slope * square) for square in squares) / 2
    cost = sum(np.exp(-slope * square) * square for square in squares) / 2
    output = np.exp(-y) / np.exp(-y).sum()
    for _ in range(500):
        output = output * ((chance / (kernel @ output)) @ kernel)
    total = kernel @ output
    error = (chance / total) @ (cost @ output)
    bits = (-chance @ np.log(total) - slope * error) / math.log(2)
    curve = limits.rate_distortion(bits, "laplace")
    assert curve * (1 - 1e-4) <= error <= curve * (1 + 2e-3)


def test_bounds_of_unbiased_codecs():
    bits = [0.25, 0.5, 1, 2, 3, 4]
    np.testing.assert_allclose(
        limits.unbiased_bound(bits), [2.414, 1, 0.3333, 0.0667, 0.0159, 0.0039], atol=5e-4
    )
    np.testing.assert_allclose(
        limits.unbiased_bound(bits), limits.from_deterministic(limits.rate_distortion(bits))
    )
    assert limits.unbiased_bound(5000) == 0
    np.testing.assert_allclose(limits.unbiased_bound(1e-12), 1e12 / math.log(4), rtol=1e-9)
    omegas = [limits.eden(b) for b in range(1, 9)]
    np.testing.assert_allclose(omegas[:4], [0.5708, 0.1331, 0.0358, 0.0096], atol=5.1e-5)
    np.testing.assert_allclose(omegas[0], math.pi / 2 - 1, rtol=1e-13)
    assert (omegas > limits.unbiased_bound(np.arange(1, 9))).all()
    assert limits.from_deterministic(0) == 0


def test_entropy_coding_goes_below_the_worst_case():
    """The caveat of `unbiased_bound`: cubes of Gaussians, 7 steps of the largest of 512."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 512)) ** 3
    r = 7 * x / np.abs(x).max(1, keepdims=True)
    codes = np.floor(r + rng.random(r.shape))
    chance = np.unique(codes, return_counts=True)[1] / codes.size
    bits = 32 / 512 - chance @ np.log2(chance)
    fraction = r - np.floor(r)
    omega = np.mean(np.sum(fraction * (1 - fraction), 1) / np.sum(r * r, 1))
    assert 1.3 < bits < 1.45
    assert omega < limits.unbiased_bound(bits)


def test_index_bits():
    for n, k in [(1, 0), (5, 5), (48, 8), (1000, 500), (10**6, 1000), (10**9, 1), (10**9, 50)]:
        exact = math.comb(n, k)
        np.testing.assert_allclose(limits.index_bits(n, k), math.log2(exact), rtol=1e-11)
        assert limits.index_bits(n, k) == pytest.approx(limits.index_bits(n, n - k), rel=1e-6)
    np.testing.assert_allclose(
        limits.gap_entropy([0.1, 0.01, 0.001, 0.0001]), [4.690, 8.079, 11.408, 14.730], atol=6e-4
    )
    assert limits.gap_entropy(0.5) == 2
    assert str(float(limits.gap_entropy(1))) == "0.0"
    np.testing.assert_allclose(limits.gap_entropy(1e-15), math.log2(math.e * 1e15), rtol=1e-12)
    for n, k in [(10**7, 10**5), (10**8, 10**5)]:
        bits = limits.index_bits(n, k) / k
        assert bits < limits.gap_entropy(k / n) < bits * 1.0001


def test_golden_worst_cases():
    l2 = [worst_case.omega_l2(512, s) for s in (1, 3, 7, 15)]
    np.testing.assert_allclose(l2, [21.63, 6.54, 2.23, 0.569], atol=5e-3)
    top = [worst_case.omega_max(512, s) for s in (1, 3, 7, 15)]
    np.testing.assert_allclose(top, [10.81, 3.30, 1.190, 0.404], atol=5e-3)
    powers = [worst_case.omega_exponential_l2(512, s + 1) for s in (2, 3, 4, 6, 7)]
    np.testing.assert_allclose(powers, [4.657, 1.828, 0.569, 0.153, 0.132], atol=5.1e-4)
    np.testing.assert_allclose(worst_case.omega_max(17, 1), 1.5616, atol=5e-5)
    assert worst_case.omega_max(1, 3) == 0
    mantissa = np.linspace(0, 1, 3001)
    worst = np.max(mantissa * (1 - mantissa) / (1 + mantissa) ** 2)
    np.testing.assert_allclose(worst_case.NATURAL_COMPRESSION, worst, rtol=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 7, 15])
@pytest.mark.parametrize("size", [2, 16, 64, 512])
def test_even_levels_never_exceed_their_worst_case(size, steps):
    grid = np.arange(steps + 1) / steps
    worst_l2, worst_max = worst_case.omega_l2(size, steps), worst_case.omega_max(size, steps)
    for x in inputs(size):
        assert nmse(x, np.linalg.norm(x), grid) <= worst_l2 * (1 + 1e-12)
        assert nmse(x, np.abs(x).max(), grid) <= worst_max * (1 + 1e-12)
    small = (math.sqrt(1 + (size - 1) / steps**2) - 1) * steps / (size - 1)
    x = np.full(size, small)
    x[0] = 1
    np.testing.assert_allclose(nmse(x, 1.0, grid), worst_max, rtol=1e-12)
    if size >= 4 * steps**2:
        np.testing.assert_allclose(nmse(np.ones(size), size**0.5, grid), worst_l2, rtol=1e-12)


def test_half_levels_attain_the_dense_bound():
    """(5, 3, 1, 1)/6 and three steps: every element is half way between levels."""
    third = fractions.Fraction(1, 3)
    for odd in ([5, 3, 1, 1], [5] + [1] * 11):
        r = [fractions.Fraction(o, 6) for o in odd]
        assert sum(e * e for e in r) == 1
        variance = sum((e - e // third * third) * (e // third * third + third - e) for e in r)
        np.testing.assert_allclose(worst_case.omega_l2(len(odd), 3), float(variance), rtol=1e-15)


@pytest.mark.parametrize("nonzero", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("size", [2, 16, 64, 512, 8192])
def test_powers_of_two_never_exceed_their_bounds(size, nonzero):
    grid = np.concatenate([[0.0], 2.0 ** np.arange(1 - nonzero, 1)])
    bound = worst_case.omega_exponential_l2(size, nonzero)
    for x in inputs(size):
        two, top = nmse(x, np.linalg.norm(x), grid), nmse(x, np.abs(x).max(), grid)
        assert two <= bound * (1 + 1e-12)
        assert two <= worst_case.omega_natural(size, nonzero, p=2)
        assert top <= bound * (1 + 1e-12)
        assert top <= worst_case.omega_natural(size, nonzero)
        one = nmse(x, np.abs(x).sum(), grid)
        assert one <= worst_case.omega_natural(size, nonzero, p=1)
    assert bound < worst_case.omega_natural(size, nonzero, p=2)
    if size > 81 / 16 * 4 ** (nonzero - 1):
        np.testing.assert_allclose(nmse(np.ones(size), size**0.5, grid), bound, rtol=1e-12)


def test_power_of_two_bound_is_nearly_attained():
    """Its first branch: a few elements at 4/3 of a power, the others small with the energy left."""
    size, nonzero = 512, 5
    low = 2.0 ** (1 - nonzero)
    best = 0.0
    for count in range(1, 40):
        for power in (1, 2, 3, 4):
            energy = count * (4 / 3 * 2.0**-power) ** 2
            small = math.sqrt(max(1 - energy, 0) / (size - count))
            if energy < 1 and small <= low:
                x = np.full(size, small)
                x[:count] = 4 / 3 * 2.0**-power
                best = max(best, nmse(x, 1.0, np.append(0, 2.0 ** np.arange(1 - nonzero, 1))))
    bound = worst_case.omega_exponential_l2(size, nonzero)
    assert 0.95 * bound < best <= bound


def test_arguments_are_checked():
    for make, said in [
        (lambda: limits.rate_distortion(-0.1), r"`bits` must be a number in \[0, inf\), .* -0.1"),
        (lambda: limits.rate_distortion([1, math.nan]), r"`bits` must be .* got \[1, nan\]"),
        (lambda: limits.rate_distortion("four"), "`bits` must be a number in .* got 'four'"),
        (lambda: limits.rate_distortion(1, "cauchy"), "`law` must be one of 'gaussian', 'laplace'"),
        (lambda: limits.shannon_lower_bound(math.inf), "`bits` must be .* got inf"),
        (lambda: limits.lloyd_max(1), "`levels` must be from 2 to 256, got 1"),
        (lambda: limits.lloyd_max(257), "`levels` must be from 2 to 256, got 257"),
        (lambda: limits.lloyd_max(4.0), "`levels` must be an integer, got 4.0"),
        (lambda: limits.lloyd_max(4, "normal"), "`law` must be one of .* got 'normal'"),
        (lambda: limits.entropy_coded_scalar(11), r"`bits` must be a number in \[0, 10\], .* 11"),
        (lambda: limits.entropy_coded_scalar(1, None), "`law` must be one of .* got None"),
        (lambda: limits.unbiased_bound(0), r"`bits` must be a number in \(0, inf\), .* got 0"),
        (lambda: limits.from_deterministic(1.0), r"`distortion` must be a number in \[0, 1\)"),
        (lambda: limits.eden(9), "`bits` must be from 1 to 8, got 9"),
        (lambda: limits.eden(0.5), "`bits` must be an integer, got 0.5"),
        (lambda: limits.index_bits(0, 0), "`n` must be at least 1, got 0"),
        (lambda: limits.index_bits(5, 6), "`k` must be from 0 to 5, got 6"),
        (lambda: limits.gap_entropy(0), r"`density` must be a number in \(0, 1\], .* got 0"),
        (lambda: worst_case.omega_l2(0, 1), "`size` must be at least 1, got 0"),
        (lambda: worst_case.omega_max(8, 0), "`steps` must be at least 1, got 0"),
        (lambda: worst_case.omega_exponential_l2(8, 0), "`nonzero` must be at least 1, got 0"),
        (lambda: worst_case.omega_natural(8, True), "`nonzero` must be an integer, got True"),
        (
            lambda: worst_case.omega_natural(8, 3, p=0.5),
            r"`p` must be a number at least 1.0, got 0.5",
        ),
    ]:
        with pytest.raises(ValueError, match=said):
            make()

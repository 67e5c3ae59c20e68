"""Adaptive levels: golden values, the exact variance, optima by brute force, degenerate laws."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxcomp.quantize import adaptive

LAWS = {
    "gaussian": lambda rng, shape: rng.standard_normal(shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "cubed": lambda rng, shape: rng.standard_normal(shape) ** 3,
}
SETTLED = 100
EMPTY = adaptive.Histogram(jnp.zeros(adaptive.BINS), jnp.zeros(adaptive.BINS))

_alq = jax.jit(adaptive.alq, static_argnames=("interior", "sweeps"))
amq = jax.jit(adaptive.amq, static_argnames="interior")
variance = jax.jit(adaptive.variance)
histogram = jax.jit(adaptive.histogram)


def alq(law, interior, sweeps=10):
    """One compilation for what is meant, however it is called."""
    return _alq(law, interior=interior, sweeps=sweeps)


@functools.cache
def magnitudes(law, size, n=None):
    """`|x| / ‖x‖` of buckets of this law, in float64."""
    rng = np.random.default_rng(0)
    x = LAWS[law](rng, (n or adaptive.SAMPLES // size, size))
    return np.abs(x) / np.linalg.norm(x, axis=1, keepdims=True)


def histogram_of(r, weight=None):
    return histogram(jnp.asarray(r, jnp.float32), weight)


def rounding_variance(r, levels):
    """The mean of `(r − l)(l' − r)`, from the definition."""
    levels = np.asarray(levels, np.float64)
    right = np.clip(np.searchsorted(levels, r, side="right"), 1, len(levels) - 1)
    return np.mean((r - levels[right - 1]) * (levels[right] - r))


def powers_of_two(interior):
    return np.concatenate([[0], np.exp2(np.arange(-interior, 1, dtype=np.float32))])


def assert_levels(levels, interior):
    levels = np.asarray(levels)
    assert levels.dtype == np.float32
    assert levels.shape == (interior + 2,)
    assert levels[0] == 0
    assert levels[-1] == 1
    assert (np.diff(levels) > 0.99 * adaptive.SPACING).all()
    assert len(set(np.round(levels * 2**14))) == interior + 2


@pytest.mark.core("levels0-0.2922-10")
@pytest.mark.parametrize(
    ("levels", "error", "sweeps"),
    [
        ([0.04624, 0.11905], 0.2922, 10),
        ([0.01573, 0.03216, 0.05022, 0.07159, 0.10051, 0.15681], 0.0363, SETTLED),
    ],
)
def test_golden_alq_of_a_gaussian_bucket(levels, error, sweeps):
    law = adaptive.half_normal(512)
    found = alq(law, interior=len(levels), sweeps=sweeps)
    np.testing.assert_allclose(found[1:-1], levels, rtol=1e-3)
    np.testing.assert_allclose(512 * variance(law, found), error, rtol=1e-3)
    ten = alq(law, interior=len(levels), sweeps=10)
    np.testing.assert_allclose(512 * variance(law, ten), error, rtol=2e-3)


def test_golden_fixed_levels_of_a_gaussian_bucket():
    law = adaptive.half_normal(512)
    fixed = (powers_of_two(6), 0.0873), (np.linspace(0, 1, 8), 1.58), (powers_of_two(2), 3.512)
    for levels, error in fixed:
        found = 512 * variance(law, jnp.asarray(levels, jnp.float32))
        np.testing.assert_allclose(found, error, rtol=1e-3)


@pytest.mark.parametrize("size", [1, 16, 512, 8192, 2**20])
def test_half_normal_is_a_law(size):
    law = adaptive.half_normal(size)
    np.testing.assert_allclose(law.weight.sum(), 1, rtol=1e-6)
    if size >= 16:
        np.testing.assert_allclose(law.moment.sum(), np.sqrt(2 / (np.pi * size)), rtol=1e-3)
    assert_levels(alq(law, interior=6), 6)


@pytest.mark.core("cubed-8192")
@pytest.mark.parametrize("size", [512, 8192])
@pytest.mark.parametrize("law", LAWS)
def test_levels_found_on_a_half_beat_fixed_ones_on_the_other(law, size):
    """ALQ < AMQ < NUQSGD < QSGD; the levels are found on one half, and judged by the other."""
    r = magnitudes(law, size, n=2 * adaptive.SAMPLES // size)
    seen, unseen = histogram_of(r[::2]), r[1::2]
    for interior in (2, 6):
        ladder = (
            alq(seen, interior=interior),
            amq(seen, interior=interior),
            powers_of_two(interior),
            np.linspace(0, 1, interior + 2),
        )
        errors = [rounding_variance(unseen, levels) for levels in ladder]
        assert errors == sorted(errors), (interior, size * np.array(errors))


@pytest.mark.parametrize("law", LAWS)
def test_variance_is_that_of_the_samples(law):
    r = magnitudes(law, 512)
    made = histogram_of(r)
    for levels in (powers_of_two(6), np.linspace(0, 1, 8), np.array([0, 0.0123, 0.0321, 0.123, 1])):
        found = variance(made, jnp.asarray(levels, jnp.float32))
        np.testing.assert_allclose(found, rounding_variance(r, levels), rtol=1e-3)


def test_a_point_mass_is_blurred_by_less_than_its_bin():
    """A histogram knows where in a bin its mean lies, and takes it to be spread about it."""
    r = np.array([[2.0**-20, 0.003, 0.3, 0.6, 1.0]])
    for levels in ([0.0, 0.25, 0.5, 1.0], [0.0, 0.3, 0.6, 1.0]):
        found = variance(histogram_of(r), jnp.array(levels))
        blur = np.mean((r / 64) ** 2) / 3 + np.mean(r / 64) / 2 * (0.3 in levels)
        np.testing.assert_allclose(found, rounding_variance(r, levels), atol=float(blur))


@pytest.mark.core("cubed")
@pytest.mark.parametrize("law", ["gaussian", "cubed"])
def test_alq_is_the_optimum_by_brute_force(law):
    """Within 1 % of the best three interior levels among all those on a grid."""
    r = np.sort(magnitudes(law, 512).ravel())
    grid = np.concatenate([[0], np.geomspace(0.004, 0.6, 70), [1]])
    sums = [np.concatenate([[0], np.cumsum(r**power)]) for power in range(3)]
    zeroth, first, second = (total[np.searchsorted(r, grid, side="right")] for total in sums)
    low, high = grid[:, None], grid[None, :]
    mass, mean, square = (total[None, :] - total[:, None] for total in (zeroth, first, second))
    cost = (-square + (low + high) * mean - low * high * mass) / len(r)
    a, b, c = np.array(list(itertools.combinations(range(1, 71), 3))).T
    best = np.min(cost[0, a] + cost[a, b] + cost[b, c] + cost[c, -1])
    found = rounding_variance(r, alq(histogram_of(r[None]), interior=3))
    assert 0.97 * best < found < 1.01 * best


@pytest.mark.parametrize("law", LAWS)
def test_amq_is_the_optimum_by_brute_force(law):
    r = magnitudes(law, 512)
    levels = amq(histogram_of(r), interior=6)
    assert_levels(levels, 6)
    np.testing.assert_allclose(levels[1:], levels[-2] ** np.arange(6.0, -1, -1), rtol=1e-4)
    tried = [
        np.concatenate([[0], p ** np.arange(6.0, -1, -1)]) for p in np.linspace(0.05, 0.95, 91)
    ]
    best = min(rounding_variance(r, levels) for levels in tried)
    assert rounding_variance(r, levels) < 1.001 * best


def test_sweeps_never_add_variance():
    made = histogram_of(magnitudes("laplace", 8192))
    errors = [float(variance(made, alq(made, interior=6, sweeps=k))) for k in (0, 10, SETTLED)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]
    assert errors[1] < 1.01 * errors[-1]


def test_the_best_start_is_taken():
    """Without sweeps the levels are a start, and no worse than the others."""
    even = np.linspace(0, 1, 8)
    for law in LAWS:
        r = magnitudes(law, 512)
        starts = even, powers_of_two(6), np.quantile(np.append(r, [0, 1]), even)
        made = histogram_of(r)
        found = variance(made, alq(made, interior=6, sweeps=0))
        assert found <= 1.01 * min(rounding_variance(r, levels) for levels in starts)
    uniform = histogram_of(np.linspace(0, 1, 2**16)[None])
    np.testing.assert_allclose(alq(uniform, interior=6, sweeps=0), even, atol=0.01)
    np.testing.assert_allclose(alq(uniform, interior=6), even, atol=0.01)


def test_starts():
    law = adaptive.half_normal(512)
    starts = jax.jit(lambda law: adaptive._starts(law, adaptive._tail(law), 6))(law)
    np.testing.assert_array_equal(starts[0], powers_of_two(6))
    np.testing.assert_allclose(starts[1], np.linspace(0, 1, 8), rtol=1e-6)
    # The half-normal law, and its cube root, whose deviation is √3 times as large.
    for start, deviation in zip(starts[2:], (1, 3**0.5), strict=True):
        erf = jax.scipy.special.erf(start[1:-1] * np.sqrt(256) / deviation)
        np.testing.assert_allclose(erf, np.arange(1, 7) / 7, rtol=2e-3)


def test_one_level_is_best_given_its_neighbours():
    r = magnitudes("laplace", 512)[:8]
    levels = np.array([0, 0.01, 0.02, 0.05, 0.15, 1])
    optimum = jax.jit(lambda law, levels: adaptive._optimum(adaptive._tail(law), levels))
    found = optimum(histogram_of(r), jnp.asarray(levels, jnp.float32))
    for index in range(1, 5):
        c, d = levels[index - 1], levels[index + 1]
        r_inside = r[(r > c) & (r < d)]
        errors = [rounding_variance(r_inside, [c, at, d]) for at in np.linspace(c, d, 201)[1:-1]]
        assert rounding_variance(r_inside, [c, found[index - 1], d]) < 1.001 * min(errors)


def test_many_levels():
    """Ten sweeps do, thanks to the companded start; the error falls with the square of the gap."""
    law = adaptive.half_normal(8192)
    levels = alq(law, interior=126)
    assert_levels(levels, 126)
    assert 2**-14 < levels[1] < 2**-12
    assert 8192 * variance(law, levels) < 1e-4
    assert_levels(amq(law, interior=126), 126)


def test_an_empty_histogram_gives_powers_of_two():
    for find in (alq, amq):
        np.testing.assert_array_equal(find(EMPTY, interior=6), powers_of_two(6))
    assert_levels(alq(EMPTY, interior=126), 126)
    assert_levels(amq(EMPTY, interior=126), 126)
    assert variance(EMPTY, jnp.asarray(powers_of_two(6), jnp.float32)) == 0


@pytest.mark.parametrize(
    "r",
    [
        np.zeros((4, 8)),
        np.ones((4, 8)),
        np.full((4, 8), 0.3),
        np.full((4, 8), 1e-7),
        np.full((4, 8), 1.0000001),
        np.array([[0.2, 0.7, 0.7, 0, 1.0]]),
    ],
    ids=["zeros", "ones", "alike", "tiny", "above one", "few"],
)
def test_point_masses(r):
    """Levels stay apart and in order, and nothing that can be hit is missed."""
    made = histogram_of(r)
    for find in (alq, amq):
        levels = find(made, interior=6)
        assert_levels(levels, 6)
        error = rounding_variance(np.minimum(r, 1), levels)
        np.testing.assert_allclose(variance(made, levels), error, atol=2 * adaptive.SPACING)
    assert rounding_variance(np.minimum(r, 1), alq(made, interior=6)) < 2 * adaptive.SPACING
    assert float(made.weight.sum()) == np.count_nonzero(r)


def test_what_is_not_finite_is_left_out():
    r = jnp.array([[0.5, jnp.nan], [jnp.inf, 0.25], [0.1, 0.1], [0.2, 0.2]])
    made = histogram(r, jnp.array([1.0, 2.0, jnp.nan, jnp.inf]))
    assert float(made.weight.sum()) == 3
    assert float(made.moment.sum()) == 1
    overflown = jax.tree.map(lambda x: x * jnp.inf, adaptive.half_normal(512))
    np.testing.assert_allclose(alq(overflown, interior=6), powers_of_two(6))


def test_weights_mix_the_buckets():
    """The levels suit the heavy buckets; a weight is a count; only ratios of weights matter."""
    r = np.concatenate([magnitudes("gaussian", 512)[:4], 0.5 * magnitudes("cubed", 512)[:4]])
    weight = np.repeat(np.array([3, 1], np.float32), 4)
    made = histogram_of(r, jnp.asarray(weight))
    counted = histogram_of(np.repeat(r, weight.astype(int), axis=0))
    np.testing.assert_allclose(made.weight, counted.weight, rtol=1e-5)
    np.testing.assert_allclose(made.moment, counted.moment, rtol=1e-5)
    for scale in (1e-20, 1e30):
        scaled = histogram_of(r, jnp.asarray(scale * weight, jnp.float32))
        np.testing.assert_allclose(alq(scaled, interior=6), alq(made, interior=6), rtol=1e-4)
    alone = histogram_of(r, jnp.repeat(jnp.array([1.0, 0.0]), 4))
    np.testing.assert_array_equal(alone.weight, histogram_of(r[:4]).weight)


def test_histogram_without_weights_counts():
    r = magnitudes("gaussian", 512)[:8]
    for got, want in zip(histogram_of(r), histogram_of(r, jnp.ones(8)), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(histogram_of(r).weight.sum(), r.size)


def test_histogram_by_multiplication_is_the_same():
    """The variant for accelerators, run here."""
    rng = np.random.default_rng(0)
    bins = jnp.asarray(rng.integers(0, adaptive.BINS, 4096), jnp.int32)
    column = jnp.asarray(rng.random(4096), jnp.float32)
    (want,), (got,) = adaptive._scatter(bins, column), adaptive._multiply(bins, column)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 2**18), (257, 1024), (2**17, 2), (300, 500)])
def test_samples_visit_every_bucket_and_place(shape):
    """A long array is thinned out, and no part of it is left out."""
    n, size = shape
    stride = adaptive._stride(n, size)
    index = np.arange(0, n * size, stride)
    assert adaptive.SAMPLES / 3 < len(index) <= adaptive.SAMPLES
    places = np.bincount(index % size, minlength=size)
    assert places.max() - places.min() <= 1
    ramp = (np.arange(n * size, dtype=np.float32).reshape(shape) + 1) / (n * size)
    made = histogram_of(ramp)
    assert float(made.weight.sum()) == len(index)
    np.testing.assert_allclose(made.moment.sum() / made.weight.sum(), 0.5, rtol=1e-3)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_no_magnitudes(shape):
    for leaf in histogram(jnp.zeros(shape)):
        np.testing.assert_array_equal(leaf, np.zeros(adaptive.BINS))


def update(r, weight):
    made = adaptive.histogram(r, weight)
    levels = adaptive.alq(made, 6)
    return levels, adaptive.amq(made, 6), adaptive.variance(made, levels)


@pytest.mark.full
def test_adaptive_levels_agree_under_jit_vmap_and_eager():
    """The examples in the docstrings run eagerly too, and have the golden values."""
    r = jnp.asarray(magnitudes("cubed", 512)[:16], jnp.float32).reshape(2, 8, 512)
    weight = jnp.arange(16.0).reshape(2, 8)
    eager = adaptive.histogram(r[1], weight[1])
    for want, got in zip(eager, histogram(r[1], weight[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    levels = alq(eager, interior=6)
    np.testing.assert_allclose(variance(eager, levels), adaptive.variance(eager, levels), rtol=1e-5)
    batched = jax.jit(jax.vmap(lambda *each: adaptive.alq(adaptive.histogram(*each), 6)))(r, weight)
    np.testing.assert_allclose(batched[1], levels, rtol=1e-4)


def test_nothing_is_promoted():
    like = jax.ShapeDtypeStruct((8, 512), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.float32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert all(leaf.dtype == jnp.float32 for leaf in jax.eval_shape(update, *like))
    with jax.enable_x64(True):
        assert all(leaf.dtype == jnp.float32 for leaf in jax.eval_shape(update, *like))


@pytest.mark.full
def test_workers_add_their_histograms(mesh):
    r = jnp.asarray(magnitudes("laplace", 512)[:64], jnp.float32)

    def together(r, weight):
        made = jax.lax.psum(adaptive.histogram(r, weight), "data")
        return adaptive.alq(made, 6)

    mapped = jax.shard_map(together, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P())
    weight = jnp.arange(64.0)
    whole = alq(histogram(r, weight), interior=6)
    np.testing.assert_allclose(jax.jit(mapped)(r, weight), whole, rtol=1e-4)

    # Values that differ between workers have another type; a loop would reject it at trace time.
    alone = jax.shard_map(
        lambda r, weight: update(r, weight)[0][None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    assert jax.eval_shape(alone, r, weight).shape == (8, 8)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("`r`", lambda: adaptive.histogram(jnp.ones(3))),
        ("`weight`", lambda: adaptive.histogram(jnp.ones((3, 4)), jnp.ones(4))),
        ("`size`", lambda: adaptive.half_normal(0)),
        ("`levels`", lambda: adaptive.variance(EMPTY, jnp.ones((2, 2)))),
        ("`levels`", lambda: adaptive.variance(EMPTY, jnp.ones(1))),
        ("`interior`", lambda: adaptive.alq(EMPTY, 0)),
        ("`interior`", lambda: adaptive.alq(EMPTY, 2**13)),
        ("`interior`", lambda: adaptive.amq(EMPTY, True)),
        ("`sweeps`", lambda: adaptive.alq(EMPTY, 2, sweeps=-1)),
    ],
)
@pytest.mark.wrong_types
def test_wrong_arguments_of_adaptive_levels_are_named(name, call):
    with pytest.raises(ValueError, match=name):
        call()

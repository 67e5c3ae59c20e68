"""The mathematics of every further quantizer: golden vectors, bounds, and reference errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.suite import KEY, compiled, law, nmse, roundtrip
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.codecs import natural
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.numerics import noise
from jaxcomp.quantize import levels, power, rounding, scales, steps, tables
from jaxcomp.theory import worst_case

ONE = 1 << levels.FRACTION


def up_where_below(u):
    """The dither that rounds a magnitude up exactly where u is below the probability."""
    return np.asarray(ONE - 1 - np.floor(np.asarray(u) * ONE), np.int32)


@functools.partial(jax.jit, static_argnums=0)
def decoded(grid, x, scale, dither):
    """The values of the elements on this grid, with the dither given."""
    scale = jnp.full((1, 1), scale, jnp.float32)
    step, factor = rounding.exact_step(scale, grid.magnitude, jnp.float32, precision=grid.precision)
    return grid.values(grid.codes(jnp.asarray(x, jnp.float32)[None] * factor, dither)) * step


def test_golden_nuqsgd():
    x = np.array([12.0, -4.0, 3.0, 0.0], np.float32)
    y = decoded(levels.Float(4), x, 13.0, up_where_below([0.9, 0.2, 0.8, 0.5]))
    np.testing.assert_allclose(y, [[6.5, -6.5, 3.25, 0.0]], rtol=1e-6)
    codec = Quantizer(levels=levels.Float(4), scale=scales.L2(), rounding=rounding.Stochastic())
    np.testing.assert_allclose(jaxcomp.testing.exact_variance(codec, x), 7.71875, rtol=1e-5)


def test_golden_natural_dithering():
    x = np.array([1.0, -0.375, 0.0625, 0.0], np.float32)
    codec = jaxcomp.natural_dithering(bits=3)
    np.testing.assert_allclose(jaxcomp.testing.exact_variance(codec, x), 0.02734375, rtol=1e-5)
    below = decoded(levels.Float(3), x, 1.0, np.int32(0))
    above = decoded(levels.Float(3), x, 1.0, np.int32(ONE - 1))
    np.testing.assert_allclose(below[0, 1:], [-0.25, 0.0, 0.0], rtol=1e-5)
    np.testing.assert_allclose(above[0, :3], [1.0, -0.5, 0.25], rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "chance", "want"),
    [
        (2.5, 0x5FFFFF, 2.0),
        (2.5, 0x600000, 4.0),
        (-2.75, 0x4FFFFF, 2.0),
        (-2.75, 0x500000, 4.0),
        (1.0, 0x7FFFFF, 1.0),
        (0.0, 0x7FFFFF, 0.0),
        (1e-39, 0x7FFFFF, 0.0),
        (3.4e38, 0x7FFFFF, 2.0**127),
    ],
)
def test_golden_natural_compression(x, chance, want):
    field = int(natural.exponents(jnp.float32(x), chance))
    assert want == (0.0 if field == 0 else 2.0 ** (field - 127))


def test_golden_mxfp4():
    y = jaxcomp.roundtrip(jaxcomp.mx("mxfp4"), 0, jnp.array([7, -5, 2.5, 0.3, 0.25, -0.1]))
    np.testing.assert_array_equal(y, [6, -4, 2, 0.5, 0, 0])
    away = jaxcomp.roundtrip(jaxcomp.mx("mxfp4", rounding="away"), 0, jnp.array([7.0, -5, 2.5]))
    np.testing.assert_array_equal(away, [6, -6, 3])
    covered = jaxcomp.roundtrip(jaxcomp.mx("mxfp4", rule="ceil"), 0, jnp.array([7.0, -5, 2.5]))
    np.testing.assert_array_equal(covered, [8, -4, 2])


@pytest.mark.core("mxfp4-float4_e2m1fn-floor")
@pytest.mark.parametrize(
    ("name", "dtype", "rule"),
    [
        ("mxfp4", ml_dtypes.float4_e2m1fn, "floor"),
        ("mxfp6", ml_dtypes.float6_e2m3fn, "floor"),
        ("mxfp6_e3m2", ml_dtypes.float6_e3m2fn, "floor"),
        ("mxfp8", ml_dtypes.float8_e4m3fn, "floor"),
        ("mxfp8_e5m2", ml_dtypes.float8_e5m2, "floor"),
        ("mxfp4", ml_dtypes.float4_e2m1fn, "even"),
        ("mxfp8", ml_dtypes.float8_e4m3fn, "even"),
    ],
)
def test_microscaling_elements_are_those_of_the_format(name, dtype, rule):
    """Against another implementation of each format, element by element, ties included."""
    mantissa, largest = ml_dtypes.finfo(dtype).nmant, float(ml_dtypes.finfo(dtype).max)
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((64, 512)) * 2.0 ** rng.integers(-30, 30, (64, 1))).astype(np.float32)
    x[0, :8] = np.arange(8) / 4  # Ties.
    edge = np.float32(2 - 2.0 ** -(mantissa + 1))  # From here on "even" rounds up to 2.
    x[1] /= np.abs(x[1]).max()
    x[1, ::64], x[1, 32::64] = edge, np.nextafter(edge, np.float32(0))
    blocks = x.reshape(-1, 32)
    top = np.abs(blocks).max(1, keepdims=True)
    if rule == "even":  # The largest element, with a mantissa as short as the format's.
        unit = 2.0 ** (np.floor(np.log2(top)) - mantissa)
        top = np.floor(top / unit + 0.5) * unit
    scale = 2.0 ** (np.floor(np.log2(top)) - np.floor(np.log2(largest)))
    want = np.clip(blocks / scale, -largest, largest).astype(dtype).astype(np.float64) * scale
    got = np.asarray(roundtrip(jaxcomp.mx(name, rule=rule), jnp.asarray(x))).reshape(-1, 32)
    np.testing.assert_array_equal(got, want)


def test_nvfp4_scales_are_eight_bit_floats():
    x = law("heavy", 4096)
    payload = jaxcomp.encode(jaxcomp.mx("nvfp4"), 0, x).batches[0]
    codes, unit = payload.steps
    assert (codes.dtype, codes.shape, unit.shape) == (jnp.uint8, (8, 32), (8,))
    top = np.abs(np.asarray(x).reshape(8, 32, 16)).max(2)
    want = (top / 6 / (top.max(1, keepdims=True) / 6 / 448)).astype(ml_dtypes.float8_e4m3fn)
    found = np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    # To nearest, but for the last bit of the float32 that they are multiples of.
    assert np.mean(found == want.astype(np.float32)) > 0.98
    np.testing.assert_allclose(found, want.astype(np.float32), rtol=0.13)
    assert nmse(jaxcomp.mx("nvfp4"), law("gaussian", 2**16)) < 0.0095


def test_golden_ternary():
    x = jnp.array([4.0, 3.0, 1.0, 0.0])
    y = jaxcomp.roundtrip(jaxcomp.threshold_ternary(), 0, x)
    np.testing.assert_allclose(y, [3.5, 3.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(jnp.sum((x - y) ** 2), 1.5, rtol=1e-5)
    for seed in range(6):  # The best of all sets of elements.
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(9) ** rng.integers(1, 5)
        falling = np.cumsum(np.sort(np.abs(x))[::-1])
        best = (x**2).sum() - (falling**2 / np.arange(1, 10)).max()
        y = jaxcomp.roundtrip(jaxcomp.threshold_ternary(), 0, jnp.asarray(x, jnp.float32))
        np.testing.assert_allclose(((x - np.asarray(y)) ** 2).sum(), best, rtol=1e-4)
    # The worst case: xₖ ∝ √k − √(k−1) leaves all sets alike.
    x = np.sqrt(np.arange(1, 513)) - np.sqrt(np.arange(512))
    harmonic = (1 / np.arange(1, 513)).sum()
    assert nmse(jaxcomp.threshold_ternary(), x) <= (1 - 1 / harmonic) * (1 + 1e-5)


def test_golden_random_k():
    """Over all the choices there are, the mean is the input and the error `w − 1`."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(6), jnp.float32)
    codec = jaxcomp.random_k(fraction=1 / 3)
    seen = {}
    for seed in range(200):
        y = np.asarray(roundtrip(codec, x, noise.fold(KEY, seed)))
        seen[tuple(np.flatnonzero(y))] = y
    assert sorted(seen) == list(itertools.product(range(3), range(3, 6)))
    all_of_them = np.stack(list(seen.values()))
    np.testing.assert_allclose(all_of_them.mean(0), x, rtol=1e-5)
    error = ((all_of_them - np.asarray(x)) ** 2).sum(1).mean()
    np.testing.assert_allclose(error, 2 * float(jnp.sum(x * x)), rtol=1e-5)
    one, two = (jaxcomp.encode(codec, 3, x, worker=w).batches[0].values for w in (0, 1))
    np.testing.assert_array_equal(one, two)  # The same places on every worker.


def test_golden_averaged_ternary():
    """The mean of eight workers' codes passes without loss."""
    rng = np.random.default_rng(0)
    codec, scaler = jaxcomp.averaged_ternary(workers=8), np.float32(0.7321)
    for limit in (8, 5, 1):
        sums = rng.integers(-limit, limit + 1, 5000).astype(np.float32)
        mean = sums * scaler * np.float32(1 / 8)
        np.testing.assert_allclose(roundtrip(codec, jnp.asarray(mean)), mean, rtol=2e-6)


def test_the_mean_of_ternary_codes_comes_down_exactly(mesh):
    """17 levels hold every sum of eight codes, also where the largest sum is not eight."""
    x = np.random.default_rng(0).uniform(-1, 1, (40, 128)).astype(np.float32)
    weights = np.array([1] + 7 * [0.5], np.float32)  # So one worker has the scaler of all.
    codec = jaxcomp.terngrad(clip=None, shared=True)
    up = jaxcomp.Link(jaxcomp.Policy(codec, min_size=0, min_ndim=0))
    means = [
        jaxcomp.compressed_mean(jaxcomp.TwoShot(up, down), "data")
        for down in (None, jaxcomp.Link(jaxcomp.averaged_ternary(workers=8)))
    ]

    def run(x):
        return [tx.update(x[0], tx.init(x[0]))[0] for tx in means]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P())
    whole, narrow = map(np.asarray, jax.jit(mapped)(weights[:, None, None] * x))
    np.testing.assert_allclose(narrow, whole, rtol=2e-6)
    scaler = np.abs(x).reshape(8, -1).max(1, keepdims=True)  # Of each worker's share.
    sums = whole.reshape(8, -1) * 8 / scaler
    np.testing.assert_allclose(sums, np.rint(sums), atol=1e-4)
    assert set(np.rint(sums).ravel()) == set(range(-8, 9))
    assert np.rint(np.abs(sums).max(1)).min() < 8


def test_powers_by_roots_and_products():
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 2, 1000), jnp.float32).at[0].set(0)
    for exponent in (1.0, 2.0, 0.5, 3.25, 1 / 3, 7.9):
        want = np.asarray(x, np.float64) ** (round(exponent * 2**20) / 2**20)
        np.testing.assert_allclose(power.power(x, exponent), want, rtol=1e-5, atol=1e-30)


@pytest.mark.core("1.0")
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 7.3])
def test_norms_of_any_exponent(p):
    x = law("heavy", 700)[None]
    norm = np.asarray(compiled(scales.PNorm(p), x, np.array([[700]])))[0, 0]
    exact = (np.abs(np.asarray(x, np.float64)) ** p).sum() ** (1 / p)
    np.testing.assert_allclose(norm, exact, rtol=2e-3)  # Terms are rounded to 2⁻²¹.
    codec = jaxcomp.natural_dithering(bits=3, p=p, bucket_size=700)
    omega = worst_case.omega_natural(700, 3, p)
    assert float(jaxcomp.testing.exact_variance(codec, x) / jnp.sum(x * x)) <= omega


GRIDS = [levels.Float(3), levels.Float(7), levels.Float(7, 1), levels.Float(126, 3)]
GRIDS += [levels.MidRise(1), levels.MidRise(4), levels.Uniform(7)]


@pytest.mark.core("Float(positive=3, mantissa=0, ties='away')")
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_grids_are_unbiased_without_noise(grid):
    """The same dither for all elements, swept over its range, averages the error away."""
    x = law("heavy", 512)
    top = np.abs(x).max()
    turns = 1024
    dither = np.asarray((np.arange(turns) + 0.5) / turns * ONE, np.int32)[:, None]
    y = np.asarray(decoded(grid, x, top, dither), np.float64)
    gap = max(np.diff(np.asarray(all_values(grid)))) * top / grid.magnitude
    assert np.abs(y.mean(0) - np.asarray(x, np.float64)).max() <= gap / (2 * turns) + gap * 2**-18
    codec = Quantizer(levels=grid, scale=scales.MaxAbs(), rounding=rounding.Stochastic())
    swept = ((y - np.asarray(x, np.float64)) ** 2).mean(0).sum()
    np.testing.assert_allclose(swept, jaxcomp.testing.exact_variance(codec, x), rtol=1e-2)


def all_values(grid):
    codes = np.arange(2 ** int(np.ceil(grid.bits)), dtype=np.uint32)
    return np.unique(compiled(grid.values, codes))


@pytest.mark.parametrize("grid", [*GRIDS, tables.LloydMax(4)], ids=repr)
def test_every_value_is_a_fixed_point_of_its_grid(grid):
    """A code is worth a value that has this code; products with short steps are exact."""
    codes = np.arange(2 ** int(np.ceil(grid.bits)), dtype=np.uint32)
    values = np.asarray(compiled(grid.values, codes))
    used = np.abs(values) <= grid.magnitude  # A format may leave some unused.

    def again(codes):
        return grid.values(grid.codes(grid.values(codes) * jnp.float32(ONE), jnp.int32(ONE >> 1)))

    np.testing.assert_array_equal(np.asarray(compiled(again, codes))[used], values[used])
    assert np.abs(values[used]).max() == grid.magnitude

    def stepped(scale):
        return rounding.exact_step(scale, grid.magnitude, jnp.float32, precision=grid.precision)

    step, _ = compiled(stepped, np.float32(1.2345))
    exact = np.asarray(values, np.float64) * float(step)
    np.testing.assert_array_equal(exact, exact.astype(np.float32))


@pytest.mark.full
def test_subtracted_dither_has_an_error_that_does_not_depend_on_the_input():
    x = law("gaussian", 2**17)
    for grid in ("midtread", "midrise"):
        codec = jaxcomp.qsgd_inf(bits=4, levels=grid, subtractive=True)
        want = float(jaxcomp.testing.exact_variance(codec, x) / jnp.sum(x * x))
        np.testing.assert_allclose(nmse(codec, x), want, rtol=0.01)
        assert want < 0.52 * nmse(jaxcomp.qsgd_inf(bits=4, levels=grid), x)
    # A constant bucket, on its levels: no error without dither, one like any other's with it.
    flat = jnp.ones(512)
    assert nmse(jaxcomp.qsgd_inf(bits=4), flat) < 1e-10
    assert nmse(jaxcomp.qsgd_inf(bits=4, subtractive=True), flat) > 1e-4


def test_shared_dither_is_shared():
    x = law("gaussian", 512)
    codec = jaxcomp.qsgd_inf(bits=2, shared_dither=True)
    one, two = (jaxcomp.encode(codec, 3, x, worker=w).batches[0].words for w in (0, 1))
    np.testing.assert_array_equal(one, two)
    own = [jaxcomp.encode(jaxcomp.qsgd_inf(bits=2), 3, x, worker=w) for w in (0, 1)]
    assert (own[0].batches[0].words != own[1].batches[0].words).any()


@pytest.mark.parametrize("bits", [3, 4])
def test_nuqsgd_keeps_to_its_bound(bits):
    codec = jaxcomp.nuqsgd(bits=bits)
    omega = codec.variance_bound(512)
    assert omega == worst_case.omega_exponential_l2(512, 2 ** (bits - 1) - 1)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal(512) ** rng.integers(1, 6), jnp.float32)
        assert float(jaxcomp.testing.exact_variance(codec, x) / jnp.sum(x * x)) <= omega * (
            1 + 1e-4
        )
    if bits == 3:
        np.testing.assert_allclose(
            jaxcomp.testing.exact_variance(codec, jnp.ones(512)) / 512, omega, rtol=1e-4
        )


def test_natural_compression_meets_its_worst_case():
    x = jnp.full(2**16, 4 / 3)
    np.testing.assert_allclose(nmse(jaxcomp.natural(), x), 1 / 8, rtol=0.02)
    np.testing.assert_allclose(nmse(jaxcomp.natural(bits=8), x), 1 / 8, rtol=0.02)
    for name in ("gaussian", "heavy"):
        assert nmse(jaxcomp.natural(), law(name, 2**16)) < 1 / 8
    spread = jnp.asarray(2.0 ** np.arange(-120, 8), jnp.float32)  # 128 binades.
    y = np.asarray(roundtrip(jaxcomp.natural(bits=8), spread))
    np.testing.assert_array_equal(y[:1], 0)  # One more than eight bits hold.
    np.testing.assert_array_equal(y[1:], spread[1:])


def test_a_natural_norm_composes_as_the_paper_says():
    """`1 + ω₁₂ ≤ (1 + ω₁)(1 + ω₂)`, with 1/8 for the norm; unbiased."""
    x = law("gaussian", 2**17)
    plain = nmse(jaxcomp.natural_dithering(bits=4), x)
    composed = nmse(jaxcomp.natural_dithering(bits=4, natural_norm=True), x)
    assert plain < composed <= (1 + plain) * 9 / 8 - 1


@pytest.mark.full
def test_papers_orderings():
    """A case without such a bound: QSGDinf beats NUQSGD unless tails are very heavy."""
    x, heavy = law("gaussian", 2**18), law("heavy", 2**18)
    assert nmse(jaxcomp.nuqsgd(4), x) < nmse(jaxcomp.qsgd(4), x) / 10
    assert nmse(jaxcomp.qsgd_inf(4), x) < nmse(jaxcomp.nuqsgd(4), x)
    assert nmse(jaxcomp.nuqsgd(4), heavy) < nmse(jaxcomp.qsgd_inf(4), heavy)
    assert nmse(jaxcomp.eden(4), heavy) < nmse(jaxcomp.blockwise(4), heavy)
    assert nmse(jaxcomp.mx("nvfp4"), x) < nmse(jaxcomp.mx("mxfp4"), x)
    assert nmse(jaxcomp.threshold_ternary(), x) < nmse(jaxcomp.terngrad(), x) / 4
    assert nmse(jaxcomp.threshold_ternary("optimal"), x) <= nmse(
        jaxcomp.threshold_ternary("heuristic"), x
    )


@pytest.mark.wrong_types
def test_settings_of_quantizers_that_do_not_go_together():
    four = {"levels": levels.Uniform(7), "scale": scales.MaxAbs(), "rounding": rounding.Nearest()}
    for make, said in [
        (lambda: jaxcomp.mx("mxfp5"), "`format` must be one of 'mxfp4'"),
        (lambda: jaxcomp.mx(rounding="up"), "`rounding` must be one of 'even'"),
        (lambda: jaxcomp.eden(0), "`bits` must be a positive number, got 0"),
        (lambda: jaxcomp.eden(9), "`bits` must be a number from 0.0 to 8.0, got 9"),
        (lambda: jaxcomp.eden(scale="best"), "`scale` must be one of 'unbiased'"),
        (lambda: jaxcomp.nuqsgd(bits=8), "`bits` must be from 2 to 7, got 8"),
        (lambda: jaxcomp.natural(bits=7), "`bits` must be one of 9, 8, got 7"),
        (lambda: jaxcomp.natural_dithering(p=0.5), "`p` must be a number at least 1.0, got 0.5"),
        (lambda: jaxcomp.terngrad(scaler="mean"), "`scaler` must be one of 'max', 'clip'"),
        (lambda: jaxcomp.qsgd(levels="odd"), "`levels` must be one of 'midtread', 'midrise'"),
        (lambda: jaxcomp.random_k(fraction=0), r"`fraction` must be a number in \(0, 1\]"),
        (lambda: jaxcomp.alq(every=0), "`every` must be at least 1, got 0"),
        (
            lambda: jaxcomp.codecs.Rotated(codec=jaxcomp.sign(), block=100),
            "`block` must be one of 2, 4, 8",
        ),
        (lambda: Quantizer(**four, fit="unbiased", shared=True), "`fit='unbiased'` requires"),
        (
            lambda: Quantizer(**four, block=32, implementation="gpu"),
            "`implementation='gpu'` requires",
        ),
        (
            lambda: Quantizer(**{**four, "rounding": rounding.Subtractive()}, implementation="gpu"),
            "`implementation='gpu'` requires",
        ),
        (lambda: Quantizer(**four, block=32, shared=True), "`shared=True` requires block=None"),
        (lambda: Quantizer(**four, steps=steps.Exact), "`steps` must be an instance of a steps"),
    ]:
        with pytest.raises(ValueError, match=said):
            make()
    with pytest.raises(
        ValueError, match=r"`rounding=Subtractive\(\)` requires evenly spaced levels"
    ):
        Quantizer(levels=levels.Float(7), scale=scales.MaxAbs(), rounding=rounding.Subtractive())

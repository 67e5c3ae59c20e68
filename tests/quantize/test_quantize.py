"""The mathematics: golden vectors, unbiasedness without noise, exact variance, worst cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import compiled, slow
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import testing
from jaxcomp.backend import blocking
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.numerics import noise
from jaxcomp.quantize import levels, rounding, scales, totals

ONE = 1 << levels.FRACTION


@functools.partial(jax.jit, static_argnums=2)
def quantise(x, scale, steps, dither):
    """Codes minus offset, and decoded values, with the dither given."""
    grid = levels.Uniform(steps=steps)
    step, factor = rounding.exact_step(scale, steps, jnp.float32)
    codes = grid.codes(x * factor, jnp.asarray(dither))
    return grid.values(codes), grid.values(codes) * step


def magnitude_dither(x, u):
    """The dither that rounds |x| up exactly where u < p: mirrored for positive x."""
    u = np.asarray(u)
    return (np.where(np.asarray(x) >= 0, ONE - 1 - np.floor(u * ONE), np.floor(u * ONE))).astype(
        np.int32
    )


def test_golden_qsgd():
    x, u = jnp.array([[3.0, -4, 0, 0]]), [0.39, 0.21, 0.5, 0.5]
    norm = scales.L2()(x, jnp.array([[4]]))
    np.testing.assert_allclose(norm, [[5.0]], rtol=1e-7)
    codes, decoded = quantise(x, norm, 4, magnitude_dither(x, u))
    np.testing.assert_array_equal(codes, [[3, -3, 0, 0]])
    np.testing.assert_allclose(decoded, [[3.75, -3.75, 0, 0]], rtol=1e-6)
    codec = Quantizer(levels=levels.Uniform(4), scale=scales.L2(), rounding=rounding.Stochastic())
    np.testing.assert_allclose(testing.exact_variance(codec, x), 0.625, rtol=1e-5)


def test_subtractive_dither_is_exact_on_average_over_all_dithers(monkeypatch):
    """With every dither once, the mean of `⌊p + u⌋` and the decoder's addend is `p` exactly."""
    monkeypatch.setattr(noise, "below", lambda bits, high, low, position: position)
    rule, grid, every = rounding.Subtractive(), levels.Uniform(steps=7), jnp.arange(ONE)

    @jax.jit
    def decoded(point, every):
        codes = grid.codes(point, rule.dither(every, every, every))
        return grid.values(codes) + rule.offset(every, every, every)

    for point in (0, 1, ONE // 3, 2 * ONE + 5, -3 * ONE - 7):
        found = np.asarray(decoded(jnp.float32(point), every), np.float64)
        assert np.mean(found) * ONE == point
        assert np.abs(found - point / ONE).max() <= 0.5 + 0.5**rounding.SUBTRACTED


def test_golden_terngrad():
    g = jnp.array([[0.8, -0.3, 0.1, -0.05], [0.6, -0.9, 0.2, 0.05], [0.3, -0.2, -0.7, 0.4]])
    fired = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]], bool)
    scale = jnp.full((3, 1), jnp.max(scales.MaxAbs()(g, jnp.full((3, 1), 4))))
    u = np.where(fired, 0.0, 1 - 2**-20)
    codes, decoded = quantise(g, scale, 1, magnitude_dither(g, u))
    np.testing.assert_array_equal(np.abs(codes), fired)
    np.testing.assert_allclose(decoded.mean(0), [0.6, -0.6, 0, 0.3], atol=1e-6)
    _, factor = rounding.exact_step(scale[:1], 1, jnp.float32)
    chance = jnp.abs(g[0]) * factor / ONE
    np.testing.assert_allclose(chance[0], [8 / 9, 1 / 3, 1 / 9, 1 / 18], rtol=1e-6)
    share = np.abs(np.asarray(g[0])) / 0.9
    np.testing.assert_allclose(0.81 * (share * (1 - share)).sum(), 0.3825, rtol=1e-5)


def test_golden_sign_with_its_scale():
    x = jnp.array([3.0, -1, 2, 0.5])
    y = jaxcomp.roundtrip(jaxcomp.sign(), 0, x)
    np.testing.assert_allclose(y, [1.625, -1.625, 1.625, 1.625], rtol=1e-6)
    np.testing.assert_allclose(jnp.sum((x - y) ** 2), 3.6875, rtol=1e-6)
    delta = float(jnp.sum(jnp.abs(x)) ** 2 / (4 * jnp.sum(x * x)))
    np.testing.assert_allclose(delta, 0.74123, rtol=1e-5)
    np.testing.assert_allclose(3.6875, (1 - delta) * 14.25, rtol=1e-4)
    assert float(jaxcomp.roundtrip(jaxcomp.sign(), 0, jnp.array([0.0, -2.0]))[0]) == 1.0


def test_golden_top_k_feedback_telescopes():
    """The sum of T sent messages plus the residual equals the sum of the inputs."""
    grads = jnp.asarray(np.random.default_rng(0).standard_normal((30, 500)), jnp.float32)
    residual, sent = jnp.zeros(500), jnp.zeros(500)
    for step, g in enumerate(grads):
        message = g + residual
        arrived = jaxcomp.roundtrip(jaxcomp.top_k(fraction=0.02), step, message)
        residual, sent = message - arrived, sent + arrived
    np.testing.assert_allclose(sent + residual, grads.sum(0), atol=2e-5)


@pytest.mark.parametrize("steps", [1, 3, 7, 127])
@pytest.mark.parametrize("law", ["gaussian", "heavy"])
def test_rounding_is_unbiased_without_noise(steps, law):
    """The same dither for all elements, swept over its range, averages the error away."""
    x = np.random.default_rng(1).standard_normal((1, 512)).astype(np.float32)
    x = jnp.asarray(x**3 if law == "heavy" else x)
    scale = compiled(scales.MaxAbs(), x, np.array([[512]]))
    turns = 1024
    dither = ((np.arange(turns) + 0.5) / turns * ONE).astype(np.int32)
    decoded = np.asarray(quantise(x, scale, steps, dither[:, None])[1])
    step = float(scale[0, 0]) / steps
    bias = np.abs(decoded.mean(0, dtype=np.float64) - np.asarray(x[0], np.float64))
    assert bias.max() <= step / (2 * turns) + step * 2**-18
    codec = Quantizer(
        levels=levels.Uniform(steps), scale=scales.MaxAbs(), rounding=rounding.Stochastic()
    )
    swept = ((decoded - np.asarray(x, np.float64)) ** 2).mean(0).sum()
    slack = 512 * step**2 / turns + 1e-5 * swept
    assert abs(swept - float(testing.exact_variance(codec, x))) <= slack


@pytest.mark.full
def test_exact_variance_meets_the_samples():
    x = jnp.asarray(np.random.default_rng(2).standard_normal(2000), jnp.float32)
    for codec in (jaxcomp.qsgd_inf(bits=3), jaxcomp.qsgd(bits=4), jaxcomp.terngrad(clip=None)):
        keys = jnp.arange(400)
        draw = jax.jit(jax.vmap(lambda k, c=codec: jaxcomp.roundtrip(c, noise.fold(KEY, k), x)))
        errors = np.asarray(jnp.sum((draw(keys) - x) ** 2, 1), np.float64)
        exact = float(testing.exact_variance(codec, x))
        assert abs(errors.mean() - exact) < 6 * errors.std() / 20 + 1e-6 * exact


KEY = noise.raw(11)


def nmse(codec, x):
    return float(testing.exact_variance(codec, x) / jnp.sum(x * x))


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_max_scale_meets_its_worst_case(steps):
    """ω = ½(√(1 + (d − 1)/s²) − 1), attained by one 1 and d − 1 equal small elements."""
    d = 512
    codec = Quantizer(
        levels=levels.Uniform(steps), scale=scales.MaxAbs(), rounding=rounding.Stochastic()
    )
    omega = 0.5 * (np.sqrt(1 + (d - 1) / steps**2) - 1)
    small = (np.sqrt(1 + (d - 1) / steps**2) - 1) * steps / (d - 1)
    worst = jnp.full(d, small).at[0].set(1.0)
    np.testing.assert_allclose(nmse(codec, worst), omega, rtol=1e-4)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal(d) ** rng.integers(1, 6), jnp.float32)
        assert nmse(codec, x) <= omega * (1 + 1e-5)


def test_golden_max_scale_worst_case():
    x = jnp.full(17, (np.sqrt(17) - 1) / 16).at[0].set(1.0)
    np.testing.assert_allclose(nmse(jaxcomp.terngrad(clip=None), x), 1.5616, rtol=1e-4)
    assert nmse(jaxcomp.terngrad(clip=None), x) <= (np.sqrt(17) - 1) / 2 * (1 + 1e-6)


@pytest.mark.parametrize(("steps", "d"), [(1, 512), (3, 512), (7, 512), (7, 64), (127, 512)])
def test_l2_scale_meets_its_worst_case(steps, d):
    """ω = √d/s − 1 for d ≥ 4s², attained by equal elements; at most d/(4s²) below."""
    codec = Quantizer(
        levels=levels.Uniform(steps), scale=scales.L2(), rounding=rounding.Stochastic()
    )
    omega = np.sqrt(d) / steps - 1 if d >= 4 * steps**2 else d / (4 * steps**2)
    if d >= 4 * steps**2:
        np.testing.assert_allclose(nmse(codec, jnp.ones(d)), omega, rtol=2e-5)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        x = jnp.asarray(rng.standard_normal(d) ** rng.integers(1, 6), jnp.float32)
        assert nmse(codec, x) <= omega * (1 + 1e-4)


@pytest.mark.core("codec0-17.05-15.01-8.33")
@pytest.mark.parametrize(
    ("codec", "gaussian", "laplace", "heavy"),
    [
        (jaxcomp.qsgd(bits=2), 17.05, 15.01, 8.33),
        (jaxcomp.qsgd(bits=3), 5.02, 4.34, 2.18),
        (jaxcomp.qsgd(bits=4), 1.580, 1.334, 0.640),
        (jaxcomp.qsgd(bits=8), 0.0053, 0.0053, 0.0039),
        (jaxcomp.qsgd_inf(bits=2), 1.601, 2.419, 2.831),
        (jaxcomp.qsgd_inf(bits=3), 0.1987, 0.4060, 0.6090),
        (jaxcomp.qsgd_inf(bits=4), 0.0365, 0.0802, 0.1561),
        slow(jaxcomp.qsgd_inf(bits=4, bucket_size=8192), 0.0539, 0.1525, None),
        (jaxcomp.qsgd_inf(bits=8), 0.00011, 0.00025, 0.00078),
    ],
    ids=lambda v: v if isinstance(v, float) else None,
)
def test_error_of_scales_and_levels_on_standard_inputs(codec, gaussian, laplace, heavy):
    """Reference errors on Gaussian, Laplace and cubed Gaussian input, to the digits known."""
    rng = np.random.default_rng(4)
    n = 2**11 * max(codec.bucket_size, 512)  # As many buckets for large ones.
    laws = {
        "gaussian": (lambda: rng.standard_normal(n), gaussian),
        "laplace": (lambda: rng.laplace(size=n), laplace),
        "heavy": (lambda: rng.standard_normal(n) ** 3, heavy),
    }
    for law, (draw, want) in laws.items():
        if want is None:  # In `test_standard_inputs`.
            continue
        got = nmse(codec, jnp.asarray(draw(), jnp.float32))
        digit = 0.5 * 10.0 ** -len(str(want).split(".")[1])
        # The references are means over 2^20 elements: 2,048 small buckets, but 128 large ones.
        slack = 0.015 if codec.bucket_size <= 512 else 0.03
        # A few buckets have most of what largest cubes add up to: seeds differ by up to 6 %.
        slack = 0.03 if law == "heavy" and codec.scale == scales.MaxAbs() else slack
        assert abs(got - want) <= slack * want + digit, (law, got, want)


def test_terngrad_clips_where_it_says():
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.standard_normal(2**18) + 0.1, jnp.float32)
    sigma = float(np.std(np.asarray(x, np.float64)))
    scale = compiled(scales.ClippedMax(sigmas=2.5), x[None], np.array([[x.size]]))
    np.testing.assert_allclose(scale, 2.5 * sigma, rtol=1e-4)
    y = jaxcomp.roundtrip(jaxcomp.terngrad(), 0, x)
    assert set(np.unique(np.abs(np.asarray(y)))) == {0.0, np.float32(jnp.max(jnp.abs(y)))}
    energy = float(jnp.sum((x - y) ** 2) / jnp.sum(x**2))
    assert abs(energy - 1.008) < 0.03
    flat = jnp.full(100, -2.0)  # No deviation, and nothing to clip.
    np.testing.assert_allclose(
        compiled(scales.ClippedMax(), flat[None], np.array([[100]])), [[2.0]], rtol=1e-6
    )


def test_terngrad_takes_the_clip_itself_where_nothing_reaches_it():
    """Of elements ±1, whose deviation is 1, the step is 2.5 with `scaler="clip"`, not 1."""
    codec, x = jaxcomp.terngrad(scaler="clip"), jnp.tile(jnp.array([1.0, -1.0]), 2**15)
    y = np.asarray(jaxcomp.roundtrip(codec, 0, x))
    np.testing.assert_allclose(np.unique(y), [-2.5, 0, 2.5], rtol=1e-4)
    np.testing.assert_allclose(np.mean(y * x), 1, atol=0.02)
    np.testing.assert_array_equal(jaxcomp.roundtrip(jaxcomp.terngrad(), 0, x), x)
    beyond = jnp.asarray(np.random.default_rng(6).standard_normal(2**16), jnp.float32)
    y = np.asarray(jaxcomp.roundtrip(codec, 0, beyond))
    np.testing.assert_allclose(np.abs(y).max(), 2.5 * np.std(beyond), rtol=1e-3)
    np.testing.assert_array_equal(y, jaxcomp.roundtrip(jaxcomp.terngrad(), 0, beyond))


@pytest.mark.parametrize("size", [1, 5, 16, 511, 512, 700, 5000, 2**17 + 3])
def test_sums_are_exact_whatever_their_order(size):
    terms = np.random.default_rng(size).uniform(-1, 1, (2, size)).astype(np.float32)
    got = np.asarray(compiled(totals.total, terms), np.float64)[:, 0]
    exact = np.rint(terms.astype(np.float64) * 2**21).sum(1) / 2**21
    np.testing.assert_allclose(got, exact, rtol=2e-7)
    shuffled = np.random.default_rng(0).permutation(terms, axis=1)
    np.testing.assert_array_equal(got, np.asarray(compiled(totals.total, shuffled))[:, 0])
    tops = np.asarray(compiled(totals.max_abs, terms))[:, 0]
    np.testing.assert_array_equal(tops, np.abs(terms).max(1))


@pytest.mark.core("scale1")
@pytest.mark.parametrize("scale", [scales.L2(), scales.PNorm(3), scales.ClippedMax()])
def test_rows_that_are_read_in_parts_have_the_scales_of_each(monkeypatch, scale):
    """The last part reaches back into the one before; under `vmap`, slices would be gathers."""
    monkeypatch.setattr(blocking, "_PART", 2**16)
    x = np.random.default_rng(1).standard_normal((601, 512)).astype(np.float32)
    x[3], x[130], x[-2, 7], x[-1, 100:] = 0, x[130] * 1e30, np.nan, 0
    count = np.full((601, 1), 512, np.int32)
    count[-1] = 100
    expected = compiled(scale, x, count)

    def of_slice(longer, count):  # As the rows of a leaf that ends within a bucket.
        return scale(longer[: x.size].reshape(x.shape), count)

    longer = np.append(x.reshape(-1), np.float32(1))
    traced = jax.jit(of_slice).lower(longer, count)
    assert traced.as_text().count("dynamic_slice") >= 4
    np.testing.assert_array_equal(traced.compile()(longer, count), expected)
    if isinstance(scale, scales.L2):
        traced = jax.jit(jax.vmap(scale, in_axes=(0, None))).lower(np.stack([x, x]), count)
        assert "gather" not in traced.as_text()
        np.testing.assert_array_equal(traced.compile()(np.stack([x, x]), count)[1], expected)
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        run = jax.shard_map(scale, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        np.testing.assert_array_equal(jax.jit(run)(x, count), expected)


def test_scales_survive_extremes():
    count = np.array([[4]])
    for size in (1e-37, 1e-30, 1.0, 1e30, 1e38):
        x = np.array([[3.0, -4.0, 0.0, 0.0]], np.float32) / 4 * np.float32(size)
        for scale, factor in (
            (scales.L2(), 1.25),
            (scales.MeanAbs(), 7 / 16),
            (scales.MaxAbs(), 1),
        ):
            np.testing.assert_allclose(compiled(scale, x, count), [[factor * size]], rtol=1e-6)
    full = np.full((1, 512), 3e38, np.float32)
    assert np.isfinite(np.asarray(compiled(scales.L2(), full, np.array([[512]])))).all()
    fixed = scales.Fixed(0.5)
    assert float(compiled(fixed, full, np.array([[512]]))[0, 0]) == 0.5
    for scale in (scales.L2(), scales.MeanAbs(), scales.MaxAbs(), scales.ClippedMax(), fixed):
        assert float(compiled(scale, np.zeros((1, 4), np.float32), count)[0, 0]) == 0.0
        for bad in (np.nan, np.inf, -np.inf):
            x = np.array([[1.0, bad, 0, 0]], np.float32)
            assert not np.isfinite(float(compiled(scale, x, count)[0, 0]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("magnitude", [1, 7, 127])
def test_every_product_of_a_code_and_a_step_is_exact(dtype, magnitude):
    scale = np.random.default_rng(0).uniform(1e-4, 10, 200).astype(np.float32)
    step, factor = (
        part[:, 0] for part in rounding.exact_step(jnp.asarray(scale)[:, None], magnitude, dtype)
    )
    product = np.asarray(step, np.float64) * np.arange(-magnitude, magnitude + 1)[:, None]
    np.testing.assert_array_equal(product, product.astype(dtype).astype(np.float64))
    assert (np.asarray(step, np.float64) * magnitude * (1 + 1e-6) >= scale).all()
    np.testing.assert_allclose(np.asarray(factor) * np.asarray(step), ONE, rtol=1e-6)
    # The largest element lands on the last level, and never beyond.
    assert (scale * np.asarray(factor) <= magnitude * ONE).all()


@pytest.mark.wrong_types
def test_settings_of_quantizers_are_checked():
    for make, said in [
        (lambda: jaxcomp.qsgd(bits=1), "`bits` must be from 2 to 8, got 1"),
        (lambda: jaxcomp.qsgd(bits=4.0), "`bits` must be an integer, got 4.0"),
        (lambda: jaxcomp.qsgd_inf(bucket_size=0), "`bucket_size` must be a positive integer"),
        (lambda: jaxcomp.terngrad(clip=-1), "`sigmas` must be a number at least 0.0, got -1"),
        (lambda: jaxcomp.cast("int8"), "`dtype` must be one of 'float32', 'bfloat16'"),
        (lambda: jaxcomp.top_k(fraction=0.0), r"`fraction` must be a number in \(0, 1\], got 0.0"),
        (lambda: jaxcomp.top_k(fraction=1.5), r"`fraction` must be a number in \(0, 1\]"),
        (
            lambda: testing.exact_variance(jaxcomp.sign(), jnp.ones(3)),
            "`rounding` must be stochastic",
        ),
        (lambda: levels.Uniform(steps=200), "`steps` must be from 1 to 127, got 200"),
    ]:
        with pytest.raises(ValueError, match=said):
            make()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("steps", "step"), [(1, 2.0**-20), (7, 1.0), (127, 2.0**-90)])
def test_a_fixed_scale_rounds_to_whole_steps_and_clips(steps, step, dtype):
    """So that integers of several workers have one step, without a word between them."""
    codec = Quantizer(
        levels=levels.Uniform(steps),
        scale=scales.Fixed(steps * step),
        rounding=rounding.Nearest(),
        bucket_size=None,
    )
    whole = np.arange(-steps - 3, steps + 4)
    x = jnp.asarray(
        np.concatenate([whole, whole + 0.25, whole - 0.25, [1e30 / step]]) * step, dtype
    )
    found = np.asarray(jaxcomp.roundtrip(codec, 0, x), np.float64) / step
    rounded = np.rint(np.asarray(x, np.float64) / step)
    near = np.abs(np.asarray(x, np.float64) / step - rounded) < 0.5
    np.testing.assert_array_equal(found[near], np.clip(rounded, -steps, steps)[near])
    assert codec.contractive
    assert codec.facts.clips
    assert not codec.facts.homogeneous
    for wrong in (0.0, -1.0, 1e-39, 1e39):
        with pytest.raises(ValueError, match="`size` must be"):
            scales.Fixed(wrong)

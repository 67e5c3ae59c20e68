"""EDEN, DRIVE and the embeddings: errors, bias, rates, and work in chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import KEY, law, nmse, roundtrip, slow
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.backend import blocking
from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import noise
from jaxcomp.quantize import fits, levels, tables
from jaxcomp.theory import limits

ONE = 1 << levels.FRACTION


def test_golden_drive_scale():
    """The scales with the identity as the rotation: `‖x‖² / ‖x‖₁`, and the other two."""
    x = jnp.array([[3.0, -1.0, 2.0, 0.5]])
    grid = tables.LloydMax(1)
    values = grid.values(grid.codes(x * ONE, jnp.int32(0)))
    fit = functools.partial(fits.fit_step, levels=grid, values=values, x=x, dtype=jnp.float32)
    count = jnp.array([[4]])
    np.testing.assert_allclose(fit("unbiased", count=count), [[2.19231]], rtol=1e-5)
    np.testing.assert_allclose(fit("least_squares", count=count), [[1.625]], rtol=1e-6)
    np.testing.assert_allclose(fit("norm", count=count), [[np.sqrt(14.25) / 2]], rtol=1e-6)


def test_the_step_does_not_depend_on_what_padding_decodes_to():
    """The codes of padding may have values that are not zero."""
    x, count = jnp.array([[3.0, -1.0, 2.0, 0.0, 0.0]]), jnp.array([[3]])

    @jax.jit
    def steps(values):
        found = [
            fits.fit_step(fit, tables.LloydMax(2), values, x, count, jnp.float32)
            for fit in fits.FITS[1:]
        ]
        return jnp.stack(found)

    signs = jnp.array([[1.0, -1.0, 1.0]])
    padded = (jnp.pad(signs, ((0, 0), (0, 2)), constant_values=value) for value in (0, 1))
    none, some = map(steps, padded)
    assert (none > 0).all()
    np.testing.assert_array_equal(none, some)


@pytest.mark.full
@pytest.mark.parametrize(
    "laws", [("gaussian", "heavy"), slow(("gaussian", "heavy", "laplace"))], ids=len
)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_meets_its_error(bits, laws):
    """D/(1 − D) on dense input, the same whatever the law; D with the scale of least error."""
    want = limits.eden(bits)
    np.testing.assert_allclose(want, [0.5708, 0.1331, 0.0358, 0.0096][bits - 1], rtol=6e-3)
    for name in laws:
        x = law(name, 2**18)
        np.testing.assert_allclose(nmse(jaxcomp.eden(bits), x), want, rtol=0.02)
        # Short buckets are a little less than Gaussian, and their error is a little less.
        short = nmse(jaxcomp.eden(bits, bucket_size=512), x)
        known = [0.548, 0.127, 0.034, 0.0091][bits - 1] if name == "heavy" else want
        np.testing.assert_allclose(short, known, rtol=0.05)
        assert short < 1.02 * want
    least = jaxcomp.eden(bits, scale="minimum_error")
    np.testing.assert_allclose(nmse(least, x), want / (1 + want), rtol=0.02)
    length = jnp.linalg.norm(roundtrip(jaxcomp.eden(bits, scale="norm"), x)) / jnp.linalg.norm(x)
    np.testing.assert_allclose(length, 1, rtol=1e-4)
    distance = want / limits.unbiased_bound(bits)
    np.testing.assert_allclose(distance, [1.71, 2.0, 2.25, 2.45][bits - 1], rtol=6e-3)


@pytest.mark.core("0.25")
@pytest.mark.parametrize("bits", [0.25, 0.5, 1.5, 2.25])
def test_eden_at_rates_between(bits):
    x = law("heavy", 2**18)
    codec = jaxcomp.eden(bits)
    if bits < 1:
        want = np.pi / 2 / bits - 1
    else:
        whole = int(bits)
        want = (bits - whole) * limits.eden(whole + 1) + (1 - bits + whole) * limits.eden(whole)
    np.testing.assert_allclose(nmse(codec, x), want, rtol=0.03)
    rate = 8 * jaxcomp.wire_bytes(codec, x) / x.size
    assert bits <= rate <= bits + 2.1 * 32 / 4096
    assert not codec.unbiased  # With one rotation.
    assert jaxcomp.eden(bits, rotations=2).unbiased


def mean_of(codec, x, draws=4096):
    def total(start):
        keys = jax.vmap(lambda i: noise.fold(KEY, i))(start + jnp.arange(256, dtype=jnp.uint32))
        return jnp.mean(jax.vmap(lambda key: jaxcomp.roundtrip(codec, key, x))(keys), 0)

    starts = jnp.arange(0, draws, 256, dtype=jnp.uint32)
    return np.asarray(jax.jit(lambda: jnp.mean(jax.lax.map(total, starts), 0))())


@pytest.mark.full
def test_one_rotation_is_biased_on_sparse_input_and_two_are_not():
    x = jnp.zeros(512).at[0].set(1.0).at[1].set(0.6)
    # Whatever the signs, rotated elements have the same two sizes, so few draws tell the mean.
    for bits, want in ((1, [1.36, 0.0]), (4, [1.03, 0.545])):
        once = mean_of(jaxcomp.eden(bits, bucket_size=512), x, draws=256)
        np.testing.assert_allclose(once[:2], want, atol=0.005)
    assert not jaxcomp.eden(1).unbiased
    twice = mean_of(jaxcomp.eden(1, bucket_size=512, rotations=2), x)
    np.testing.assert_allclose(twice[:2], [1.0, 0.6], atol=0.012)


@pytest.mark.full
def test_near_democratic_coding_beats_plain_dithering_at_equal_bits():
    """x = randn³ of 1,000 elements; bits counted as they are sent."""
    x = law("heavy", 1000 * 64).reshape(64, 1000)
    plain, spread = [], []
    for bits in (1, 2, 3, 4):
        codec = jaxcomp.qsgd_inf(bits=bits, levels="midrise", bucket_size=1000)
        plain.append(nmse(codec, x))
        spread.append(nmse(jaxcomp.ndsc(bits=bits, bucket_size=1000), x))
    np.testing.assert_allclose(plain, [120, 13.5, 2.29, 0.509], rtol=0.12)
    np.testing.assert_allclose(spread, [10.2, 0.833, 0.157, 0.0342], rtol=0.12)
    assert min(np.divide(plain, spread)) > 11
    half, row = jaxcomp.ndsc(bits=0.5, bucket_size=1024), x.reshape(-1)[:1024]
    found = mean_of(half, row, draws=8192)
    assert half.codec.power == 1
    error = np.linalg.norm(found - np.asarray(row)) / np.linalg.norm(row)
    # √(ω/draws) = 0.05, with ω = (1 + 10.2)/R − 1; without the factor 1/R it would be a half.
    assert error < 0.15


def test_no_rotated_element_is_large():
    """`‖z‖∞ ≤ 2√(log(2N)/N) ‖x‖` in 200 buckets; in the mean `√2` is enough in place of 2."""
    n, size = 40, 1024
    single, flat = np.zeros((n, size), np.float32), np.ones((n, size), np.float32)
    single[np.arange(n), np.arange(n) * 25] = 1
    wave = np.where(np.arange(size) & 8, -flat, flat)  # As a row of the transform.
    draws = [law(name, n * size).reshape(n, size) for name in ("gaussian", "heavy")]
    x = np.concatenate([*draws, single, flat, wave])
    rotate = jax.jit(jaxcomp.ndsc(bits=4, bucket_size=size).rotate)
    z = np.asarray(rotate(batches_.batch_key(KEY, 0, 0), x), np.float64)
    length = np.linalg.norm(z, axis=1)
    units = length / np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(units, units[0], rtol=1e-5)
    peaks, bound = np.abs(z).max(1) / length, np.sqrt(np.log(2 * size) / size)
    assert peaks.max() <= 2 * bound
    assert peaks.reshape(-1, n).mean(1).max() <= np.sqrt(2) * bound


def error_of_even_levels(bits, dithered, size=4096):
    """The error of Gaussian elements, with levels up to the largest of as many elements."""
    z = np.random.default_rng(1).standard_normal((256, size))
    top = np.abs(z).max(1, keepdims=True)
    if dithered:
        step = 2 * top / (2**bits - 1)
        below = (z + top) % step
        error = below * (step - below)
    else:
        step = 2 * top / 2**bits
        error = (z % step - step / 2) ** 2
    return error.sum() / (z * z).sum()


@pytest.mark.core("codec0-1-True")
@pytest.mark.parametrize(
    ("codec", "bits", "dithered"),
    [
        (jaxcomp.rotated_uniform(bits=1), 1, True),
        (jaxcomp.rotated_uniform(bits=4), 4, True),
        (jaxcomp.ndsc(bits=1, dithered=False), 1, False),
        (jaxcomp.ndsc(bits=3, dithered=False), 3, False),
    ],
)
def test_even_levels_see_gaussian_elements(codec, bits, dithered):
    found = nmse(codec, law("heavy", 2**18))
    np.testing.assert_allclose(found, error_of_even_levels(bits, dithered), rtol=0.03)
    if dithered:
        assert found <= (2 * np.log(2 * 4096) + 2) / (2**bits - 1) ** 2


@pytest.mark.full
def test_democratic_coding_meets_its_error():
    """As in `docs/codecs.md`; at 1.5 bits that is less than half of NDSC's, dithered or not."""
    x = law("heavy", 2**17)
    low = nmse(jaxcomp.dsc(bits=1.5), x)
    np.testing.assert_allclose(low, 3.1, rtol=0.05)
    np.testing.assert_allclose(nmse(jaxcomp.dsc(bits=3), x), 0.29, rtol=0.05)
    nearest = nmse(jaxcomp.dsc(bits=1.5, dithered=False), x)
    for found, dithered in ((low, True), (nearest, False)):
        # Of NDSC's elements half have one bit, and half have two.
        assert found < np.mean([error_of_even_levels(bits, dithered) for bits in (1, 2)]) / 2


@pytest.mark.full
def test_a_shared_rotation_is_undone_once_after_the_sum():
    """Eight payloads of a shared rotation are added first, with one transform; it is the same."""
    codec = jaxcomp.rotated_uniform(bits=6)
    x = law("gaussian", 4096)
    payloads = [jaxcomp.encode(codec, 1, x, worker=w).batches[0] for w in range(8)]
    key = batches_.batch_key(noise.raw(1), 0, 0)
    own = jnp.stack([batches_.batch_key(noise.raw(1), 0, w).own for w in range(8)])
    like = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *payloads)
    total = codec.decode_sum(key._replace(own=own), stacked, like)
    each = sum(codec.decode(key._replace(own=own[w]), payloads[w], like) for w in range(8))
    np.testing.assert_allclose(total, each, atol=1e-4)
    np.testing.assert_allclose(total[0] / 8, x, atol=0.2)


@pytest.mark.full
@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_rows_in_chunks_are_the_same_bits(check_vma, mesh, monkeypatch):
    """Two buckets at a time, and the last one again: under `jit`, `vmap` and `shard_map`."""
    codec, workers = jaxcomp.eden(2, bucket_size=512), mesh.shape["data"]
    x = jnp.stack([law("heavy", 7 * 512, seed) for seed in range(workers)])
    # In a shape of its own: what is compiled for the other must know the smaller chunks.
    want = [jaxcomp.roundtrip(codec, 5, x[i].reshape(7, 512), worker=i) for i in range(workers)]
    want = [row.reshape(-1) for row in want]
    monkeypatch.setattr(blocking, "_CHUNK", 1024)

    def run(x, worker):
        return jaxcomp.roundtrip(codec, 5, x, worker=worker)

    assert "while" in jax.jit(run).lower(x[1], 1).as_text()
    np.testing.assert_array_equal(jax.jit(run)(x[1], 1), want[1])
    many = jax.jit(jax.vmap(run))(x, jnp.arange(workers, dtype=jnp.uint32))
    mapped = jax.shard_map(
        lambda x: run(x[0], jax.lax.axis_index("data"))[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    for found in (many, jax.jit(mapped)(x)):
        np.testing.assert_array_equal(found, jnp.stack(want))

"""Rotations: the transform against its definition, the same bits in every mode, the embedding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.lowering import lowered, mesh_of
from jax.sharding import PartitionSpec as P

from jaxcomp.backend import xla
from jaxcomp.numerics import noise
from jaxcomp.rotate import embedding, hadamard

BLOCK = 64


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def seeds_of(n, key=7):
    return noise.seeds(noise.raw(key), jnp.uint32(0), n)


def butterflies(x, block):
    """The definition: one stage after another, in float32, the largest stride first."""
    y, stride = x.reshape(-1, block), block // 2
    while stride:
        pairs = y.reshape(len(y), -1, 2, stride)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        y, stride = y.reshape(-1, block), stride // 2
    return y.reshape(x.shape)


@pytest.mark.core("2-5-3")
@pytest.mark.parametrize(
    ("block", "n", "count"),
    # A CPU works in chunks of 2^19 elements: one, several, and some with a rest.
    [(2, 5, 3), (64, 7, 1), (512, 2049, 1), (1024, 3, 2), (4096, 150, 2), (8192, 131, 1)],
)
def test_transform_is_the_butterfly_network_bit_for_bit(block, n, count):
    x = normal(n, count * block)
    np.testing.assert_array_equal(hadamard.transform(jnp.asarray(x), block), butterflies(x, block))


def test_golden():
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    np.testing.assert_array_equal(hadamard.transform(x, 4) / 2, [[5.0, -1.0, -2.0, 0.0]])
    # H[i, j] = (-1)^popcount(i & j), element by element.
    i = np.arange(16)
    want = 1 - 2.0 * (np.bitwise_count(i[:, None] & i) & 1)
    np.testing.assert_array_equal(hadamard.transform(jnp.eye(16), 16), want)


@pytest.mark.core("2")
@pytest.mark.parametrize("block", [2, 32, 4096])
def test_small_integers_come_back_exactly(block):
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 10, (3, 2 * block)), jnp.float32)
    high, low = seeds_of(3)
    z = hadamard.rotate(x, high, low, block)
    np.testing.assert_array_equal(hadamard.unrotate(z, high, low, block), block * x)
    np.testing.assert_array_equal((z**2).sum(1), block * (x**2).sum(1))


def test_rotate_is_an_isometry_with_unrotate_as_its_adjoint():
    x, y = jnp.asarray(normal(5, 2048)), jnp.asarray(normal(5, 2048, seed=1))
    high, low = seeds_of(5)
    there = np.asarray(hadamard.rotate(x, high, low, 1024), np.float64)
    back = np.asarray(hadamard.unrotate(y, high, low, 1024), np.float64)
    np.testing.assert_allclose(
        np.linalg.norm(there, axis=1) / 32, np.linalg.norm(x, axis=1), rtol=1e-6
    )
    np.testing.assert_allclose((there * y).sum(1), (back * x).sum(1), rtol=1e-5, atol=1e-2)


@pytest.mark.full
def test_every_mode_gives_the_same_bits():
    def there(x, high, low):
        return hadamard.rotate(x, high, low, BLOCK)

    def back(x, high, low):
        return hadamard.unrotate(x, high, low, BLOCK)

    x, (high, low) = jnp.asarray(normal(12, 2 * BLOCK)), seeds_of(12)
    position = jnp.arange(2 * BLOCK, dtype=jnp.uint32)
    bit = np.asarray(noise.at(high[:, None], low[:, None], position)) >> 31
    sign = np.where(bit, -1, 1).astype(np.float32)
    for f, want in (
        (there, butterflies(np.asarray(x * sign), BLOCK)),
        (back, butterflies(np.asarray(x), BLOCK) * sign),
    ):
        modes = {
            "eager": f(x, high, low),
            "jit": jax.jit(f)(x, high, low),
            "vmap": jax.jit(jax.vmap(f))(*(y.reshape(3, 4, *y.shape[1:]) for y in (x, high, low))),
            "rows alone": jnp.concatenate(
                [f(x[:5], high[:5], low[:5]), f(x[5:], high[5:], low[5:])]
            ),
            "fused": jax.jit(lambda x, *s, f=f: jnp.abs(0.125 + f(3 * x + x, *s)))(x, high, low),
            "compile_separately": jax.jit(xla.compile_separately(lambda *a, f=f: f(*a) * 3))(
                x, high, low
            ),
        }
        with jax.disable_jit():
            modes["op by op"] = f(x, high, low)
        expected = dict.fromkeys(modes, want)
        expected["fused"] = np.abs(np.float32(0.125) + 4 * want)
        expected["compile_separately"] = want * np.float32(3)
        for mode, got in modes.items():
            np.testing.assert_array_equal(got.reshape(x.shape), expected[mode], err_msg=mode)


@pytest.mark.full
def test_a_large_array_gives_the_bits_of_its_parts():
    x, (high, low) = jnp.asarray(normal(300, 4096)), seeds_of(300)
    for f in (hadamard.rotate, hadamard.unrotate):
        whole, part = f(x, high, low, 4096), f(x[255:260], high[255:260], low[255:260], 4096)
        np.testing.assert_array_equal(whole[255:260], part)


def test_in_shard_map(mesh):
    x, (high, low) = jnp.asarray(normal(16, 2 * BLOCK)), seeds_of(16)
    f = functools.partial(hadamard.rotate, block=BLOCK)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    np.testing.assert_array_equal(mapped(x, high, low), f(x, high, low))


def test_signs_are_random():
    n, block = 256, 512
    high, low = seeds_of(n)
    # What H D H shows of the signs: D alone, applied to ones.
    ones = jnp.zeros((n, 2 * block)).at[:, ::block].set(1.0)
    sign = np.asarray(hadamard.unrotate(ones, high, low, block))
    assert set(np.unique(sign)) == {-1.0, 1.0}
    limit = 6 / np.sqrt(sign.size)
    assert abs(sign.mean()) < limit
    for other in (np.roll(sign, 1, 0), np.roll(sign, 1, 1), np.roll(sign, block, 1)):
        assert abs((sign * other).mean()) < limit
    assert np.abs(sign.mean(0)).max() < 6 / np.sqrt(n)
    assert np.abs(sign.mean(1)).max() < 6 / np.sqrt(2 * block)
    other = hadamard.unrotate(ones, *seeds_of(n, key=8), block)
    assert abs((sign * np.asarray(other)).mean()) < limit


def test_zeros_stay_zero_and_a_non_finite_element_spoils_its_block_alone():
    x = np.zeros((4, 2 * BLOCK), np.float32)
    x[1, 5], x[2, BLOCK], x[3, 7] = np.nan, np.inf, 1.0
    high, low = seeds_of(4)
    for f in (hadamard.rotate, hadamard.unrotate):
        finite = np.isfinite(f(jnp.asarray(x), high, low, BLOCK)).reshape(4, 2, BLOCK)
        np.testing.assert_array_equal(finite.all(2), [[1, 1], [0, 1], [1, 0], [1, 1]])
        np.testing.assert_array_equal(finite.any(2), [[1, 1], [0, 1], [1, 0], [1, 1]])
        assert not np.any(f(jnp.asarray(x[:1]), high[:1], low[:1], BLOCK))


def test_no_rows_and_no_elements():
    none, some = jnp.zeros(0, jnp.uint32), jnp.zeros(3, jnp.uint32)
    assert hadamard.rotate(jnp.zeros((0, 8)), none, none, 8).shape == (0, 8)
    assert hadamard.rotate(jnp.zeros((3, 0)), some, some, 8).shape == (3, 0)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for(platform):
    def run(x, high, low):
        z = hadamard.rotate(x, high, low, 4096)
        z = z + embedding.democratic(x, high, low, 3000, 4096)
        return hadamard.unrotate(z, high, low, 4096)

    text = lowered(run, jnp.zeros((300, 4096)), *seeds_of(300), mesh=mesh_of(platform))
    assert "optimization_barrier" in text
    assert "dynamic_update_slice" not in text  # What a CPU does.
    assert "stablehlo.dot" not in text


@pytest.mark.parametrize("block", [0, 1, 3, 96, 2**16, 4.0, None])
@pytest.mark.wrong_types
def test_only_powers_of_two_are_blocks(block):
    with pytest.raises(ValueError, match="`block` must be a power of two from 2 to 32768"):
        hadamard.transform(jnp.zeros((2, 96)), block)


@pytest.mark.parametrize("x", [jnp.zeros((2, 96)), jnp.zeros(64), jnp.zeros((2, 64), jnp.bfloat16)])
@pytest.mark.wrong_types
def test_only_whole_blocks_of_float32(x):
    high, low = seeds_of(2)
    for f in (hadamard.rotate, hadamard.unrotate):
        with pytest.raises(
            ValueError, match=r"`x` must be float32\[n, size\], the size a multiple"
        ):
            f(x, high, low, 64)


def spiky(n, block, kept, spikes=8):
    rng = np.random.default_rng(2)
    x = np.zeros((n, block), np.float32)
    for row in x:
        row[rng.choice(kept, spikes, replace=False)] = rng.standard_normal(spikes)
    return x


def heavy(n, block, kept):
    x = np.zeros((n, block), np.float32)
    x[:, kept] = normal(n, len(kept)) ** 3
    return x


@pytest.mark.core("341-512-True-0.85-spiky")
@pytest.mark.parametrize("make", [spiky, heavy])
@pytest.mark.parametrize(
    ("real", "block", "spread", "gain"),
    [(341, 512, False, 0.9), (341, 512, True, 0.85), (1024, 2048, True, 0.85)],
)
def test_democratic_coordinates_are_small_and_give_the_elements_back(
    make, real, block, spread, gain
):
    n, slots = 32, embedding.slots(real, block)
    kept = slots if spread else np.arange(real)
    x, (high, low) = make(n, block, kept), seeds_of(n)
    z = embedding.democratic(jnp.asarray(x), high, low, real, block, slots if spread else None)
    root = np.float32(block**0.5)
    back = np.asarray(hadamard.unrotate(z, high, low, block))[:, kept] / root
    error = np.linalg.norm(back - x[:, kept], axis=1) / np.linalg.norm(x, axis=1)
    assert error.max() < 1e-6
    near = np.abs(hadamard.rotate(jnp.asarray(x), high, low, block)).max(1) / root
    largest = np.abs(z).max(1)
    assert np.mean(largest / near) < gain
    assert np.all(largest <= near * 1.02)
    assert np.mean(largest * root / np.linalg.norm(x, axis=1)) < (2.4 if spread else 2.7)


@pytest.mark.full
@pytest.mark.wrong_types  # Without `jit`, the mask is an array of numpy.
def test_democratic_gives_the_same_bits_in_every_mode():
    def f(x, high, low):
        return embedding.democratic(x, high, low, 40, BLOCK)

    x, (high, low) = heavy(12, BLOCK, np.arange(40)), seeds_of(12)
    x = jnp.asarray(np.concatenate([x, 1e-20 * x], axis=1))
    want = f(x, high, low)
    np.testing.assert_array_equal(jax.jit(lambda x, *s: f(x / 4, *s) * 4)(x, high, low), want)
    batched = jax.jit(jax.vmap(f))(*(y.reshape(3, 4, *y.shape[1:]) for y in (x, high, low)))
    np.testing.assert_array_equal(batched.reshape(x.shape), want)
    np.testing.assert_array_equal(jnp.concatenate([f(x[:5], high[:5], low[:5])]), want[:5])
    with jax.disable_jit():
        np.testing.assert_array_equal(f(x[:2], high[:2], low[:2]), want[:2])


def test_democratic_survives_what_training_produces():
    x = np.zeros((6, BLOCK), np.float32)
    x[1, 3], x[2, 3], x[3, :40], x[4, 3], x[5, 3] = np.nan, np.inf, 1e-30, 3e38, -2e-38
    high, low = seeds_of(6)
    z = np.asarray(embedding.democratic(jnp.asarray(x), high, low, 40, BLOCK))
    assert not z[0].any()
    np.testing.assert_array_equal(np.isfinite(z).all(1), [True, False, False, True, True, True])
    assert not np.isfinite(z[1:3]).any()
    back = hadamard.unrotate(jnp.asarray(z[3:] / 8), high[3:], low[3:], BLOCK)[:, :40]
    np.testing.assert_allclose(back[:2], x[3:5, :40], rtol=1e-5, atol=1e33)
    np.testing.assert_allclose(back[0], x[3, :40], rtol=1e-5)


def test_a_democratic_embedding_of_whole_blocks_is_the_rotation():
    """With as many elements as coordinates there is only one embedding."""
    z, (high, low) = jnp.asarray(heavy(6, BLOCK, np.arange(BLOCK))), seeds_of(6)
    x = hadamard.unrotate(z, high, low, BLOCK) / BLOCK**0.5
    found = embedding.democratic(x, high, low, BLOCK, BLOCK)
    np.testing.assert_allclose(found, z, rtol=1e-5, atol=1e-5)


def test_slots_are_distinct_and_elements_are_as_many():
    for real, block in ((1, 2), (5, 8), (4096, 4096), (3000, 4096)):
        assert len(set(embedding.slots(real, block).tolist())) == real
    high, low = seeds_of(1)
    for real, kept, match in (
        (0, None, "`real` must be from 1"),
        (9, None, "`real` must be from 1"),
        (4, np.arange(3), "`kept` must name `real` slots, 4, got 3"),
    ):
        with pytest.raises(ValueError, match=match):
            embedding.democratic(jnp.zeros((1, 8)), high, low, real, 8, kept)

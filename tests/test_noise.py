"""Noise: keys of every kind, folding that does not commute, streams that look independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp import noise, trees

ZERO = jnp.uint32(0)


def stream(key, buckets=64, size=512):
    high, low = noise.seeds(key, jnp.uint32(0), buckets)
    position = jnp.arange(size, dtype=jnp.uint32)[None]
    return np.asarray(noise.at(high[:, None], low[:, None], position)).reshape(-1)


def test_every_kind_of_key_is_taken():
    raw = noise.raw(jax.random.key(3))
    assert raw.dtype == jnp.uint32
    assert raw.shape == (2,)
    np.testing.assert_array_equal(noise.raw(jax.random.PRNGKey(3)), raw)
    np.testing.assert_array_equal(noise.raw(np.int64(5)), noise.raw(5))
    assert noise.raw(jax.random.key(3, impl="rbg")).shape == (2,)
    np.testing.assert_array_equal(noise.raw(-1), np.array([2**32 - 1] * 2, np.uint32))


@pytest.mark.parametrize("bad", ["seed", 1.5, True, None, jnp.zeros(3, jnp.uint32)])
def test_what_is_no_key_says_so(bad):
    with pytest.raises(ValueError, match="`key` must be an integer seed"):
        noise.raw(bad)


def test_folding_is_ordered_and_injective():
    key = noise.raw(1)
    assert not np.array_equal(noise.fold(key, 3, 5), noise.fold(key, 5, 3))
    words = jnp.arange(2**16, dtype=jnp.uint32)
    folded = np.asarray(jax.vmap(noise.fold, in_axes=(None, 0))(key, words))
    assert len(np.unique(folded.view(np.uint64))) == 2**16


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (noise.fold(noise.raw(0), 1), noise.fold(noise.raw(0), 2)),
        (noise.raw(0), noise.raw(1)),
        (noise.fold(noise.raw(0), 3, 5), noise.fold(noise.raw(0), 5, 3)),
    ],
    ids=["workers", "seeds", "step-and-worker"],
)
def test_streams_are_independent_of_each_other(one, other):
    """Correlation at every small lag, and no shifted copy: seeds that lie close share nothing."""
    a, b = (stream(key).astype(np.float64) / 2**32 - 0.5 for key in (one, other))
    n = a.size
    for lag in range(16):
        correlation = 12 * np.mean(a[: n - lag] * b[lag:])
        assert abs(correlation) < 6 / np.sqrt(n - lag)
    assert not set(stream(one)[:1000]) & set(stream(other)[:100_000])


def dither(key, buckets=256, size=512):
    high, low = noise.seeds(key, jnp.uint32(0), buckets)
    position = jnp.arange(size, dtype=jnp.uint32)[None]
    return np.asarray(noise.below(20, high[:, None], low[:, None], position)).reshape(-1)


@pytest.mark.parametrize(
    ("draw", "shift"),
    [(stream, 0), (stream, 12), (stream, 24), (dither, 0), (dither, 6), (dither, 12)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_every_byte_is_uniform_along_positions_and_buckets(draw, shift):
    words = draw(noise.raw(7), buckets=256)
    if draw is dither:
        assert words.min() >= 0
        assert words.max() < 2**20
    counts = np.bincount((words >> shift) & 0xFF, minlength=256)
    expected = words.size / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < 6 * np.sqrt(2 * 255)
    pairs = np.bincount(
        ((words[:-1] >> shift) & 0xF) * 16 + ((words[1:] >> shift) & 0xF), minlength=256
    )
    chi = ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum()
    assert abs(chi - 255) < 6 * np.sqrt(2 * 255)


def test_steps_draw_fresh_noise_for_the_same_element():
    keys = jax.vmap(noise.fold, in_axes=(None, 0))(noise.raw(0), jnp.arange(4096))
    first = np.asarray(
        jax.vmap(lambda k: noise.at(*(s[0] for s in noise.seeds(k, jnp.uint32(0), 1)), ZERO))(keys)
    )
    values = first.astype(np.float64) / 2**32 - 0.5
    assert abs(values.mean()) < 6 / np.sqrt(12 * values.size)
    assert abs(12 * np.mean(values[1:] * values[:-1])) < 6 / np.sqrt(values.size)


def test_no_array_of_noise_exists():
    """The hash is inside the fused loop: the compiled encode holds nothing as large as x but x."""
    x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    encode = jax.jit(lambda key, x: jaxcomp.encode(jaxcomp.qsgd_inf(bits=4), key, x))
    compiled = encode.lower(jax.ShapeDtypeStruct((2,), jnp.uint32), x).compile()
    entry = compiled.as_text().split("ENTRY")[1]
    for dtype in ("u32", "s32", "f32"):
        made = [
            line
            for line in entry.splitlines()
            if f"= {dtype}[2048,512]" in line or f"= {dtype}[1048576]" in line
        ]
        assert all("parameter(" in line or "bitcast(" in line for line in made), made
    assert compiled.memory_analysis().temp_size_in_bytes < x.size


def test_noise_does_not_depend_on_other_leaves_before_it_in_another_batch():
    """Batches are numbered; each has a key of its own."""
    keys = [trees.batch_key(noise.raw(0), number, 0) for number in range(3)]
    assert len({tuple(np.asarray(key.own)) for key in keys}) == 3
    assert all(not np.array_equal(key.own, key.shared) for key in keys)

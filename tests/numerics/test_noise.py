"""Noise: keys of every kind, folding that does not commute, streams that look independent.

`benchmarks/noise.py` puts the same streams through dieharder.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.layout import batches as batches_
from jaxcomp.numerics import noise

ZERO = jnp.uint32(0)
MANY = 2**17
SIZE = 512
BITS = {"word": 32, "dither": 20}


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


def own_key(step=0, batch=0, worker=0, seed=7):
    """The key of a worker's private noise, as `compressed_mean` derives it."""
    return batches_.batch_key(noise.fold(noise.raw(seed), step), batch, worker).own


def natural(key, size=SIZE):
    """Seeds and positions of bucket after bucket."""
    high, low = noise.seeds(key, ZERO, MANY // size)
    return high[:, None], low[:, None], jnp.arange(size, dtype=jnp.uint32)[None]


def folded(name):
    """Seeds of bucket 0, and position 5, under keys that differ in one number."""
    high, low = jax.vmap(lambda n: noise.seeds(own_key(**{name: n}), ZERO, 1))(jnp.arange(MANY))
    return high, low, jnp.uint32(5)


CUTS = {
    "position": lambda: natural(own_key()),
    "leaf": lambda: natural(own_key(), size=MANY),
    "bucket": lambda: (*noise.seeds(own_key(), ZERO, MANY), jnp.uint32(5)),
    "step": lambda: folded("step"),
    "batch": lambda: folded("batch"),
    "worker": lambda: folded("worker"),
}


def one_round(high, low, position):
    """`noise.at` without its second round."""
    h = position + high
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D) ^ low
    return h ^ (h >> 16)


DRAWS = {"word": noise.at, "dither": functools.partial(noise.below, BITS["dither"])}
BAD = {"word": one_round, "dither": lambda *place: one_round(*place) >> (32 - BITS["dither"])}


def stream(draw, cut):
    return np.asarray(jax.jit(lambda: draw(*cut()).reshape(-1))()).astype(np.int64)


def check_uniform(values, bits):
    """Every byte, and every pair of neighbouring half bytes, takes each value equally often."""
    assert values.min() >= 0
    assert values.max() < 2**bits
    for shift in {32: (0, 8, 16, 24), 20: (0, 6, 12)}[bits]:
        part = values >> shift
        for drawn in (part & 0xFF, (part[:-1] & 0xF) * 16 + (part[1:] & 0xF)):
            counts = np.bincount(drawn, minlength=256)
            chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
            assert abs(chi - 255) < 6 * np.sqrt(2 * 255)


def check_uncorrelated(one, other, bits, lags):
    a, b = ((values + 0.5) / 2**bits - 0.5 for values in (one, other))
    for x, y in ((a, b), (b, a)):
        for lag in lags:
            x_, y_ = x[: x.size - lag], y[lag:]
            assert abs(12 * np.mean(x_ * y_)) < 6 / np.sqrt(x_.size)


@pytest.mark.core("position-word")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("cut", CUTS)
def test_noise_is_uniform_and_uncorrelated_along(cut, kind):
    values, bits = stream(DRAWS[kind], CUTS[cut]), BITS[kind]
    check_uniform(values, bits)
    assert abs(values.mean() / 2**bits - 0.5) < 6 / np.sqrt(12 * values.size)
    check_uncorrelated(values, values, bits, lags=(*range(1, 17), SIZE))


@pytest.mark.parametrize("kind", BITS)
def test_a_hash_of_one_round_is_found_out(kind):
    """The checks above are strict enough to fail."""
    with pytest.raises(AssertionError):
        check_uniform(stream(BAD[kind], CUTS["leaf"]), BITS[kind])


@pytest.mark.core("steps-word")
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"step": 1}, {"step": 2}),
        ({"batch": 1}, {"batch": 2}),
        ({"worker": 1}, {"worker": 2}),
        ({"seed": 0}, {"seed": 1}),
        ({"step": 3, "worker": 5}, {"step": 5, "worker": 3}),
    ],
    ids=["steps", "batches", "workers", "seeds", "step-and-worker"],
)
def test_streams_are_independent_of_each_other(one, other, kind):
    """Correlation at every small lag, and no shifted copy: seeds that lie close share nothing."""
    a, b = (stream(DRAWS[kind], lambda n=n: natural(own_key(**n))) for n in (one, other))
    check_uncorrelated(a, b, BITS[kind], lags=range(16))
    if kind == "word":
        assert not set(a[:1000]) & set(b[:100_000])


def test_seeds_that_nothing_mixed_are_found_out():
    """For two neighbouring seeds, one stream would be the other, shifted by one."""
    position = jnp.arange(MANY, dtype=jnp.uint32)
    a, b = (stream(noise.at, lambda h=h: (jnp.uint32(h), ZERO, position)) for h in (3, 4))
    with pytest.raises(AssertionError):
        check_uncorrelated(a, b, 32, lags=range(16))


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
    keys = [batches_.batch_key(noise.raw(0), number, 0) for number in range(3)]
    assert len({tuple(np.asarray(key.own)) for key in keys}) == 3
    assert all(not np.array_equal(key.own, key.shared) for key in keys)

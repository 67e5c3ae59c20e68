"""Predictive coding: the best guess and quantizer by their expected cost, without bias."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp import bits, testing
from jaxcomp.codecs import L2, BestOf, MaxAbs, MeanAbs, WideMax
from jaxcomp.layout import batches
from jaxcomp.numerics import noise
from jaxcomp.quantize.levels import TRIT

N, SIZE = 12, 640
KEY = batches.batch_key(noise.raw(3), 0, 0)
COUNT = jnp.full(N, SIZE, jnp.int32).at[-1].set(SIZE - 100)
REAL = np.arange(SIZE) < np.asarray(COUNT)[:, None]
CODEC = BestOf(scales=(WideMax(90), L2(), MaxAbs()), rate=0.1, bucket_size=SIZE)


@functools.partial(jax.jit, static_argnums=0)
def sent(codec, x, guesses, first=0):
    key = KEY._replace(first=jnp.asarray(first, jnp.uint32))
    payload, _ = codec.encode(key, x, COUNT, guesses)
    return payload, codec.decode(key, payload, x, codec.side(guesses))


@pytest.fixture(scope="module")
def given():
    """Buckets of sizes that differ, and three guesses, each best for some of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, SIZE)) * 10.0 ** rng.integers(-4, 2, (N, 1)) * REAL
    near = rng.integers(0, 3, N)
    guesses = np.stack([rng.normal(size=x.shape) * np.abs(x).mean(1, keepdims=True)] * 3) * REAL
    for row, best in enumerate(near):
        guesses[best, row] = x[row] * (1 + 0.02 * rng.normal(size=SIZE))
    return jnp.asarray(x, jnp.float32), jnp.asarray(guesses, jnp.float32), near


def entropy(fractions):
    fractions = np.asarray([p for p in fractions if p > 0])
    return float(-(fractions * np.log2(fractions)).sum())


def by_hand(codec, x, guesses):
    """The cost of every alternative in float64, by the formula."""
    found = np.zeros((len(guesses), len(codec.scales), N))
    for p, guess in enumerate(np.asarray(guesses, np.float64)):
        for row in range(N):
            rest = (np.asarray(x[row], np.float64) - guess[row])[REAL[row]]
            top, sizes = np.abs(rest).max(), {}
            for q, scale in enumerate(codec.scales):
                sizes = {WideMax: 90 * top, L2: np.linalg.norm(rest), MaxAbs: top}
                s = sizes[type(scale)]
                error = math.sqrt(np.mean(np.abs(rest) * s - rest**2))
                up, down = np.maximum(rest, 0).mean() / s, np.maximum(-rest, 0).mean() / s
                found[p, q, row] = error + codec.rate * entropy([up, down, 1 - up - down])
    return found


@pytest.mark.full
def test_the_choice_never_costs_more_than_any_alternative(given):
    x, guesses, near = given
    want = by_hand(CODEC, x, guesses)
    got = np.asarray(jax.jit(CODEC.costs)(x, COUNT, guesses))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-6)
    mode = np.asarray(sent(CODEC, x, guesses)[0].mode)
    chosen = want.reshape(-1, N)[mode, np.arange(N)]
    assert (chosen <= want.reshape(-1, N).min(0) * (1 + 1e-3)).all()
    assert (mode // 3 == near).mean() > 0.5
    assert len(np.unique(mode % 3)) >= 2  # Each quantizer is the best somewhere.


@pytest.mark.full
def test_costs_are_expectations_of_what_is_drawn(given):
    x, guesses, _ = given
    want = by_hand(CODEC, x, guesses)
    payload, _ = sent(CODEC, x, guesses)
    mode = np.asarray(payload.mode)
    draws = [sent(CODEC, x, guesses, first=100 * i) for i in range(150)]
    assert all((np.asarray(one.mode) == mode).all() for one, _ in draws)
    error = np.stack([np.asarray(y - x, np.float64) for _, y in draws])
    codes = np.stack([bits.unpack(one.words, bits=TRIT, size=SIZE) for one, _ in draws])
    for row in range(N):
        found = math.sqrt(np.mean(error[:, row, REAL[row]] ** 2))
        frequencies = np.bincount(codes[:, row, REAL[row]].reshape(-1), minlength=3)
        cost = found + CODEC.rate * entropy(frequencies / frequencies.sum())
        assert cost == pytest.approx(want.reshape(-1, N)[mode[row], row], rel=0.25)


@pytest.mark.full
def test_every_mode_is_decoded_without_bias(given):
    """The choice is the same for every draw, so no alternative is favoured for its noise."""
    x, _, _ = given
    rng = np.random.default_rng(2)
    x = x / jnp.abs(x).max(1, keepdims=True)
    guesses = jnp.stack([x + 0.3 * i * rng.normal(size=x.shape) * REAL for i in (1, 0.5)])
    for scale in CODEC.scales:
        for number in range(2):  # The other guess is far off.
            codec = BestOf(scales=(scale,), bucket_size=SIZE)
            both = guesses.at[1 - number].add(1e3 * REAL)
            draws = [sent(codec, x, both, first=100 * i) for i in range(150)]
            assert (draws[0][0].mode == number).all()
            y = np.stack([np.asarray(y, np.float64) for _, y in draws])
            step = np.asarray(draws[0][0].step)[:, None]
            probability = np.abs(np.asarray(x - both[number])) / step
            spread = step * np.sqrt(probability * (1 - probability) / 150)
            off = np.abs(y.mean(0) - np.asarray(x)) * REAL
            # Sums over a bucket, since few elements are drawn at all.
            total = np.abs((y.mean(0) - np.asarray(x)) * REAL).sum(1)
            assert (total < SIZE * 6 * spread.max(1) + 1e-5).all()
            mean = np.abs(((y.mean(0) - np.asarray(x)) * REAL).sum(1))
            assert (mean < 6 * np.sqrt((spread**2).sum(1)) + 1e-3).all()
            assert (off < 6 * spread + 6 * step / 150 + 1e-5).all()


@pytest.mark.full
def test_a_message_is_as_short_as_the_entropy():
    """Of one batch of many buckets, and of one leaf; beside headers of a known size."""
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=200_000) * 1e-3, jnp.float32)
    for codec, buckets in ((BestOf(), 1), (BestOf(bucket_size=10_000), 20)):
        payload = jaxcomp.encode(codec, 0, x)
        data = jaxcomp.to_bytes(codec, payload, x)
        back = jaxcomp.from_bytes(codec, data, x)
        jax.tree.map(np.testing.assert_array_equal, back, payload)
        size = x.size // buckets
        codes = np.asarray(bits.unpack(payload.batches[0].words, bits=TRIT, size=size))
        counts = np.bincount(codes.reshape(-1), minlength=3)
        ideal = x.size * entropy(counts / x.size) + buckets * (32 + 1)
        # 48 bytes of a header, 50 of the entries of three arrays, 26 for each 8,192 symbols.
        fixed = 48 + 50 + 26 * -(-x.size // 8192)
        assert len(data) <= 1.1 * ideal / 8 + fixed
        assert len(data) < 0.07 * jaxcomp.wire_bytes(codec, x)


def test_a_guess_that_is_not_finite_is_not_taken(given):
    x, guesses, near = given
    broken = guesses.at[:, 0].set(jnp.nan).at[int(near[0]), 0].set(guesses[int(near[0]), 0])
    payload, y = sent(CODEC, x, broken)
    assert payload.mode[0] // 3 == near[0]
    assert jnp.isfinite(y).all()
    payload, y = sent(CODEC, x.at[4, 2].set(jnp.inf), guesses)
    assert not jnp.isfinite(y[4]).any()
    assert jnp.isfinite(jnp.delete(y, 4, axis=0)).all()


def test_an_exact_guess_costs_nothing(given):
    x, guesses, _ = given
    payload, y = sent(CODEC, x, guesses.at[2].set(x))
    assert (payload.mode // 3 == 2).all()
    assert (payload.step == 0).all()
    np.testing.assert_array_equal(y, x)


@pytest.mark.full
def test_best_of_meets_the_contract():
    testing.check_codec(BestOf(bucket_size=512), eager=False, dtypes=("float16",))


def test_wrong_use_of_best_of_names_the_argument():
    with pytest.raises(ValueError, match="`scales` must have scales that no element exceeds"):
        BestOf(scales=(MeanAbs(),))
    with pytest.raises(ValueError, match="`scales` must be a tuple"):
        BestOf(scales=())
    with pytest.raises(ValueError, match="`rate` must be a number at least"):
        BestOf(rate=-1.0)
    with pytest.raises(ValueError, match="`times` must be a number at least"):
        WideMax(0.5)
    many = jnp.zeros((129, N, SIZE))
    with pytest.raises(ValueError, match="must be at most 256, got 2 scales and 129 guesses"):
        jax.eval_shape(functools.partial(sent, BestOf()), many[0], many)

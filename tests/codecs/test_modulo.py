"""The modulo quantizer: no wraps under its promise, the error of its steps, and its escape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp import codecs, testing
from jaxcomp.codecs import Modulo, Rotated
from jaxcomp.layout import batches
from jaxcomp.numerics import noise

N, SIZE = 64, 256
COUNT = jnp.full(N, SIZE, jnp.int32)
KEY = batches.batch_key(noise.raw(3), 0, 0)


@functools.partial(jax.jit, static_argnums=0)
def sent(codec, x, state, side, first=0):
    key = KEY._replace(first=jnp.asarray(first, jnp.uint32))
    payload, _ = codec.encode(key, x, COUNT, state)
    return payload, codec.decode(key, payload, x, side)


def pair(distance, seed=0, size=3.0):
    """Inputs, and guesses within a distance of them that is reached."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, SIZE)) * size + 7
    y = x + rng.uniform(-distance, distance, x.shape)
    y[:, 5] = x[:, 5] + distance
    y[:, 9] = x[:, 9] - distance
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)[None]


def step_of(codec, distance):
    """`ε`, as the docstring has it, with the margin for floats."""
    return 2 * distance / (codec.levels - (2 if codec.private else 1) - 2 * 2.0**-5)


@pytest.mark.core("2")
@pytest.mark.parametrize("levels", [2, 3, 4, 16, 256])
def test_subtractive_dither_never_wraps_and_has_a_uniform_error(levels):
    codec, distance = Modulo(levels=levels, bucket_size=SIZE), 0.5
    x, guess = pair(distance)
    payload, y = sent(codec, x, guess, guess)
    assert (payload.radius < 0).all()
    error = np.asarray(y, np.float64) - np.asarray(x, np.float64)
    step = step_of(codec, distance)
    assert np.abs(error).max() <= 0.51 * step
    np.testing.assert_allclose(np.mean(error**2), step**2 / 12, rtol=0.02)
    assert abs(error.mean()) < 6 * step / np.sqrt(12 * error.size)


@pytest.mark.core("3")
@pytest.mark.parametrize("levels", [3, 4, 17])
def test_private_rounding_never_wraps_and_has_a_sixth_of_a_squared_step(levels):
    codec, distance = Modulo(levels=levels, private=True, bucket_size=SIZE), 0.5
    found = []
    for seed in range(3):
        x, guess = pair(distance, seed)
        payload, y = sent(codec, x, guess, guess)
        assert (payload.radius < 0).all()
        found.append(np.asarray(y, np.float64) - np.asarray(x, np.float64))
    error, step = np.concatenate(found), step_of(codec, distance)
    assert np.abs(error).max() <= 1.01 * step
    np.testing.assert_allclose(np.mean(error**2), step**2 / 6, rtol=0.02)
    assert abs(error.mean()) < 6 * step / np.sqrt(6 * error.size)
    draws = jnp.stack([sent(codec, x, guess, guess, first=N * i)[1] for i in range(40)])
    assert float(jnp.var(draws, axis=0).max()) < 1.9 * step**2 / 4  # Of 40 draws at the worst.


@pytest.mark.parametrize(
    "codec",
    [Modulo(levels=4, bucket_size=SIZE), Modulo(levels=16, private=True, bucket_size=SIZE)],
    ids=["subtractive", "private"],
)
def test_rounding_is_unbiased_at_every_element(codec):
    x, guess = pair(0.5)
    draws = [np.asarray(sent(codec, x, guess, guess, first=N * i)[1] - x) for i in range(200)]
    error, step = np.stack(draws), step_of(codec, 0.5)
    assert np.abs(error.mean(0)).max() < 6 * step / 2 / np.sqrt(200)
    assert abs(error.mean()) < 1e-3 * 0.5


def test_a_broken_promise_is_a_catastrophe():
    """The numbers of a guess three steps off at an alphabet of four: a third of the codes wrap."""
    blind = Modulo(levels=4, distance=1.46875, blind=True, bucket_size=SIZE)
    assert step_of(blind, 1.46875) == pytest.approx(1, rel=1e-6)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(N, SIZE)) * 20, jnp.float32)
    guess = x[None] + jnp.asarray(rng.uniform(-3, 3, (1, N, SIZE)), jnp.float32)
    payload, y = sent(blind, x, (), guess)
    assert (payload.radius < 0).all()
    error = np.asarray(y, np.float64) - np.asarray(x, np.float64)
    wrapped = np.abs(error) > 1
    assert wrapped.mean() == pytest.approx(1 / 3, abs=0.02)
    np.testing.assert_allclose(np.abs(error[wrapped]), 4, atol=0.51)
    # `e` of the dither makes a wrap likelier in its own direction: ⅓(16 − ⅔) + 1/12.
    assert np.mean(error**2) == pytest.approx(5.19, rel=0.05)
    # The same alphabet, checked: buckets with a broken promise take the plain quantizer.
    checked = Modulo(levels=4, distance=1.46875, bucket_size=SIZE)
    payload, y = sent(checked, x, guess, guess)
    assert (payload.radius > 0).all()
    assert float(jnp.abs(y - x).max()) < 0.51 * step_of(checked, float(jnp.abs(x).max()))


def test_each_bucket_escapes_alone():
    x, guess = pair(0.25)
    far = guess.at[0, 3].add(100.0)  # Further off than zero is.
    far = far.at[0, 4].set(jnp.nan)
    x = x.at[5, 8].set(jnp.inf)
    payload, y = sent(Modulo(levels=8, bucket_size=SIZE), x, far, far)
    assert (payload.radius[3:5] > 0).all()
    assert jnp.isnan(payload.radius[5])
    assert jnp.isnan(y[5]).all()
    others = np.setdiff1d(np.arange(N), [3, 4, 5])
    assert (payload.radius[others] < 0).all()
    top = float(jnp.abs(x[3:5]).max())
    assert float(jnp.abs(y[3:5] - x[3:5]).max()) < 0.51 * step_of(Modulo(levels=8), top)
    # An escaped bucket is decoded without a guess, whatever the decoder knows.
    alone = sent(Modulo(levels=8, bucket_size=SIZE), x[3:5].repeat(32, 0), (), None)[0]
    assert (alone.radius > 0).all()


def test_guesses_of_zero_are_those_of_no_side_information():
    codec = Modulo(levels=16, bucket_size=SIZE)
    x, _ = pair(0.5)
    zero = jnp.zeros((1, N, SIZE))
    for a, b in zip(sent(codec, x, (), None), sent(codec, x, zero, zero), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_an_exact_guess_is_sent_back_to_sixteen_bits():
    codec = Modulo(levels=16, bucket_size=SIZE)
    x, _ = pair(0.5)
    payload, y = sent(codec, x, x[None], x[None])
    assert (payload.radius < 0).all()
    top = jnp.abs(x).max(1, keepdims=True)
    assert float(jnp.abs((y - x) / top).max()) < 0.6 * 2.0**-16


def test_a_rotation_turns_the_guess_too():
    """A guess that is off in one element costs a hundredth of what it does without a rotation."""
    x, _ = pair(0.0)
    guess = x[None].at[0, :, 7].add(4.0)
    plain = Modulo(levels=16, bucket_size=SIZE)
    errors = []
    for codec in (plain, Rotated(codec=plain)):
        payload, y = sent(codec, x, guess, guess)
        assert (payload.radius < 0).all()
        errors.append(float(jnp.mean((y - x) ** 2)))
    assert errors[1] < errors[0] / 60


@pytest.mark.core("Modulo(levels=3,*")
@pytest.mark.parametrize(
    "codec",
    [
        Modulo(levels=2, bucket_size=None),
        Modulo(levels=3, private=True, bucket_size=100),
        Modulo(levels=16, distance=0.3),
        Modulo(levels=5, distance=0.3, relative=True, bucket_size=64),
    ],
    ids=repr,
)
def test_modulo_meets_the_contract(codec):
    testing.check_codec(codec, eager=False, dtypes=("float16",))


def test_extreme_guesses_give_finite_values():
    codec = Modulo(levels=4, bucket_size=SIZE)
    x, _ = pair(1.0)
    for size in (1e-42, 1e-30, 1e30, 3e38):
        for scale in (1e-42, 1e-30, 1.0, 1e30, 3e37):
            given = x / 20 * scale
            guess = jnp.full((1, N, SIZE), size, jnp.float32)
            _, y = sent(codec, given, guess, guess)
            assert jnp.isfinite(y).all()
            assert float(jnp.abs(y - given).max()) <= 0.6 * float(jnp.abs(given).max()) + 1e-36


@pytest.mark.full
def test_messages_have_the_bytes_of_the_codes():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4096), jnp.float32)
    for codec in (jaxcomp.wyner_ziv(levels=4), jaxcomp.wyner_ziv(levels=3, rotated=False)):
        payload = jaxcomp.encode(codec, 0, x)
        data = jaxcomp.to_bytes(codec, payload, x)
        assert len(data) <= jaxcomp.message_limit(codec, x)
        back = jaxcomp.from_bytes(codec, data, x)
        jax.tree.map(np.testing.assert_array_equal, back, payload)


def test_wrong_use_of_modulo_names_the_argument():
    with pytest.raises(ValueError, match="`levels` must be from 3 to 256, got 2"):
        Modulo(levels=2, private=True)
    with pytest.raises(ValueError, match="`distance` must be a positive number with relative"):
        Modulo(levels=4, blind=True)
    with pytest.raises(ValueError, match="guided by guesses of its input"):
        codecs.Clipped(codec=Modulo(levels=4))

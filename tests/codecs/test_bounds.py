"""Declared variance, unbiasedness and length of codecs on the hardest inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import KEY, label, law

import jaxcomp
from jaxcomp.numerics import noise
from jaxcomp.theory import worst_case

SIZE = 512
ONE = jnp.zeros(SIZE).at[3].set(-2.0)
INPUTS = (
    ONE,
    ONE.at[9].set(1.2),
    jnp.ones(SIZE),
    ONE + 1e-3,
    law("gaussian", SIZE),
    law("heavy", SIZE),
)


def drawn(codec, x, draws):
    """The decoded `x` for the given number of keys."""
    numbers = jnp.arange(draws, dtype=jnp.uint32)
    return jax.jit(jax.vmap(lambda number: jaxcomp.roundtrip(codec, noise.fold(KEY, number), x)))(
        numbers
    )


@pytest.mark.parametrize(
    "codec",
    [
        jaxcomp.qsgd_inf(bits=2, subtractive=True),
        jaxcomp.qsgd(bits=3, subtractive=True),
        jaxcomp.qsgd_inf(bits=3, levels="midrise"),
        jaxcomp.qsgd(bits=2, levels="midrise", subtractive=True),
        jaxcomp.natural_dithering(bits=3, p=1.5),
        jaxcomp.natural_dithering(bits=3),
    ],
    ids=label,
)
def test_no_input_exceeds_the_bound_of_a_codec(codec):
    """A little above the bound, because the step is rounded up to a few significant bits."""
    omega = codec.variance_bound(SIZE)
    found = [float(jaxcomp.testing.exact_variance(codec, x) / jnp.sum(x * x)) for x in INPUTS]
    assert max(found) <= omega * 1.002
    evenly = codec.levels.__class__.__name__ in ("Uniform", "MidRise")
    if evenly:  # A single element reaches the bound: the zeros beside it are dithered too.
        assert found[0] > 0.99 * omega * (SIZE - 1) / SIZE


def test_subtracted_dither_is_scaled_down_by_what_it_may_cost():
    """At two bits the variance of a single element is 43 times its energy; scaled, it contracts."""
    codec = jaxcomp.codecs.Contractive(codec=jaxcomp.qsgd_inf(bits=2, subtractive=True))
    error = drawn(codec, ONE, 64) - ONE
    assert float(jnp.mean(jnp.sum(error * error, 1)) / jnp.sum(ONE * ONE)) < 1


def test_a_norm_rounded_at_random_adds_its_variance():
    plain = jaxcomp.natural_dithering(bits=4).variance_bound(SIZE)
    composed = jaxcomp.natural_dithering(bits=4, natural_norm=True).variance_bound(SIZE)
    assert composed == pytest.approx(9 / 8 * plain + 1 / 8)


@pytest.mark.core("Rotated(Q(MidRise(width=3*")
@pytest.mark.parametrize(
    "codec", [jaxcomp.rotated_uniform(3, SIZE), jaxcomp.ndsc(2, SIZE)], ids=label
)
def test_rotated_levels_keep_to_their_bound_on_average(codec):
    omega = codec.variance_bound(SIZE)
    width = codec.codec.bits
    assert omega == pytest.approx(2 * (np.log(2 * SIZE) + 1) / (2**width - 1) ** 2)
    for x in INPUTS[:3]:
        error = drawn(codec, x, 256) - x
        found = float(jnp.mean(jnp.sum(error * error, 1)) / jnp.sum(x * x))
        assert found <= omega
    assert found > omega / 20  # The bound is not arbitrarily large.
    assert codec.variance_bound(SIZE) < codec.codec.variance_bound(SIZE)
    assert worst_case.rotated_peak(1) == 1


def test_two_rotations_of_a_short_leaf_are_unbiased():
    """Padded to 64: eight elements are too few for two rotations to mix."""
    x = jnp.zeros(8).at[0].set(1.0).at[1].set(0.6)
    codec = jaxcomp.drive(rotations=2)
    assert codec.unbiased
    mean = jnp.mean(drawn(codec, x, 8192), 0)
    np.testing.assert_allclose(mean[:2], [1.0, 0.6], atol=0.04)


@pytest.mark.core("0.5")
@pytest.mark.parametrize("bits", [0.5, 1.5])
def test_norm_matching_keeps_the_length_at_fractional_rates(bits):
    x = law("heavy", 2**14)
    y = jaxcomp.roundtrip(jaxcomp.eden(bits, scale="norm"), 1, x)
    np.testing.assert_allclose(jnp.linalg.norm(y) / jnp.linalg.norm(x), 1, rtol=0.02)


def test_a_rule_for_powers_of_two_is_refused_where_there_are_none():
    with pytest.raises(ValueError, match="`rule` must be left out for 'nvfp4'"):
        jaxcomp.mx("nvfp4", rule="even")

"""The ends of the floats: the smallest steps, and the largest values of every dtype."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import few_or_all

import jaxcomp
from jaxcomp import testing
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.quantize import levels, rounding, scales
from jaxcomp.testing.bias import gaussian

# Mantissa bits, smallest element and largest element of each format, and its largest exponent.
MX = {
    "mxfp4": (1, 0.5, 6.0, 2),
    "mxfp6": (3, 0.125, 7.5, 2),
    "mxfp6_e3m2": (2, 0.0625, 28.0, 4),
    "mxfp8": (3, 2.0**-9, 448.0, 8),
    "mxfp8_e5m2": (2, 2.0**-16, 57344.0, 15),
}


def specified(format, x):
    """OCP Microscaling 1.0, in float64: an E8M0 scale for each block of 32, elements to even."""
    mantissa, unit, top, emax = MX[format]
    blocks = np.asarray(x, np.float64).reshape(-1, 32)
    largest = np.abs(blocks).max(1, keepdims=True)
    scale = 2.0 ** np.clip(np.floor(np.log2(largest)) - emax, -127, 127)
    a = np.abs(blocks) / scale
    spacing = 2.0 ** np.floor(np.log2(np.maximum(a, unit * 2**mantissa))) / 2**mantissa
    rounded = np.minimum(np.round(a / spacing) * spacing, top)
    return (np.sign(blocks) * rounded * scale).reshape(-1), scale


@pytest.mark.parametrize("format", few_or_all(["mxfp4", "mxfp8_e5m2"], MX))
def test_mx_follows_its_scales_down_to_the_smallest_float(format):
    """Where the smallest element of a block is a normal float32, no bit differs."""
    _, unit, _, emax = MX[format]
    run = jax.jit(lambda x: jaxcomp.roundtrip(jaxcomp.mx(format), 0, x))
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    lowest = round(emax - 126 - np.log2(unit))  # Exponent of the smallest largest element.
    for exponent in (-60, lowest + 3, lowest):
        largest = np.abs(x.reshape(-1, 32)).max(1, keepdims=True)
        given = np.ldexp(x.reshape(-1, 32) / 2.0 ** np.floor(np.log2(largest)), exponent)
        given = np.where(np.abs(given) < 2.0**-126, 0, given).astype(np.float32).reshape(-1)
        want, _ = specified(format, given)
        np.testing.assert_array_equal(np.asarray(run(given), np.float64), want)
    # Below, elements are multiples of the smallest normal float32, and the largest is not clipped.
    given = np.ldexp(given, 0 if lowest <= -123 else -8).astype(np.float32)
    given = np.where(np.abs(given) < 2.0**-126, 0, given)
    got = np.asarray(run(given), np.float64)
    assert np.all(got / 2.0**-126 == np.round(got / 2.0**-126))
    assert np.all(np.abs(got - given) <= np.maximum(np.abs(given) / 4, 2.0**-127))


def test_tiny_buckets_are_quantised_as_others_are():
    """Down to steps of the smallest normal float32, bit for bit."""
    x = gaussian(700)
    x = jnp.copysign(jnp.maximum(jnp.abs(x), 0.1), x)  # Nothing that would not be normal.
    for codec in (jaxcomp.qsgd_inf(bits=4), jaxcomp.blockwise(bits=4), jaxcomp.sign()):
        run = jax.jit(lambda x, codec=codec: jaxcomp.roundtrip(codec, 0, x))
        for scale in (2.0**-108, 2.0**-118):
            np.testing.assert_array_equal(run(x * scale), np.asarray(run(x)) * np.float32(scale))


@pytest.mark.full
def test_kernels_quantise_tiny_buckets_alike():
    x = (gaussian(8 * 128) * 2.0 ** -np.repeat(np.arange(100, 116, 2), 128)).astype(jnp.float32)
    want, *others = (
        jaxcomp.encode(
            dataclasses.replace(jaxcomp.qsgd_inf(bits=4, bucket_size=128), implementation=name),
            0,
            x,
        )
        for name in ("reference", "gpu_interpret", "tpu_interpret")
    )
    for got in others:
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(a, b)


def test_signs_of_tiny_buckets_are_a_contraction():
    x = gaussian(700).reshape(-1)
    for scale in (1e-30, 1e-33, 1e-36):
        y = np.asarray(jaxcomp.roundtrip(jaxcomp.sign(), 0, x * scale), np.float64) / scale
        ratio = np.sum((y - np.asarray(x)) ** 2) / np.sum(np.asarray(x, np.float64) ** 2)
        assert ratio == pytest.approx(1 - 2 / np.pi, abs=0.05)


@pytest.mark.core("Cast(dtype='float8_e4m3fn', bucket_size=512)")
@pytest.mark.parametrize(
    "codec",
    [
        jaxcomp.cast("float8_e4m3fn"),
        jaxcomp.qsgd_inf(bits=2, subtractive=True),
        Quantizer(
            levels=levels.Uniform(7),
            scale=scales.MaxAbs(),
            rounding=rounding.Subtractive(),
            block=16,
        ),
    ],
    ids=repr,
)
def test_the_largest_values_stay_finite(codec):
    testing.assert_handles_largest(codec)
    testing.assert_handles_extremes(codec, gaussian(700))


def test_double_precision_keeps_the_largest_of_single(x64):
    for codec in (
        jaxcomp.cast("float16"),
        jaxcomp.qsgd_inf(bits=4),
        jaxcomp.demo(k=2, chunk=8),
    ):
        testing.assert_handles_largest(codec, ("float64",))

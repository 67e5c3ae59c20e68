"""Errors and entropies that are known from elsewhere, on a million numbers of three laws."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.suite import KEY, law, nmse, slow

import jaxcomp
from jaxcomp.codecs.quantizer import Quantizer


@pytest.mark.core("codec0-3.512-3.004-1.47")
@pytest.mark.parametrize(
    ("codec", "gaussian", "laplace", "heavy"),
    [
        (jaxcomp.nuqsgd(bits=3), 3.512, 3.004, 1.470),
        (jaxcomp.nuqsgd(bits=4), 0.0873, 0.0891, 0.0903),
        slow(jaxcomp.nuqsgd(bits=4, bucket_size=8192), 0.335, 0.328, 0.215),
        slow(jaxcomp.qsgd(bits=4, bucket_size=8192), 9.31, 8.14, 4.34),
        slow(jaxcomp.qsgd_inf(bits=4, bucket_size=8192), 0.0539, 0.1525, 0.399),
        (jaxcomp.natural_dithering(bits=3), 0.1394, 0.2562, 0.4069),
        (jaxcomp.natural_dithering(bits=4), 0.0811, 0.0783, 0.0676),
        (jaxcomp.natural(), 0.0818, 0.0820, 0.0819),
        (jaxcomp.terngrad(), 1.008, 0.878, 0.625),
        (jaxcomp.threshold_ternary(bucket_size=None), 0.1911, 0.2636, None),
    ],
    ids=lambda v: v if isinstance(v, float) else None,
)
def test_error_on_standard_inputs(codec, gaussian, laplace, heavy):
    """Published errors, to the published digits."""
    for name, want in (("gaussian", gaussian), ("laplace", laplace), ("heavy", heavy)):
        if want is None:
            continue
        x = law(name, 2**20, seed=4)
        unclipped = isinstance(codec, Quantizer) and codec.rounding.unbiased
        got = (
            float(jaxcomp.testing.exact_variance(codec, x) / jnp.sum(x * x))
            if unclipped
            else nmse(codec, x)
        )
        digit = 0.5 * 10.0 ** -len(str(want).split(".")[1])
        slack = 0.05 if name == "heavy" else 0.03 if codec.bucket_size == 8192 else 0.015
        assert abs(got - want) <= slack * want + digit, (name, got, want)


@pytest.mark.core("codec0-0.32-0.29-0.21")
@pytest.mark.parametrize(
    ("codec", "gaussian", "laplace", "heavy"),
    [
        (jaxcomp.qsgd(bits=2), 0.32, 0.29, 0.21),
        (jaxcomp.qsgd(bits=3), 0.66, 0.61, 0.43),
        (jaxcomp.qsgd(bits=4), 1.12, 1.05, 0.76),
        (jaxcomp.qsgd(bits=8), 4.60, 4.50, 3.27),
        slow(jaxcomp.qsgd(bits=4, bucket_size=8192), 0.40, 0.36, 0.24),
        (jaxcomp.qsgd_inf(bits=2), 1.12, 0.82, 0.39),
        (jaxcomp.qsgd_inf(bits=3), 2.14, 1.67, 0.82),
        (jaxcomp.qsgd_inf(bits=4), 3.26, 2.66, 1.37),
        (jaxcomp.qsgd_inf(bits=8), 7.41, 6.75, 4.38),
        slow(jaxcomp.qsgd_inf(bits=4, bucket_size=8192), 2.92, 2.16, 0.89),
        (jaxcomp.nuqsgd(bits=3), 0.79, 0.73, 0.52),
        (jaxcomp.nuqsgd(bits=4), 3.06, 3.05, 2.25),
        slow(jaxcomp.nuqsgd(bits=4, bucket_size=8192), 1.76, 1.69, 1.17),
        (jaxcomp.natural_dithering(bits=3), 2.42, 1.94, 0.98),
        (jaxcomp.natural_dithering(bits=4), 3.58, 3.72, 2.91),
        (jaxcomp.natural(), 3.59, 3.86, 5.09),
        (jaxcomp.terngrad(), 1.22, 1.12, 0.73),
        (jaxcomp.threshold_ternary(bucket_size=None), 1.54, 1.32, None),
    ],
    ids=lambda v: v if isinstance(v, float) else None,
)
def test_entropy_on_standard_inputs(codec, gaussian, laplace, heavy):
    """The bits of an ideal entropy coder for the codes, and of one scale a bucket."""
    for name, want in (("gaussian", gaussian), ("laplace", laplace), ("heavy", heavy)):
        if want is None:
            continue
        x = law(name, 2**20, seed=4)
        got = entropy(symbols(codec, x))
        if isinstance(codec, Quantizer):
            got += 32 / (codec.bucket_size or x.size)
        slack = 0.05 if name == "heavy" else 0.01
        assert abs(got - want) <= slack * want + 0.005, (name, got, want)


def symbols(codec, x):
    """A number for each element that is the same where the code is."""
    payload = jaxcomp.encode(codec, KEY, x)
    y = np.asarray(jaxcomp.decode(codec, KEY, payload, x), np.float64)
    if not isinstance(codec, Quantizer):  # Signed powers of two.
        return y
    step = np.asarray(payload.batches[0].steps[0], np.float64).reshape(-1, 1)
    return np.rint(1024 * y.reshape(step.size, -1) / step)


def entropy(symbols):
    _, numbers = np.unique(symbols, return_counts=True)
    shares = numbers / numbers.sum()
    return float(-(shares * np.log2(shares)).sum())

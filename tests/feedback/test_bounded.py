"""A residual around a codec with large relative variance, but a small error in each element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_the_worst_bucket_leaves_a_bounded_residual(bits):
    """One large element, all others where rounding errs most; their error is `√d` times as long."""
    steps = 2 ** (bits - 1) - 1
    codec = jaxcomp.qsgd_inf(bits=bits)
    assert codec.facts.worst == pytest.approx(1 / steps)
    assert codec.variance_bound(512) >= (1 if bits < 5 else 0)
    jaxcomp.Link(codec, jaxcomp.Residual())
    x = jnp.full(512, 0.5 / steps).at[7].set(1.0)

    @jax.jit
    def loop(x):
        def step(e, key):
            e = x + e - jaxcomp.roundtrip(codec, key, x + e)
            return e, jnp.abs(e).max()

        return jax.lax.scan(step, jnp.zeros_like(x), jax.random.split(jax.random.key(0), 400))[1]

    largest = np.asarray(loop(x))
    assert largest.max() <= 1.01 / (steps - 1)
    assert largest[-100:].mean() > 0.1 / steps


def test_codecs_without_such_a_bound_are_still_refused():
    for codec in (jaxcomp.qsgd_inf(bits=2), jaxcomp.qsgd(), jaxcomp.natural_dithering(bits=2)):
        with pytest.raises(ValueError, match="may grow from step to step"):
            jaxcomp.Link(codec, jaxcomp.Residual())

"""Orthonormal bases, also of vectors that are nearly parallel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.numerics import orthonormal


@pytest.mark.parametrize("apart", [1.0, 1e-3, 1e-5])
def test_a_basis_is_orthonormal_however_close_its_vectors_are(apart):
    rng = np.random.default_rng(0)
    common = rng.standard_normal((2, 1, 300))
    vectors = jnp.asarray(common + apart * rng.standard_normal((2, 4, 300)), jnp.float32)
    (basis,) = (np.asarray(b, np.float64) for b in BASES([vectors]))
    for one, of in zip(basis, np.asarray(vectors, np.float64), strict=True):
        np.testing.assert_allclose(one @ one.T, np.eye(4), atol=2e-6)
        # The first k vectors are in the span of the first k of the basis.
        lost = of - np.tril(of @ one.T) @ one
        assert np.abs(lost).max() < 1e-5 * np.abs(of).max()


BASES = jax.jit(orthonormal.orthonormal)

"""The mean of decoded messages is added up wide, and rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp.base import decode_sum
from jaxcomp.types import Key

WORKERS = 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_mean_is_rounded_once(dtype):
    """Not a power of two, so the mean has a factor, and a narrow sum would be rounded before it."""
    rng = np.random.default_rng(0)
    codec = jaxcomp.qsgd_inf(bits=8, bucket_size=64)
    word, counts = jnp.zeros(2, jnp.uint32), jnp.full(2, 64)
    own = jnp.arange(2 * WORKERS, dtype=jnp.uint32).reshape(WORKERS, 2)
    wide, narrow = (jax.ShapeDtypeStruct((2, 64), d) for d in ("float32", dtype))
    encoded, exact = [], 0.0
    for worker in range(WORKERS):
        key = Key(word, own[worker], jnp.uint32(0))
        x = jnp.asarray(rng.standard_normal((2, 64)), dtype)
        encoded.append(codec.encode(key, x, counts, ())[0])
        exact += np.asarray(codec.decode(key, encoded[-1], wide), np.float64) / WORKERS
    payloads = jax.tree.map(lambda *rows: jnp.stack(rows), *encoded)
    keys = Key(word, own, jnp.uint32(0))
    mean = np.asarray(decode_sum.decode_mean(codec, keys, payloads, narrow))
    assert mean.dtype == dtype
    np.testing.assert_array_equal(mean, exact.astype(dtype))

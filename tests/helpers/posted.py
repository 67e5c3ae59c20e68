"""Messages for tests, and modifications by anyone who knows the format."""

import hashlib
import struct

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp

FIXED = 52
"""Bytes before the entries of the arrays."""

CODEC = jaxcomp.qsgd_inf(bits=4)
MATRIX = jax.ShapeDtypeStruct((37, 29), jnp.float32)


def draws(shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def message(codec, x, **settings):
    payload = jaxcomp.encode(codec, 5, x, worker=3)
    return payload, jaxcomp.to_bytes(codec, payload, x, **settings)


def sealed(data, secret=b""):
    """The message with the right length and checksum of its content, as anyone can compute."""
    data = bytearray(data)
    if len(data) >= FIXED:
        data[12:20] = struct.pack("<Q", len(data))
        data[36:52] = bytes(16)
        key = {"key": secret, "person": b"jaxcomp message", "digest_size": 16}
        data[36:52] = hashlib.blake2b(data, **key).digest()
    return bytes(data)

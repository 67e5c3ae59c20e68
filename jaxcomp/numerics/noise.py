"""Randomness as a function of position: keys that are folded, and noise that is hashed.

`jax.random` would cost forty times the quantise-and-pack pass that uses the noise, so noise here
is a counter-based hash that XLA fuses into that pass: no array of noise ever exists. It depends
on (key, bucket, element) and on nothing else, neither on the platform nor on a restart.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax
from jaxtyping import UInt32

from jaxcomp.backend import xla
from jaxcomp.types import Array

_GOLDEN = 0x9E3779B9
_SILVER = 0x85EBCA6B


def raw(key: Any) -> UInt32[Array, "2"]:
    """The raw `uint32[2]` form of a seed, a raw key or a typed key.

    Raw keys checkpoint, compare and travel through every tool; typed keys do not.

    Args:
        key: an integer seed, `uint32[2]`, or a `jax.random.key` of any implementation.

    Raises:
        ValueError: if `key` is none of these.

    Example:
        >>> raw(7)
        Array([0, 7], dtype=uint32)
    """
    return jnp.asarray(words(key))


def words(key: Any) -> Any:
    """Like `raw`, but a seed gives a numpy array, so that no device is used for it."""
    if isinstance(key, bool) or not hasattr(key, "dtype"):
        if isinstance(key, bool) or not isinstance(key, int):
            raise ValueError(
                f"`key` must be an integer seed, a raw key or a jax.random.key, got {key!r}"
            )
        return _halves(key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and key.shape != ():
        raise ValueError(f"`key` must be one key, got an array of keys of shape {key.shape}")
    if key.dtype == jnp.uint32 and key.shape == (2,):
        return key
    if typed or (key.dtype == jnp.uint32 and key.shape == (4,)):
        data = jax.random.key_data(key).reshape(-1) if typed else key
        pair = data[:2]
        for i in range(2, data.shape[0]):  # The keys of rbg have four words.
            pair = fold(pair, data[i])
        return pair
    concrete = not isinstance(key, core.Tracer)
    if jnp.issubdtype(key.dtype, jnp.integer) and key.shape == () and concrete:
        return _halves(int(key))
    raise ValueError(
        "`key` must be an integer seed, a raw key or a jax.random.key, "
        f"got {key.dtype}{list(key.shape)}"
    )


def _halves(seed: int) -> np.ndarray:
    seed %= 2**64
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def fold(key: UInt32[Array, "2"], *words: "Array | int") -> UInt32[Array, "2"]:
    """The key with words absorbed one after another: step, batch, worker.

    Folding is not commutative: step 3 of worker 5 is not step 5 of worker 3. For one key,
    different words always give different keys.

    Example:
        >>> key = raw(0)
        >>> bool((fold(key, 3, 5) == fold(key, 5, 3)).all())
        False
    """
    for word in words:
        key = _fold_word(key, jnp.asarray(word).astype(jnp.uint32))
    return key


# Jitted, so that a program has its eighty operations once, and not for every fold.
@jax.jit
def _fold_word(key: UInt32[Array, "2"], word: Array) -> UInt32[Array, "2"]:
    return jnp.stack(absorb(key[0], key[1], word))


def seeds(
    key: UInt32[Array, "2"], first: Array, buckets: int
) -> tuple[UInt32[Array, " n"], UInt32[Array, " n"]]:
    """Two words for each bucket, numbered from `first`: the key folded with the bucket's number."""
    # Rounded up to a power of two, so that leaves of many sizes share a program.
    high, low = _number_buckets(xla.power_of_two(buckets))(key, first)
    return high[:buckets], low[:buckets]


def rows(
    key: UInt32[Array, "2"], first: Array, shape: tuple[int, ...]
) -> tuple[UInt32[Array, "n 1"], UInt32[Array, "n 1"], UInt32[Array, "1 size"]]:
    """The arguments of `at` and `below` for `[n, size]` elements of the buckets from `first` on."""
    high, low = seeds(key, first, shape[0])
    return high[:, None], low[:, None], jnp.arange(shape[1], dtype=jnp.uint32)[None]


@functools.lru_cache(maxsize=1024)
def _number_buckets(buckets: int) -> Callable[..., tuple[Array, Array]]:
    def seed_buckets(key: Array, first: Array) -> tuple[Array, Array]:
        number = first.astype(jnp.uint32) + jnp.arange(buckets, dtype=jnp.uint32)
        # If fused into the loop over elements, this chain makes the compiler recurse for seconds,
        # and the loop recomputes it for every element.
        return lax.optimization_barrier(absorb(key[0], key[1], number))

    return xla.compile_separately(seed_buckets)


def at(high: Array, low: Array, position: Array) -> Array:
    """Uniform `uint32` noise at `position` in the buckets with these seeds."""
    h = _product(high, low, position)
    return h ^ (h >> 16)


def below(bits: int, high: Array, low: Array, position: Array) -> Array:
    """Uniform `int32` noise in `[0, 2^bits)`, for at most 20 bits: cheaper than whole words.

    The upper bits of the last product need no further mixing; the lowest do, and are left out.
    """
    return (_product(high, low, position) >> (32 - bits)).astype(jnp.int32)


def _product(high: Array, low: Array, position: Array) -> Array:
    # The two seeds enter at two places: with one place, seeds that are close together would give
    # the same stream, shifted.
    h = position + high
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = h ^ low
    return (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)


def absorb(high: Array, low: Array, word: Array) -> tuple[Array, Array]:
    """Two Feistel rounds: a bijection of the key for each word, and injective in the word."""
    high = _mix(_mix(high ^ _mix(word + jnp.uint32(_GOLDEN))) + low)
    return high, _mix(low ^ _mix(high + jnp.uint32(_SILVER)))


def _mix(h: Array) -> Array:
    """A bijection of 32-bit words with low bias (the multipliers are C. Wellons', 2018)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)

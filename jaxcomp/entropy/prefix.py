"""Shared helpers of codes with whole bits: the symbols that fit, their positions, their signs."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int32, UInt32

from jaxcomp.entropy import stream
from jaxcomp.types import Array


class Fitting(NamedTuple):
    """The symbols that fit.

    Attributes:
        fits: `bool[n, size]`.
        kept: `int32[n]`, how many of each row, all of them leading.
        lengths: `int32[n, size]`, the bits of those that fit, else zero.
    """

    fits: Bool[Array, "n size"]
    kept: Int32[Array, " n"]
    lengths: Int32[Array, "n size"]


def fit(lengths: Int32[Array, "n size"], count: Int32[Array, " n"], room: int) -> Fitting:
    """The part of the first `count` symbols of each row that fits into `room` bits.

    Example:
        >>> fit(jnp.array([[3, 0, 2, 1]]), jnp.array([4]), 4).kept
        Array([2], dtype=int32)
    """
    real = jnp.arange(lengths.shape[1])[None] < count[:, None]
    lengths = jnp.where(real, lengths, 0)
    fits = real & (jnp.cumsum(lengths, axis=1) <= room)
    kept = jnp.sum(fits, axis=1, dtype=jnp.int32)
    return Fitting(fits, kept, jnp.where(fits, lengths, 0))


def magnitude(symbols: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The magnitude of the level."""
    return (symbols + 1) >> 1


def negative(symbols: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """One for levels below zero."""
    return jnp.where(symbols > 0, 1 - (symbols & 1), 0)


def symbol(magnitude: UInt32[Array, "..."], negative: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The symbol of a level; at most 255, whatever is given.

    Example:
        >>> symbol(jnp.array([0, 3, 3], jnp.uint32), jnp.array([0, 0, 1], jnp.uint32))
        Array([0, 5, 6], dtype=uint32)
    """
    magnitude = jnp.minimum(magnitude, 128)
    return jnp.where(magnitude > 0, jnp.minimum(2 * magnitude - 1 + negative, 255), 0)


def reverse_bits(
    numbers: UInt32[Array, "..."], lengths: Int32[Array, "..."]
) -> UInt32[Array, "..."]:
    """Numbers of these lengths, at most 32, with the first bit last.

    A stream is read from the lowest bit of a word on, a codeword from its highest.

    Example:
        >>> reverse_bits(jnp.array([6], jnp.uint32), jnp.array([3]))
        Array([3], dtype=uint32)
    """
    x = jnp.asarray(numbers, jnp.uint32)
    for step, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        x = ((x & jnp.uint32(mask)) << step) | ((x >> step) & jnp.uint32(mask))
    x = (x << 16) | (x >> 16)
    # A shift by 32 is not defined.
    lengths = jnp.asarray(lengths)
    return jnp.where(lengths > 0, x >> (32 - jnp.maximum(lengths, 1)).astype(jnp.uint32), 0)


def previous(hits: Bool[Array, "n size"]) -> Int32[Array, "n size"]:
    """The place of the last hit before each place; −1 where there is none.

    Example:
        >>> previous(jnp.array([[False, True, False, True]]))
        Array([[-1, -1,  1,  1]], dtype=int32)
    """
    place = jnp.where(hits, jnp.arange(hits.shape[1], dtype=jnp.int32)[None], -1)
    last = lax.cummax(place, axis=1)
    return jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def take(words: UInt32[Array, "n words"], begin: Array, length: Array | int) -> UInt32[Array, " n"]:
    """One number of each row."""
    lengths = jnp.broadcast_to(jnp.asarray(length, jnp.int32), begin.shape)
    return stream.read(words, begin[:, None], lengths[:, None])[:, 0]


def pad(words: UInt32[Array, "n words"]) -> UInt32[Array, "n words+1"]:
    """At least one word, so that a read beyond the end reads zeros."""
    return jnp.pad(words, ((0, 0), (0, 1)))

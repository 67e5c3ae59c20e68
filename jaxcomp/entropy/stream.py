"""Streams of bits: numbers of different lengths, one after another, without a loop over them.

Where each number begins is the sum of the lengths before it, so all are written at once: every
number touches at most two words, no bit is touched twice, and adding is the same as setting bits.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt16, UInt32

from jaxcomp.types import Array

WORD = 32


def write(
    codes: UInt32[Array, "n k"], begins: Int32[Array, "n k"], words: int
) -> UInt32[Array, "n words"]:
    """The stream of each row, from the lowest bit of its first word on.

    Args:
        codes: `[n, k]`, numbers below `2^length` of lengths up to 32.
        begins: `[n, k]`, the bit that each begins at, ascending; codes beyond the end are dropped.
        words: the length of a stream.

    Example:
        >>> write(jnp.array([[1, 3, 2]], jnp.uint32), jnp.array([[0, 1, 3]]), 1)
        Array([[23]], dtype=uint32)
    """
    n = codes.shape[0]
    place, shift = begins >> 5, (begins & (WORD - 1)).astype(jnp.uint32)
    # A shift by 32 is not defined, so the part in the next word is shifted twice.
    upper = (codes >> 1) >> (jnp.uint32(WORD - 1) - shift)
    row = jnp.arange(n)[:, None]
    stream = jnp.zeros((n, words), jnp.uint32)
    stream = stream.at[row, place].add(codes << shift, indices_are_sorted=True, mode="drop")
    return stream.at[row, place + 1].add(upper, indices_are_sorted=True, mode="drop")


def read(
    stream: UInt32[Array, "n words"], begins: Int32[Array, "n k"], lengths: Int32[Array, "n k"]
) -> UInt32[Array, "n k"]:
    """The numbers of these lengths, up to 32, that begin at these bits.

    Example:
        >>> begins, lengths = jnp.array([[0, 1, 3]]), jnp.array([[1, 2, 2]])
        >>> read(jnp.array([[23]], jnp.uint32), begins, lengths)
        Array([[1, 3, 2]], dtype=uint32)
    """
    place, shift = begins >> 5, (begins & (WORD - 1)).astype(jnp.uint32)
    low = jnp.take_along_axis(stream, place, axis=1, mode="clip") >> shift
    next_word = jnp.take_along_axis(stream, place + 1, axis=1, mode="clip")
    high = (next_word << 1) << (jnp.uint32(WORD - 1) - shift)
    mask = jnp.uint32(0xFFFFFFFF) >> (WORD - jnp.maximum(lengths, 1)).astype(jnp.uint32)
    return jnp.where(lengths > 0, (low | high) & mask, 0)


def begins(lengths: Int32[Array, "n k"]) -> Int32[Array, "n k"]:
    """The bit that each number begins at.

    Example:
        >>> begins(jnp.array([[1, 2, 2]]))
        Array([[0, 1, 3]], dtype=int32)
    """
    return jnp.cumsum(lengths, axis=1) - lengths


def every(n: int, k: int, bits: int) -> Int32[Array, "n k"]:
    """The bits at which `k` numbers of equal lengths begin, in each of `n` rows."""
    return jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32) * bits, (n, k))


def width(numbers: UInt32[Array, "..."]) -> Int32[Array, "..."]:
    """The bits that each number takes: none for zero.

    Example:
        >>> width(jnp.array([0, 1, 7, 8], jnp.uint32))
        Array([0, 1, 3, 4], dtype=int32)
    """
    return WORD - lax.clz(numbers).astype(jnp.int32)


def halves(words: UInt32[Array, "n words"]) -> UInt16[Array, "n halves"]:
    """Each word as two numbers of sixteen bits, the lower first.

    Example:
        >>> halves(jnp.array([[0x20001]], jnp.uint32))
        Array([[1, 2]], dtype=uint16)
    """
    both = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
    return both.astype(jnp.uint16).reshape(words.shape[0], -1)


def join_halves(halves: UInt16[Array, "n halves"]) -> UInt32[Array, "n words"]:
    """Two numbers of sixteen bits to a word, the lower first; filled up with zero.

    Example:
        >>> join_halves(jnp.array([[1, 2]], jnp.uint16))
        Array([[131073]], dtype=uint32)
    """
    n, length = halves.shape
    pairs = jnp.pad(halves, ((0, 0), (0, length % 2))).reshape(n, -1, 2).astype(jnp.uint32)
    return pairs[..., 0] | (pairs[..., 1] << 16)


def ones(words: UInt32[Array, "n words"], k: int) -> Int32[Array, "n k"]:
    """The positions of the first `k` ones of each row, ascending; unspecified beyond the last one.

    Example:
        >>> ones(jnp.array([[0, 0b1010]], jnp.uint32), 2)
        Array([[33, 35]], dtype=int32)
    """
    n = words.shape[0]
    found = lax.population_count(words).astype(jnp.int32)
    before = jnp.cumsum(found, axis=1) - found
    # The right word is the last one that begins at or before the slot's rank.
    row = jnp.arange(n)[:, None]
    marks = jnp.zeros((n, k), jnp.int32).at[row, before].add(1, mode="drop")
    word = lax.optimization_barrier(jnp.cumsum(marks, axis=1) - 1)
    rank = lax.broadcasted_iota(jnp.int32, (n, k), 1)
    rank = rank - jnp.take_along_axis(before, word, axis=1, mode="clip")
    bits = jnp.take_along_axis(words, word, axis=1, mode="clip")
    # Compiled separately: otherwise each consumer of these positions would compute them again.
    return lax.optimization_barrier(word * WORD + select(bits, rank))


def select(word: UInt32[Array, "..."], rank: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """The position of the one with this rank in each word.

    Example:
        >>> select(jnp.array([0b1010], jnp.uint32), jnp.array([1]))
        Array([3], dtype=int32)
    """
    place = jnp.zeros_like(rank)
    for step in (16, 8, 4, 2, 1):
        low = (word >> place.astype(jnp.uint32)) & jnp.uint32((1 << step) - 1)
        ones = lax.population_count(low).astype(jnp.int32)
        beyond = rank >= ones
        place, rank = jnp.where(beyond, place + step, place), jnp.where(beyond, rank - ones, rank)
    return place

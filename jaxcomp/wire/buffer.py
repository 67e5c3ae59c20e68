"""A payload tree as one dense buffer of 32-bit words, and the collectives that move it.

Small minor dimensions must not reach a collective (a TPU pads them to 128 lanes), and a
collective a leaf costs a latency each, so everything that a worker sends is one 1-D buffer.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt32

from jaxcomp import bits
from jaxcomp.backend import xla
from jaxcomp.layout import grouping
from jaxcomp.types import Array, PyTree


def fuse(payload: PyTree) -> UInt32[Array, " words"]:
    """Concatenates every array of a payload tree into one buffer of 32-bit words.

    Narrow dtypes are packed; each array begins on a word.
    """
    leaves = jax.tree.leaves(payload)
    if not leaves:
        return jnp.zeros(0, jnp.uint32)
    words = [_to_words(leaf) for leaf in leaves]
    join = xla.compile_separately(xla.join, size=sum(part.size for part in words))
    # Separate from the encoder, whose loops would otherwise run over the words of the buffer: a CPU
    # takes five times as long. The barrier keeps the compiler from moving the decoder's cast to a
    # wider dtype before the collective.
    return lax.optimization_barrier(join(words))


def split(buffer: UInt32[Array, "*workers words"], like: PyTree) -> PyTree:
    """Splits buffers into their payload trees; leading axes of `buffer` are kept."""
    leaves, treedef = jax.tree.flatten(like)
    counts = [_word_count(leaf) for leaf in leaves]
    if sum(counts) != buffer.shape[-1]:
        raise ValueError(
            f"`buffer` must have {sum(counts)} words for this payload, got shape {buffer.shape}"
        )
    parts, start = [], 0
    for leaf, count in zip(leaves, counts, strict=True):
        parts.append(_from_words(buffer[..., start : start + count], leaf))
        start += count
    return jax.tree.unflatten(treedef, parts)


def collectives(payload: PyTree, at_most: int) -> int:
    """The number of collectives that a collective uses for this payload and limit."""
    return len(runs(jax.tree.leaves(payload), at_most))


def runs(leaves: list[Any], count: int) -> list[list[Any]]:
    """The arrays of each of several collectives, of about equal bytes."""
    return grouping.even_runs(leaves, [_word_count(leaf) for leaf in leaves], count) or [[]]


def fused_bytes(like: PyTree) -> int:
    """Bytes of the fused buffer of a payload tree."""
    return 4 * sum(_word_count(leaf) for leaf in jax.tree.leaves(like))


def _word_count(leaf) -> int:
    size, width = math.prod(leaf.shape), jnp.dtype(leaf.dtype).itemsize
    return size * (width // 4) if width >= 4 else -(-size // (4 // width))


def _to_words(x: Array) -> Array:
    """An array of any shape as 32-bit words, in a shape close to its own."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    width = 8 * x.dtype.itemsize
    if width >= 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    codes = lax.bitcast_convert_type(x.reshape(-1), jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    return bits.pack(codes[None], bits=width)[0]


def _from_words(words: Array, like) -> Array:
    dtype = jnp.dtype(like.dtype)
    lead, size, width = words.shape[:-1], math.prod(like.shape), 8 * dtype.itemsize
    if width >= 32:
        if width > 32:
            words = words.reshape(*lead, size, width // 32)
        return lax.bitcast_convert_type(words, dtype).reshape(*lead, *like.shape)
    codes = bits.unpack(words.reshape(-1, words.shape[-1]), bits=width, size=size)
    codes = codes.astype(jnp.dtype(f"uint{width}")).reshape(*lead, *like.shape)
    if dtype == jnp.bool_:
        return codes.astype(dtype)
    return lax.bitcast_convert_type(codes, dtype)

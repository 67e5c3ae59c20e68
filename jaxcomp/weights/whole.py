"""The coding of a snapshot: the highest byte of each number by rANS, the other bits as they are.

The bits of bfloat16 and float32 are rotated first, so that the exponent is the highest byte.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int32, UInt, UInt8, UInt32

from jaxcomp.entropy.rans import Rans
from jaxcomp.types import Array

_A_LANE = 2048
_MOST_LANES = 4096


class Streams(NamedTuple):
    """The streams of a piece.

    Attributes:
        coded: the highest bytes, as units of 16 bits in words.
        coded_bits: the used bits of `coded`.
        rest: the other bytes of each number, from the lowest one.
    """

    coded: UInt32[Array, " words"]
    coded_bits: Int32[Array, ""]
    rest: UInt8[Array, "size bytes"]


def coder(size: int) -> Rans:
    """The coder of a window."""
    return Rans(lanes=min(max(size // _A_LANE, 1), _MOST_LANES))


@functools.partial(jax.jit, static_argnames="rotated")
def histogram(
    bits: UInt[Array, " size"], low: Array, high: Array, rotated: bool
) -> UInt32[Array, "256"]:
    """How often each highest byte occurs in a piece."""
    place = jnp.arange(bits.size, dtype=jnp.int32)
    top = jnp.where((place >= low) & (place < high), _top(bits, rotated), 256)
    return jnp.zeros(256, jnp.uint32).at[top].add(1, mode="drop")


@functools.partial(jax.jit, static_argnames="rotated")
def encode(
    bits: UInt[Array, " size"],
    low: Array,
    high: Array,
    table: UInt32[Array, "256"],
    begins: UInt32[Array, "256"],
    rotated: bool,
) -> Streams:
    """Codes a window; `rest` has its numbers from position 0 on, also those below `low`."""
    rans = coder(bits.size)
    symbols = jnp.roll(_top(bits, rotated), -low).astype(jnp.uint8)
    words = -(-rans.worst_bits(bits.size, 256) // 32)
    coded = rans.encode_mixed(symbols[None], (high - low)[None], table, begins, words)
    turned = _rotate(bits) if rotated else bits
    shifts = 8 * jnp.arange(bits.dtype.itemsize - 1, dtype=bits.dtype)
    rest = (turned[:, None] >> shifts[None]).astype(jnp.uint8)
    return Streams(coded.words[0], coded.bits[0], rest)


def _top(bits: UInt[Array, " size"], rotated: bool) -> Int32[Array, " size"]:
    turned = _rotate(bits) if rotated else bits
    return (turned >> (8 * bits.dtype.itemsize - 8)).astype(jnp.int32)


def _rotate(bits: UInt[Array, " size"]) -> UInt[Array, " size"]:
    """The bits with the sign as the lowest one."""
    return (bits << 1) | (bits >> (8 * bits.dtype.itemsize - 1))

"""The fast coding of a patch: positions as Elias and Fano do, steps as Elias' γ code does."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt, UInt32

from jaxcomp.entropy import stream
from jaxcomp.sparsify import bitmap
from jaxcomp.types import Array
from jaxcomp.weights import changed, checksums
from jaxcomp_weights.patterns import Format


class Streams(NamedTuple):
    """The streams of a piece, each longer than it needs to be.

    Attributes:
        high: the upper part of each position in unary.
        low: the lower bits of each position.
        signs: a bit for each step.
        lengths: the number of bits of each step's size, in unary.
        digits: the size of each step without its first bit.
        length_bits: the bits of `lengths`.
    """

    high: UInt32[Array, " a"]
    low: UInt32[Array, " b"]
    signs: UInt32[Array, " c"]
    lengths: UInt32[Array, " d"]
    digits: UInt32[Array, " e"]
    length_bits: Int32[Array, ""]


def low_bits(count: int, size: int) -> int:
    """The lower bits of a position that make the code of `count` of `size` positions shortest."""
    return max(0, math.floor(math.log2(max(size * math.log(2) / count, 1))))


@functools.partial(jax.jit, static_argnames=("slots", "form"))
def encode(
    words: UInt32[Array, "1 words"],
    old: UInt[Array, " size"],
    new: UInt[Array, " size"],
    count: Array,
    low: Array,
    begin: Array,
    ends: Int32[Array, " tiles"],
    split: Array,
    slots: int,
    form: Format,
) -> tuple[Streams, UInt32[Array, "tiles 2"]]:
    """Codes the changed numbers of a window; also the change of the tiles' checksums.

    Args:
        words: the bitmap of the changed numbers.
        old: the window of the version before.
        new: the window of the version after.
        count: how many change.
        low: the first position of the piece.
        begin: the first number of the piece in its run.
        ends: where each tile of the run ends.
        split: the lower bits of a position.
        slots: the most that can change.
        form: the dtype.
    """
    where = bitmap.places(words, slots, bitmap.from_first(1))[0]
    found = changed.at(old, new, where, count, form)
    at = where - low
    change = checksums.change(found.before, found.after, at + begin, found.valid, ends)
    return _streams(found, at.astype(jnp.uint32), split.astype(jnp.uint32)), change


def _streams(found: changed.Changed, at: UInt32[Array, " k"], split: Array) -> Streams:
    slots = at.size
    slot = jnp.arange(slots, dtype=jnp.int32)
    upper = (at >> split).astype(jnp.int32) + slot
    # At most three zeros a position, by the choice of `low_bits`.
    high = _mark(upper, found.valid, slots // 8 + 1)
    begins = jnp.where(found.valid, slot * split.astype(jnp.int32), 32 * slots)
    rest = jnp.where(found.valid, at & ((jnp.uint32(1) << split) - 1), 0)
    lower = stream.write(rest[None], begins[None], slots)[0]
    signs = bitmap.of((found.negative & found.valid)[None])[0]
    size = found.size + 1
    width = jnp.where(found.valid, 32 - lax.clz(size).astype(jnp.int32), 0)
    ends = jnp.cumsum(width)
    lengths = _mark(ends - 1, found.valid, slots)
    digits = size ^ (jnp.uint32(1) << jnp.maximum(width - 1, 0).astype(jnp.uint32))
    digits = jnp.where(found.valid, digits, 0)
    after = ends - width - slot  # Each before it has one digit less than its length.
    digits = stream.write(digits[None], after[None], slots)[0]
    return Streams(high, lower, signs, lengths, digits, ends[-1])


def _mark(bits: Int32[Array, " k"], valid: Array, words: int) -> UInt32[Array, " words"]:
    """A stream with ones at these bits, which ascend."""
    one = jnp.uint32(1) << (bits & 31).astype(jnp.uint32)
    word = jnp.where(valid, bits >> 5, words)
    return (
        jnp.zeros(words, jnp.uint32)
        .at[word]
        .add(jnp.where(valid, one, 0), mode="drop", indices_are_sorted=True)
    )

"""The numbers that a version changes: where they are, and by how much."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int32, UInt, UInt32

from jaxcomp.sparsify import bitmap
from jaxcomp.types import Array
from jaxcomp_weights.patterns import CLASSES, Format

LEAST = 1024
"""The smallest capacity; the next ones are 2, 4, … times as large."""


class Changed(NamedTuple):
    """Changed numbers in the order of their positions.

    Attributes:
        places: their positions in the window; unspecified beyond the last one.
        valid: which slots have one.
        before: the bits that were there.
        after: the bits that are there.
        negative: whether each goes down.
        size: the size of each step in the ordered integers, less one.
        classes: the context of each.
    """

    places: Int32[Array, " k"]
    valid: Bool[Array, " k"]
    before: UInt[Array, " k"]
    after: UInt[Array, " k"]
    negative: Bool[Array, " k"]
    size: UInt32[Array, " k"]
    classes: Int32[Array, " k"]


@jax.jit
def find(
    old: UInt[Array, " size"], new: UInt[Array, " size"], low: Array, high: Array
) -> tuple[UInt32[Array, "1 words"], Array]:
    """The bitmap of changed numbers of a piece, and their number."""
    place = jnp.arange(old.size, dtype=jnp.int32)
    found = bitmap.of(((old != new) & (place >= low) & (place < high))[None])
    return found, bitmap.count(found)[0]


def capacity(count: int, size: int) -> int:
    """Slots for so many changed numbers of a window."""
    found = LEAST
    while found < count:
        found *= 2
    return min(found, size)


@functools.partial(jax.jit, static_argnames="slots")
def places(found: UInt32[Array, "1 words"], slots: int) -> Int32[Array, " slots"]:
    """The positions of changed numbers in a window."""
    return bitmap.places(found, slots, bitmap.from_first(1))[0]


def at(
    old: UInt[Array, " size"],
    new: UInt[Array, " size"],
    where: Int32[Array, " k"],
    count: Array,
    form: Format,
) -> Changed:
    """The steps of changed numbers."""
    before, after = (jnp.take(bits, where, mode="clip") for bits in (old, new))
    step = order(after, form) - order(before, form)
    width = 8 * step.dtype.itemsize
    signed = lax.bitcast_convert_type(step, jnp.dtype(f"int{width}")).astype(jnp.int32)
    negative = signed < 0
    # The most negative number has no opposite, but the right one as an unsigned integer.
    size = jnp.where(negative, -signed, signed).astype(jnp.uint32) - 1
    valid = jnp.arange(where.size) < count
    return Changed(where, valid, before, after, negative, size, classes(before, form))


def order(bits: UInt[Array, " n"], form: Format) -> UInt[Array, " n"]:
    """The bits as integers in the order of the numbers: see `jaxcomp_weights.patterns`."""
    top = jnp.array(1 << (form.bits - 1), bits.dtype)
    if not form.signed:
        return bits
    if not form.exponent:
        return bits ^ top
    return bits ^ jnp.where(bits & top, ~jnp.zeros((), bits.dtype), top)


def classes(bits: UInt[Array, " n"], form: Format) -> Int32[Array, " n"]:
    """The context of each number: its exponent modulo 16."""
    if not form.exponent:
        return jnp.zeros(bits.shape, jnp.int32)
    mask = min((1 << form.exponent) - 1, CLASSES - 1)
    return ((bits >> form.mantissa) & mask).astype(jnp.int32)

"""The small coding of a patch: gaps within classes of exponents, and steps, by rANS.

Numbers are put in the order of their classes, and by position within a class. In this order a
changed number is named by the unchanged ones of its class before it, since the last changed one.
So each class has the table of gaps and the table of steps of its own rate of change.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt, UInt16, UInt32

from jaxcomp.entropy import stream
from jaxcomp.entropy.rans import Rans
from jaxcomp.sparsify import bitmap
from jaxcomp.types import Array
from jaxcomp.weights import changed
from jaxcomp_weights.alphabets import GAPS, PATCH_SIZES, STEPS, Alphabet
from jaxcomp_weights.patterns import CLASSES, Format

ENTRIES = sum(PATCH_SIZES)
"""Symbols of all tables."""
_STEPS_FROM = CLASSES * GAPS.size
_A_LANE = 2048
"""Symbols of a lane, which costs 48 bits."""
_MOST_LANES = 4096
_GROUP = 16
"""Words of a bitmap that are counted together: few enough to look at all of them for each place."""


class Symbols(NamedTuple):
    """Gaps, then steps: places in the tables, raw bits and their numbers, and counts by class."""

    entries: UInt16[Array, " k"]
    raw: UInt32[Array, " k"]
    lengths: Int32[Array, " k"]
    by_class: Int32[Array, " classes"]


class Streams(NamedTuple):
    """The streams of a piece, each longer than it needs to be.

    Attributes:
        coded: the symbols, as units of 16 bits in words.
        raw: the raw bits.
        by_class: the changed numbers of each class.
        coded_bits: the used bits of `coded`.
        raw_bits: the used bits of `raw`.
    """

    coded: UInt32[Array, " a"]
    raw: UInt32[Array, " b"]
    by_class: Int32[Array, " classes"]
    coded_bits: Int32[Array, ""]
    raw_bits: Int32[Array, ""]


def coder(slots: int) -> Rans:
    """The coder of a piece with so many slots for changed numbers."""
    return Rans(lanes=min(max(2 * slots // _A_LANE, 1), _MOST_LANES))


@jax.jit
def histogram(found: Symbols, count: Array) -> UInt32[Array, " entries"]:
    """How often each symbol of each table occurs in a piece."""
    slot = jnp.arange(found.entries.size)
    place = jnp.where(slot < 2 * count, found.entries.astype(jnp.int32), ENTRIES)
    return jnp.zeros(ENTRIES, jnp.uint32).at[place].add(1, mode="drop")


@jax.jit
def encode(
    found: Symbols,
    count: Array,
    table: UInt32[Array, " entries"],
    begins: UInt32[Array, " entries"],
) -> Streams:
    """Codes the symbols of a piece.

    Args:
        found: the symbols.
        count: the changed numbers of the piece.
        table: the frequencies of all tables.
        begins: the first slot of each symbol in its table.
    """
    rans = coder(found.entries.size // 2)
    words = -(-rans.worst_bits(found.entries.size, ENTRIES) // 32)
    coded = rans.encode_mixed(found.entries[None], 2 * count[None], table, begins, words)
    raw = stream.write(found.raw[None], stream.begins(found.lengths[None]), found.raw.size)
    return Streams(coded.words[0], raw[0], found.by_class, coded.bits[0], jnp.sum(found.lengths))


@functools.partial(jax.jit, static_argnames="form")
def symbols(
    old: UInt[Array, " size"],
    new: UInt[Array, " size"],
    where: Int32[Array, " k"],
    count: Array,
    low: Array,
    high: Array,
    form: Format,
) -> Symbols:
    """The symbols of the changed numbers of a window.

    Args:
        old: the window of the version before.
        new: the window of the version after.
        where: the positions of the changed numbers.
        count: how many there are.
        low: the first position of the piece.
        high: the position after the last one.
        form: the dtype.
    """
    slots = where.size
    slot = jnp.arange(slots, dtype=jnp.int32)
    found = changed.at(old, new, where, count, form)
    of_class = _by_class(old, low, high, form)
    members = bitmap.count(of_class)
    rank = _rank(of_class.reshape(-1), found.classes * (32 * of_class.shape[1]) + where)
    # Sorted by rank: where each goes is its own rank in the bitmap of ranks.
    marks = jnp.zeros(-(-old.size // 32), jnp.uint32)
    word = jnp.where(found.valid, rank >> 5, marks.size)
    marks = marks.at[word].add(jnp.uint32(1) << (rank & 31).astype(jnp.uint32), mode="drop")[None]
    ranks = bitmap.places(marks, slots, bitmap.from_first(1))[0]
    goes = jnp.where(found.valid, bitmap.rank(marks, rank[None])[0], slots)
    step = found.size * 2 + found.negative.astype(jnp.uint32)
    steps = jnp.zeros(slots, jnp.uint32).at[goes].set(step, mode="drop")
    ends = jnp.cumsum(members)
    kind = jnp.sum(ranks[:, None] >= ends[None, :-1], axis=1, dtype=jnp.int32)
    kind = jnp.minimum(kind, CLASSES - 1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), ranks[:-1] + 1])
    gap = ranks - jnp.maximum(before, (ends - members)[kind])
    gap = jnp.where(slot < count, gap, 0).astype(jnp.uint32)
    gap_symbol, gap_raw, gap_length = _divide(gap, GAPS)
    step_symbol, step_raw, step_length = _divide(steps >> 1, STEPS)
    gap_entry = kind * GAPS.size + gap_symbol
    step_entry = _STEPS_FROM + kind * (2 * STEPS.size) + 2 * step_symbol
    step_entry = step_entry + (steps & 1).astype(jnp.int32)
    by_class = (
        jnp.zeros(CLASSES, jnp.int32).at[jnp.where(slot < count, kind, CLASSES)].add(1, mode="drop")
    )

    def join(gaps: Array, steps: Array) -> Array:
        """Gaps, and steps from the first free slot on; zeros after them."""
        both = jnp.concatenate([jnp.where(slot < count, gaps, 0), jnp.zeros_like(gaps)])
        return lax.dynamic_update_slice(both, jnp.where(slot < count, steps, 0), (count,))

    return Symbols(
        join(gap_entry, step_entry).astype(jnp.uint16),
        join(gap_raw, step_raw),
        join(gap_length, step_length),
        by_class,
    )


def _by_class(
    old: UInt[Array, " size"], low: Array, high: Array, form: Format
) -> UInt32[Array, "classes words"]:
    """The bitmap of the numbers of each class, from one bitmap for each bit of the class."""
    place = jnp.arange(old.size, dtype=jnp.int32)
    context = changed.classes(old, form)
    bits = CLASSES.bit_length() - 1
    hits = [(context >> bit) & 1 == 1 for bit in range(bits)]
    *planes, inside = bitmap.of(jnp.stack([*hits, (place >= low) & (place < high)]))
    found = []
    for number in range(CLASSES):
        words = inside
        for bit, plane in enumerate(planes):
            words = words & (plane if number >> bit & 1 else ~plane)
        found.append(words)
    return jnp.stack(found)


def _rank(words: UInt32[Array, " words"], place: Int32[Array, " k"]) -> Int32[Array, " k"]:
    """The ones before each place in a bitmap, of which the places are few."""
    ones = lax.population_count(words).astype(jnp.int32).reshape(-1, _GROUP)
    sizes = jnp.sum(ones, axis=1)
    before = jnp.cumsum(sizes) - sizes
    word, group = place >> 5, place >> 5 >> (_GROUP.bit_length() - 1)
    number = jnp.arange(_GROUP, dtype=jnp.int32)[None]
    its = jnp.take(words.reshape(-1, _GROUP), group, axis=0, mode="clip")
    own = (jnp.uint32(1) << (place & 31).astype(jnp.uint32)) - 1
    within = (word & (_GROUP - 1))[:, None]
    mask = jnp.where(number < within, jnp.uint32(0xFFFFFFFF), 0)
    mask = jnp.where(number == within, own[:, None], mask)
    inside = jnp.sum(lax.population_count(its & mask).astype(jnp.int32), axis=1)
    return jnp.take(before, group, mode="clip") + inside


def _divide(numbers: UInt32[Array, " k"], alphabet: Alphabet) -> tuple[Array, Array, Array]:
    """Symbols, raw bits, and how many raw bits there are: see `jaxcomp_weights.alphabets`."""
    exponent = 31 - lax.clz(jnp.maximum(numbers, 1)).astype(jnp.int32)
    length = jnp.where(numbers < alphabet.direct, 0, exponent - 2)
    quarter = (numbers >> length.astype(jnp.uint32)) & 3
    large = alphabet.direct + 4 * (exponent - alphabet.first) + quarter.astype(jnp.int32)
    small = numbers < alphabet.direct
    raw = numbers & ((jnp.uint32(1) << length.astype(jnp.uint32)) - 1)
    return (
        jnp.where(small, numbers.astype(jnp.int32), large),
        jnp.where(small, 0, raw),
        length,
    )

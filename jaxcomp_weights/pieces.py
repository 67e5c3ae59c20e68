"""Pieces: up to a few million numbers of one dtype, and how each is decoded.

A piece changes an array of bits in place. A patch names the changed numbers and their steps, in the
order of the numbers, in one of two ways: `SMALL` is within a few percent of the entropy given each
old number's exponent, `FAST` is larger and needs no old numbers to find the changed ones.
"""

import struct
from typing import NamedTuple

import numpy as np

from jaxcomp_weights import alphabets, bitstreams, patterns, rans
from jaxcomp_weights.errors import Damaged

UNCHANGED, RAW, SMALL, FAST, SNAPSHOT, TABLE = range(6)
"""Kinds of what is in a file: pieces of five kinds, and the tables of those that follow."""

HEAD = struct.Struct("<BI")
"""The kind and the bytes of what follows."""

SMALL_HEAD = struct.Struct("<IIII")
"""Changed numbers, lanes, units of the symbols, words of raw bits."""
FAST_HEAD = struct.Struct("<IBxxxI")
"""Changed numbers, lower bits of a position, bits of the sizes' lengths."""
SNAPSHOT_HEAD = struct.Struct("<II")
"""Lanes, units of the symbols."""
_CLASSES = np.dtype("<u4")


class Changes(NamedTuple):
    """Numbers to change: their positions in the piece, ascending within a class, and new bits."""

    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray


class Tables(NamedTuple):
    """The tables in use, prepared for decoding."""

    slots: np.ndarray

    @classmethod
    def read(cls, data: bytes, snapshot: bool) -> "Tables":
        """Those of a file's item `TABLE`."""
        sizes = alphabets.SNAPSHOT_SIZES if snapshot else alphabets.PATCH_SIZES
        return cls(alphabets.slots(alphabets.read_tables(data, sizes)))


class Waiting(NamedTuple):
    """A piece whose symbols are decoded with those of others.

    Attributes:
        coded: its symbols.
        rest: what else it has.
        by_class: for a small patch, the changed numbers of each class.
    """

    coded: rans.Coded
    rest: np.ndarray
    by_class: np.ndarray | None = None


def small(data: bytes, size: int) -> Waiting:
    """A piece of a small patch of so many numbers.

    Raises:
        Damaged: if no publisher can have written it.
    """
    reader = _Parts(data)
    count, lanes, unit_count, raw_words = reader.unpack(SMALL_HEAD)
    by_class = reader.array(_CLASSES, patterns.CLASSES).astype(np.int64)
    if by_class.sum() != count or count > size:
        raise Damaged(f"{by_class.sum()} numbers of all classes change, and {count} in all")
    units = reader.array(rans.UNIT, unit_count)
    rest = reader.array(bitstreams.WORD, raw_words)
    reader.end()
    context = np.repeat(np.arange(patterns.CLASSES, dtype=np.uint8), by_class)
    contexts = np.concatenate([context, context + np.uint8(patterns.CLASSES)])
    return Waiting(rans.Coded(units, 2 * count, _lanes(lanes), contexts), rest, by_class)


def small_changes(waiting: Waiting, symbols: np.ndarray, old: np.ndarray, name: str) -> Changes:
    """The changes of a piece of a small patch, from its symbols.

    Args:
        waiting: the piece.
        symbols: its decoded symbols.
        old: the bits of the numbers before, one dimension.
        name: their dtype.

    Raises:
        Damaged: if no publisher can have written it.
    """
    assert waiting.by_class is not None
    count = symbols.size // 2
    gap_symbols, step_symbols = symbols[:count], symbols[count:]
    lengths = alphabets.GAPS.raw_bits(gap_symbols), alphabets.STEPS.raw_bits(step_symbols >> 1)
    both = np.concatenate(lengths)
    begins = bitstreams.begins(both)
    if both.size and bitstreams.word_count(int(begins[-1] + both[-1])) != waiting.rest.size:
        raise Damaged("the raw bits of a piece have another length")
    bits = bitstreams.read(waiting.rest, begins, both)
    gaps = alphabets.GAPS.numbers(gap_symbols, bits[:count])
    sizes = alphabets.STEPS.numbers(step_symbols >> 1, bits[count:]).astype(np.int64) + 1
    steps = np.where(step_symbols & 1, -sizes, sizes)
    positions = _positions(gaps, waiting.by_class, patterns.classes(old, name))
    return _changed(positions, steps, old, name)


def fast_changes(data: bytes, old: np.ndarray, name: str) -> Changes:
    """The changes of a piece of a fast patch.

    Raises:
        Damaged: if no publisher can have written it.
    """
    return _changed(*_fast(data, old.size), old, name)


def snapshot(data: bytes, size: int, name: str) -> Waiting:
    """A piece of a snapshot of so many numbers.

    Raises:
        Damaged: if no publisher can have written it.
    """
    reader = _Parts(data)
    lanes, count = reader.unpack(SNAPSHOT_HEAD)
    units = reader.array(rans.UNIT, count)
    rest = reader.array(np.dtype(np.uint8), size * (patterns.unsigned(name).itemsize - 1))
    reader.end()
    return Waiting(rans.Coded(units, size, _lanes(lanes)), rest)


def least(count: int, itemsize: int) -> int:
    """The fewest bytes of a piece of a snapshot with its head: as bits, or coded."""
    coded = SNAPSHOT_HEAD.size + rans.least(count) + count * (itemsize - 1)
    return HEAD.size + min(count * itemsize, coded)


def snapshot_bits(waiting: Waiting, symbols: np.ndarray, name: str) -> np.ndarray:
    """The bits of a piece of a snapshot, from its symbols."""
    kind = patterns.unsigned(name)
    planes = np.empty((symbols.size, kind.itemsize), np.uint8)
    planes[:, :-1] = waiting.rest.reshape(symbols.size, kind.itemsize - 1)
    planes[:, -1] = symbols
    bits = planes.reshape(-1).view(kind)
    return rotate_back(bits) if rotated(name) else bits


def _changed(positions: np.ndarray, steps: np.ndarray, old: np.ndarray, name: str) -> Changes:
    before = old[positions]
    after = patterns.unorder(patterns.order(before, name) + steps.astype(old.dtype), name)
    return Changes(positions, before, after)


def rotated(name: str) -> bool:
    """Whether bits are rotated by one, so that the exponent is the highest byte."""
    return patterns.FORMATS[name].exponent == 8


def rotate_back(bits: np.ndarray) -> np.ndarray:
    """The bits whose sign was moved to the lowest one."""
    width = 8 * bits.dtype.itemsize
    return (bits >> bits.dtype.type(1)) | (bits << bits.dtype.type(width - 1))


def raw(data: bytes, size: int, name: str) -> np.ndarray:
    """The bits of a piece that is not coded.

    Raises:
        Damaged: if its size is another.
    """
    kind = patterns.unsigned(name)
    if len(data) != size * kind.itemsize:
        raise Damaged(f"a piece of {size} numbers has {len(data)} bytes")
    return np.frombuffer(data, kind)


def _positions(gaps: np.ndarray, by_class: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The changed numbers, from the unchanged ones between two of their class."""
    positions, begin = np.empty(gaps.size, np.int64), 0
    for number in np.flatnonzero(by_class):
        end = begin + int(by_class[number])
        ranks = np.cumsum(gaps[begin:end].astype(np.int64) + 1) - 1
        positions[begin:end] = bitstreams.select(classes == np.uint8(number), ranks)
        begin = end
    return positions


def _fast(data: bytes, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions, ascending, and steps."""
    reader = _Parts(data)
    count, low_bits, length_bits = reader.unpack(FAST_HEAD)
    if count > size or low_bits > 31 or not count <= length_bits <= 32 * count:
        raise Damaged(f"{count} of {size} numbers change, with {length_bits} bits of lengths")
    streams = [
        reader.array(bitstreams.WORD, bitstreams.word_count(bits))
        for bits in stream_bits(count, size, low_bits, length_bits)
    ]
    reader.end()
    high, low, signs, lengths, digits = streams
    upper = bitstreams.ones(high)
    if upper.size != count:
        raise Damaged(f"{upper.size} positions are there, of {count}")
    upper -= np.arange(count)
    positions = (upper << low_bits) | bitstreams.every(low, count, low_bits)
    if count and (positions[-1] >= size or np.any(np.diff(positions) <= 0)):
        raise Damaged("the positions of a piece are not ascending, or end outside of it")
    ends = bitstreams.ones(lengths)
    if ends.size != count or (count and ends[-1] != length_bits - 1):
        raise Damaged("the lengths of the steps are not as many as the steps")
    width = np.diff(ends, prepend=-1) - 1  # Digits after the first one.
    if count and width.max() > 31:
        raise Damaged("a step has more than 32 bits")
    rest = bitstreams.read(digits, bitstreams.begins(width), width).astype(np.int64)
    sizes = rest | (np.int64(1) << width)
    return positions, np.where(bitstreams.flags(signs, count), -sizes, sizes)


def stream_bits(count: int, size: int, low_bits: int, length_bits: int) -> tuple[int, ...]:
    """The bits of the streams of a fast piece.

    They are: a one for each position and a zero for each carry; lower bits; signs; lengths of the
    sizes in unary; digits of the sizes.
    """
    high = count + (max(size - 1, 0) >> low_bits) + 1
    return high, count * low_bits, count, length_bits, length_bits - count


def _lanes(lanes: int) -> int:
    if not 0 < lanes <= 1 << 16:
        raise Damaged(f"a stream has {lanes} lanes")
    return lanes


class _Parts:
    """What is in a piece, one after another."""

    def __init__(self, data: bytes):
        self._data, self._place = data, 0

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self._take(form.size))

    def array(self, kind: np.dtype, count: int) -> np.ndarray:
        return np.frombuffer(self._take(count * kind.itemsize), kind)

    def end(self) -> None:
        if self._place != len(self._data):
            raise Damaged(f"a piece has {len(self._data) - self._place} bytes too many")

    def _take(self, count: int) -> memoryview:
        part = memoryview(self._data)[self._place : self._place + count]
        if len(part) < count:
            raise Damaged(f"a piece of {len(self._data)} bytes ends early")
        self._place += count
        return part

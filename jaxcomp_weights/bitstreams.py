"""Streams of bits in little-endian words: reading many numbers at once."""

import numpy as np

from jaxcomp_weights.errors import Damaged

WORD = np.dtype("<u4")
_DENSE = 16
"""Where a sixteenth of all numbers is looked for, all positions are listed."""


def read(words: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of these lengths, up to 32 bits, that begin at these bits; `uint32`.

    Example:
        >>> read(np.array([23], np.uint32), np.array([0, 1, 3]), np.array([1, 2, 2])).tolist()
        [1, 3, 2]
    """
    if not begins.size:
        return np.zeros(0, np.uint32)
    padded = np.append(words, np.zeros(2, WORD))
    place = begins >> 5
    pair = padded[place].astype(np.uint64) | (padded[place + 1].astype(np.uint64) << np.uint64(32))
    mask = (np.uint64(1) << lengths.astype(np.uint64)) - np.uint64(1)
    return ((pair >> (begins & 31).astype(np.uint64)) & mask).astype(np.uint32)


def begins(lengths: np.ndarray) -> np.ndarray:
    """The bit that each number begins at, `int64`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths


def every(words: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The first numbers of equal length in a stream, `uint32`."""
    if not bits:
        return np.zeros(count, np.uint32)
    at = np.arange(count, dtype=np.int64) * bits
    return read(words, at, np.full(count, bits, np.uint8))


def ones(words: np.ndarray) -> np.ndarray:
    """The positions of all ones, ascending.

    Example:
        >>> ones(np.array([0, 10], "<u4")).tolist()
        [33, 35]
    """
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def select(hits: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The positions of the hits with these ranks, which ascend.

    Raises:
        Damaged: if there are fewer hits.

    Example:
        >>> select(np.array([0, 1, 0, 1, 1], bool), np.array([0, 2])).tolist()
        [1, 4]
    """
    if _DENSE * ranks.size > hits.size:
        places = np.flatnonzero(hits)
        _check(ranks, places.size)
        return places[ranks]
    padded = np.pad(hits, (0, -hits.size % 64)) if hits.size % 64 else hits
    words = np.packbits(padded, bitorder="little").view("<u8")
    ends = np.cumsum(np.bitwise_count(words), dtype=np.int64)
    _check(ranks, int(ends[-1]) if ends.size else 0)
    word = np.searchsorted(ends, ranks, side="right")
    bits = words[word]
    left = (ranks - (ends[word] - np.bitwise_count(bits))).astype(np.uint8)
    place = np.zeros(ranks.size, np.uint64)
    for step in (32, 16, 8, 4, 2, 1):  # Half of the bits that are left, again and again.
        low = np.bitwise_count((bits >> place) & np.uint64((1 << step) - 1))
        beyond = left >= low
        place += np.uint64(step) * beyond
        left -= low * beyond
    return word * 64 + place.astype(np.int64)


def _check(ranks: np.ndarray, count: int) -> None:
    if ranks.size and ranks[-1] >= count:
        raise Damaged(f"number {ranks[-1]} of {count} in a class changes")


def flags(words: np.ndarray, count: int) -> np.ndarray:
    """The first bits of a stream, `uint8`."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=count)


def word_count(bits: int) -> int:
    """The words of so many bits."""
    return -(-bits // 32)

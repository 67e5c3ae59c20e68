"""Streams of bits in little-endian words: reading many numbers at once."""

import numpy as np

WORD = np.dtype("<u4")


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


def flags(words: np.ndarray, count: int) -> np.ndarray:
    """The first bits of a stream, `uint8`."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=count)


def word_count(bits: int) -> int:
    """The words of so many bits."""
    return -(-bits // 32)

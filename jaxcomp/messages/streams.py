"""A stream of bytes ↔ fewer bytes: unchanged, as one constant, or entropy coded with its table.

The coder runs on rows of a few fixed shapes, so that a handful of programs serves every message.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int32, UInt8, UInt32

from jaxcomp.entropy.coder import SYMBOLS, Stream
from jaxcomp.entropy.rans import PRECISION, Rans
from jaxcomp.messages.reading import MessageError, Reader, number
from jaxcomp.types import Array

RAW, CONSTANT, CODED = range(3)
_TOTAL = 1 << PRECISION
_LANES = 4
_CODER = Rans(lanes=_LANES)
_ROW = 8_192
"""Symbols of a row: the lanes' states cost little, and short streams are not padded much."""
_TOGETHER = (128, 16, 1)
"""Numbers of rows that one program codes; the largest that fits is taken first."""
_CAPACITY = -(-_CODER.worst_bits(_ROW, SYMBOLS) // 32)
"""The words that a row may take."""
_LENGTH = np.dtype("<u2")
_WORD = np.dtype("<u4")
_CHUNK = 2**20


class Measure(NamedTuple):
    """The best method for a stream.

    Attributes:
        kind: RAW, CONSTANT or CODED.
        frequencies: the frequency of each symbol, of 4096 in all, if it is coded.
        size: the approximate number of bytes.
    """

    kind: int
    frequencies: np.ndarray | None
    size: float


def measure(symbols: np.ndarray) -> Measure:
    """Looks for the shortest way to write these bytes."""
    raw = Measure(RAW, None, 1 + symbols.size if symbols.size else 0)
    if not symbols.size:
        return raw
    counts = np.zeros(SYMBOLS, np.int64)
    for start in range(0, symbols.size, _CHUNK):  # `bincount` copies to int64.
        counts += np.bincount(symbols[start : start + _CHUNK], minlength=SYMBOLS)
    present = np.flatnonzero(counts)
    if present.size == 1:
        return Measure(CONSTANT, None, 2)
    found = frequencies(counts)
    bits = np.sum(counts[present] * (PRECISION - np.log2(found[present])))
    rows = -(-symbols.size // _ROW)
    head = 1 + len(_table(found)) + rows * (_LENGTH.itemsize + 6 * _LANES)
    coded = Measure(CODED, found, head + bits / 8)
    return coded if coded.size < raw.size else raw


def encode(symbols: np.ndarray, measure: Measure) -> bytes:
    """The bytes of a stream that was measured."""
    if not symbols.size:
        return b""
    if measure.kind == CONSTANT:
        return bytes([CONSTANT, symbols[0]])
    if measure.frequencies is not None:
        body = _encode_rows(symbols, measure.frequencies)
        if body is not None and len(body) < 1 + symbols.size:
            return body
    return bytes([RAW]) + symbols.tobytes()


def decode(reader: Reader, size: int) -> np.ndarray:
    """The next stream, of so many bytes.

    Raises:
        MessageError: if `encode` cannot have written it.
    """
    if not size:
        return np.zeros(0, np.uint8)
    kind = reader.take(1, "the kind of a stream")[0]
    if kind == RAW:
        return np.frombuffer(reader.take(size, "a stream"), np.uint8)
    if kind == CONSTANT:
        return np.full(size, reader.take(1, "a symbol")[0], np.uint8)
    if kind == CODED:
        return _decode_rows(reader, size)
    raise MessageError(f"`data` must write streams by a method from 0 to 2, got {kind}")


def frequencies(counts: np.ndarray) -> np.ndarray:
    """Frequencies out of 4096 in proportion to the counts; a symbol that occurs has at least one.

    Those of the coder's own table are never zero, which a few codes of few bits would pay for.
    """
    scaled = counts / counts.sum() * _TOTAL
    found = np.where(counts > 0, np.maximum(np.floor(scaled), 1), 0).astype(np.int64)
    for _ in range(abs(int(missing := _TOTAL - found.sum()))):
        # The change of the length, c·log(1 ± 1/f), approximated alike on all machines.
        if missing > 0:
            found[np.argmax(np.where(found > 0, counts / (found + 0.5), -1))] += 1
        else:
            found[np.argmin(np.where(found > 1, counts / (found - 0.5), np.inf))] -= 1
    return found


def _table(frequencies: np.ndarray) -> bytes:
    """The largest symbol, and the frequency of each up to it."""
    last = int(np.flatnonzero(frequencies)[-1])
    return bytes([last]) + b"".join(number(int(each)) for each in frequencies[: last + 1])


def _read_table(reader: Reader) -> np.ndarray:
    last = reader.take(1, "a table")[0]
    found = [reader.number("a table") for _ in range(last + 1)]
    if sum(found) != _TOTAL or max(found) >= _TOTAL or not found[-1]:
        raise MessageError(
            f"`data` must hold tables of frequencies below {_TOTAL} that sum to {_TOTAL} and "
            f"do not end in zero, got sum {sum(found)}, largest {max(found)}, last {found[-1]}"
        )
    return np.array(found + [0] * (SYMBOLS - len(found)), np.uint32)


def _groups(size: int) -> Iterator[tuple[int, int]]:
    """The first row and the number of rows of what is coded at a time."""
    rows, first = -(-size // _ROW), 0
    for together in _TOGETHER:
        while rows - first >= together:
            yield first, together
            first += together


def _counts(size: int) -> np.ndarray:
    """The symbols that are in each row."""
    return np.minimum(size - np.arange(0, size, _ROW), _ROW).astype(np.int32)


def _encode_rows(symbols: np.ndarray, frequencies: np.ndarray) -> bytes | None:
    """The stream, or None if a row does not fit, which no table of these frequencies leads to."""
    counts = _counts(symbols.size)
    rows = np.zeros((counts.size, _ROW), np.uint8)
    rows.reshape(-1)[: symbols.size] = symbols
    table, lengths, parts = frequencies.astype(np.uint32), [], []
    for first, together in _groups(symbols.size):
        group = slice(first, first + together)
        coded = jax.device_get(_encode(rows[group], counts[group], table))
        if not np.array_equal(coded.kept, counts[group]):
            return None
        used = (coded.bits + 31) // 32
        lengths.append(used.astype(_LENGTH))
        inside = np.arange(coded.words.shape[1]) < used[:, None]
        parts.append(coded.words[inside].astype(_WORD, copy=False))
    written = [part.tobytes() for part in (*lengths, *parts)]
    return b"".join([bytes([CODED]), _table(frequencies), *written])


def _decode_rows(reader: Reader, size: int) -> np.ndarray:
    table, counts = _read_table(reader), _counts(size)
    lengths = np.frombuffer(
        reader.take(counts.size * _LENGTH.itemsize, "lengths of coded rows"), _LENGTH
    ).astype(np.int64)
    if lengths.max() > _CAPACITY:
        raise MessageError(
            f"`data` must code a row in at most {_CAPACITY} words, got {lengths.max()}"
        )
    body = np.frombuffer(reader.take(int(lengths.sum()) * _WORD.itemsize, "coded rows"), _WORD)
    ends, found = np.cumsum(lengths), np.empty((counts.size, _ROW), np.uint8)
    for first, together in _groups(size):
        group = slice(first, first + together)
        words = np.zeros((together, _CAPACITY), np.uint32)
        inside = np.arange(_CAPACITY) < lengths[group, None]
        words[inside] = body[ends[first] - lengths[first] : ends[first + together - 1]]
        symbols, intact = jax.device_get(_decode(words, counts[group], table))
        if not intact.all():
            raise MessageError(
                "`data` must hold coded rows that end in the initial state of the coder, with "
                "all of their words read, got another state"
            )
        found[group] = symbols
    return found.reshape(-1)[:size]


@jax.jit
def _encode(
    symbols: UInt8[Array, "n size"], count: Int32[Array, " n"], table: UInt32[Array, " symbols"]
) -> Stream:
    return _CODER.encode(symbols.astype(jnp.uint32), count, table, _CAPACITY)


@jax.jit
def _decode(
    words: UInt32[Array, "n words"], count: Int32[Array, " n"], table: UInt32[Array, " symbols"]
) -> tuple[UInt8[Array, "n size"], Bool[Array, " n"]]:
    symbols, intact = _CODER.checked(words, count, _ROW, table)
    return symbols.astype(jnp.uint8), intact

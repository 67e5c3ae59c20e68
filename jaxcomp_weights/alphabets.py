"""Numbers as symbols of a small alphabet and raw bits, and the tables of the symbols' frequencies.

A number `v` below `direct` is its own symbol. A larger one has a symbol for each quarter of its
octave, and its position in that quarter as raw bits. A patch has one table a context for the gaps
between changed weights, and one for their steps; a snapshot has one for the exponents.
"""

import zlib
from typing import NamedTuple

import numpy as np

from jaxcomp_weights import patterns
from jaxcomp_weights.errors import Damaged

PRECISION = 12
TOTAL = 1 << PRECISION
"""The sum of the frequencies of a table."""


class Alphabet(NamedTuple):
    """Symbols of numbers from 0 to `2**octaves - 1`.

    Attributes:
        direct: numbers that are their own symbol, a power of two of at least 4.
        octaves: bits of the largest number.
    """

    direct: int
    octaves: int

    @property
    def first(self) -> int:
        """The exponent of the first octave that is divided in quarters."""
        return self.direct.bit_length() - 1

    @property
    def size(self) -> int:
        """The number of symbols."""
        return self.direct + 4 * (self.octaves - self.first)

    def raw_bits(self, symbols: np.ndarray) -> np.ndarray:
        """The raw bits that follow each symbol, `uint32`."""
        quarter = symbols.astype(np.uint32) - np.uint32(self.direct)
        inside = symbols >= self.direct
        return np.where(inside, (quarter >> 2) + np.uint32(self.first - 2), 0).astype(np.uint32)

    def numbers(self, symbols: np.ndarray, raw: np.ndarray) -> np.ndarray:
        """The numbers of symbols and raw bits, `uint32`.

        Example:
            >>> GAPS.numbers(np.array([7, 16, 21]), np.array([0, 3, 5])).tolist()
            [7, 19, 45]
        """
        symbols = symbols.astype(np.uint32)
        length = self.raw_bits(symbols)
        quarter = ((symbols - np.uint32(self.direct)) & 3) | 4
        large = (quarter << length) | raw.astype(np.uint32)
        return np.where(symbols < self.direct, symbols, large).astype(np.uint32)


GAPS = Alphabet(direct=16, octaves=28)
"""Unchanged weights of a class between two changed ones."""

STEPS = Alphabet(direct=8, octaves=32)
"""The size of a step, less one; the symbol of a step is twice this, plus one if it goes down."""

_GAP, _STEP = GAPS.size, 2 * STEPS.size
PATCH_SIZES = (_GAP,) * patterns.CLASSES + (_STEP,) * patterns.CLASSES
"""Symbols of each table of a patch: gaps by class, then steps by class."""

SNAPSHOT_SIZES = (256,)
"""Symbols of the table of a snapshot."""


def write_tables(tables: list[np.ndarray]) -> bytes:
    """Tables as bytes: for each the number of its last symbol and the frequencies up to it."""
    parts = []
    for table in tables:
        used = np.flatnonzero(table)
        count = 0 if used.size == 0 else int(used[-1]) + 1
        parts.append(np.uint8(min(count, 255)).tobytes() + np.uint8(count > 255).tobytes())
        # Low and high bytes apart: most frequencies are small.
        low = table[:count].astype("<u2")
        parts.append((low & 255).astype(np.uint8).tobytes() + (low >> 8).astype(np.uint8).tobytes())
    return zlib.compress(b"".join(parts), 9)


def read_tables(data: bytes, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """The tables that `write_tables` has written.

    Raises:
        Damaged: for anything else.
    """
    limit = sum(2 + 2 * size for size in sizes)
    try:
        unzip = zlib.decompressobj()
        found = unzip.decompress(data, limit + 1)
    except zlib.error as error:
        raise Damaged(f"its tables do not decompress: {error}") from None
    if len(found) > limit or unzip.unconsumed_tail or unzip.unused_data or not unzip.eof:
        raise Damaged(f"its tables have more than {limit} bytes, or end early")
    tables, place = [], 0
    for size in sizes:
        head = found[place : place + 2]
        if len(head) < 2 or head[1] > 1:
            raise Damaged("its tables end early")
        count = head[0] + head[1]
        body = np.frombuffer(found, np.uint8, offset=place + 2)[: 2 * count].astype(np.uint32)
        place += 2 + 2 * count
        if count > size or body.size < 2 * count:
            raise Damaged(f"a table has {count} symbols and may have {size}")
        table = np.zeros(size, np.uint32)
        table[:count] = body[:count] | (body[count:] << 8)
        if count and (table.sum() != TOTAL or table.max() >= TOTAL):
            raise Damaged(f"the frequencies of a table sum to {table.sum()}, not to {TOTAL}")
        tables.append(table)
    if place != len(found):
        raise Damaged("its tables are longer than they say")
    return tables


def slots(tables: list[np.ndarray]) -> np.ndarray:
    """For each table and slot of 4096: its symbol, frequency, and number within the symbol.

    A table without symbols has symbol 0 in each slot; a stream that uses it does not end well.
    """
    slot = np.arange(TOTAL, dtype=np.uint32)
    found = np.zeros((len(tables), TOTAL), np.uint32)
    for number, table in enumerate(tables):
        if not table.any():
            found[number] = (1 << 8) | (slot & 0) << 20
            continue
        begins = np.cumsum(table, dtype=np.uint32) - table
        symbol = np.repeat(np.arange(table.size, dtype=np.uint32), table)
        within = slot - begins[symbol]
        found[number] = symbol | (table[symbol] << 8) | (within << 20)
    return found.reshape(-1)

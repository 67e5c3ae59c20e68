"""Checksums of arrays that a change of a few numbers updates without reading the rest.

The checksum of a tile is the sum of a hash of (position, bits) over its numbers, modulo 2³² and for
two hashes. So a publisher computes it on the device, and both sides update it by the numbers that a
patch changes. It finds mistakes and damage; against people there are the files' SHA-256 and the
signature of the manifest.
"""

from typing import NamedTuple

import numpy as np

SEEDS = ((0x9E3779B1, 0x85EBCA77, 0x165667B1), (0xC2B2AE3D, 0x27D4EB2F, 0x2545F491))
"""Multipliers of position and bits, and a constant, of each hash."""
_CHUNK = 1 << 16
"""Numbers hashed at a time: they fit the second cache."""


class Sum(NamedTuple):
    """The two sums."""

    first: int
    second: int

    def __str__(self) -> str:
        return f"{self.first:08x}{self.second:08x}"

    @classmethod
    def parse(cls, text: str) -> "Sum":
        """The checksum of its 16 hexadecimal digits."""
        return cls(int(text[:8], 16), int(text[8:], 16))

    def __add__(self, other: "Sum") -> "Sum":  # type: ignore[override]
        return Sum(*((a + b) & 0xFFFFFFFF for a, b in zip(self, other, strict=True)))

    def __sub__(self, other: "Sum") -> "Sum":
        return Sum(*((a - b) & 0xFFFFFFFF for a, b in zip(self, other, strict=True)))


ZERO = Sum(0, 0)


def of(bits: np.ndarray, begin: int = 0) -> Sum:
    """The checksum of consecutive numbers.

    Args:
        bits: their bits, one dimension.
        begin: the position of the first one in its tile.

    Example:
        >>> bits = np.arange(5, dtype="<u2")
        >>> of(bits) == of(bits[:2]) + of(bits[2:], begin=2)
        True
    """
    total = ZERO
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK]
        first = np.uint32((begin + start) & 0xFFFFFFFF)
        total = total + at(np.arange(chunk.size, dtype=np.uint32) + first, chunk)
    return total


def at(positions: np.ndarray, bits: np.ndarray) -> Sum:
    """The sum over numbers at given positions."""
    positions, bits = positions.astype(np.uint32), bits.astype(np.uint32)
    return Sum(*(int(_hash(positions, bits, *seed).sum(dtype=np.uint32)) for seed in SEEDS))


def _hash(positions: np.ndarray, bits: np.ndarray, by: int, on: int, plus: int) -> np.ndarray:
    x = (positions * np.uint32(by)) ^ (bits * np.uint32(on) + np.uint32(plus))
    for shift, multiplier in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(multiplier)
    return x ^ (x >> np.uint32(15))

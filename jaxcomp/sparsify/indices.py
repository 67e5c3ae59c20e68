"""Places as words: how the receiver learns where the values belong.

Places are ascending and below the size of the bucket. Where there are fewer than slots, the rest
repeats a place and is left out by who knows the number. All are of a static size.
"""

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import UInt32

from jaxcomp import bits
from jaxcomp.protocols import Array
from jaxcomp.sparsify import bitmap


@runtime_checkable
class Indices(Protocol):
    """A frozen dataclass that maps ascending places to words and back."""

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        """The words of `k` places below `size` in each row."""
        ...

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        """The places again."""
        ...


@dataclasses.dataclass(frozen=True)
class Raw:
    """A word each: 32 bits."""

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        del size
        return places

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        del k, size
        return words


@dataclasses.dataclass(frozen=True)
class Packed:
    """`⌈log₂ size⌉` bits each, in any order."""

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        return bits.pack(places, bits=_width(size))

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        return bits.unpack(words, bits=_width(size), size=k)


@dataclasses.dataclass(frozen=True)
class Bitmap:
    """A bit for every element of the bucket: the smallest from a density of about a quarter on.

    Every slot must be used, each by a place of its own.
    """

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        return _ones(places, size)

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        return _places(words, k)


@dataclasses.dataclass(frozen=True)
class EliasFano:
    """`2 + log₂(size / k)` bits each, within half a bit of what a random choice costs at least.

    The `l = ⌊log₂(size / k)⌋` low bits of each place are packed; of the rest, place `i` sets bit
    `⌊placeᵢ / 2ˡ⌋ + i` of a bitmap of `k + ⌈size / 2ˡ⌉` bits.

    Example:
        >>> coded = EliasFano().encode(jnp.array([[3, 4, 7, 13, 14, 15, 21, 43]], jnp.uint32), 48)
        >>> EliasFano().decode(coded, 8, 48)
        Array([[ 3,  4,  7, 13, 14, 15, 21, 43]], dtype=uint32)

    References:
        Elias, Efficient storage and retrieval by content and address of static files, 1974.
    """

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        k = places.shape[1]
        low, ones = self._split(k, size)
        high = (places >> low) + jnp.arange(k, dtype=jnp.uint32)[None]
        parts = [_ones(high, ones)]
        if low:
            parts.append(bits.pack(places & jnp.uint32((1 << low) - 1), bits=low))
        return jnp.concatenate(parts, axis=1)

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        low, ones = self._split(k, size)
        end = -(-ones // bitmap.WORD)
        high = _places(words[:, :end], k) - jnp.arange(k, dtype=jnp.uint32)[None]
        if not low:
            return high
        return (high << low) | bits.unpack(words[:, end:], bits=low, size=k)

    def _split(self, k: int, size: int) -> tuple[int, int]:
        """The low bits of a place, and the bits of the bitmap of the rest."""
        low = max(0, math.floor(math.log2(size / k)))
        return low, k + -(-size // (1 << low))


def _width(size: int) -> int:
    """Bits of a place in a bucket of this size."""
    return max(1, (size - 1).bit_length())


def _ones(places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
    """A bitmap of `size` bits in as few words as hold them, with ones at these places."""
    n = places.shape[0]
    row = jnp.arange(n)[:, None]
    one = jnp.uint32(1) << (places & jnp.uint32(bitmap.WORD - 1))
    zeros = jnp.zeros((n, -(-size // bitmap.WORD)), jnp.uint32)
    return zeros.at[row, (places // bitmap.WORD).astype(jnp.int32)].add(
        one, indices_are_sorted=True, mode="drop"
    )


def _places(words: UInt32[Array, "n words"], k: int) -> UInt32[Array, "n k"]:
    """Where the first `k` ones of a bitmap are."""
    n, count = words.shape
    padded = jnp.pad(words, ((0, 0), (0, -count % bitmap.WORD)))
    return bitmap.places(padded, k, bitmap.from_first(n)).astype(jnp.uint32)

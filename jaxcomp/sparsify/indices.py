"""Encodings of the indices of the sent values as words.

Indices are ascending and below the size of the bucket. If there are fewer indices than slots, the
remaining slots repeat an index, and the receiver ignores them by the number of values. All
encodings have a static size.
"""

import abc
import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Int32, UInt32

from jaxcomp import bits
from jaxcomp.base.interface import Interface
from jaxcomp.entropy import rice
from jaxcomp.sparsify import bitmap
from jaxcomp.types import Array


class Indices(Interface, abstract=True):
    """A frozen dataclass that maps ascending indices to words and back."""

    @abc.abstractmethod
    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        """Encodes `k` indices below `size` in each row."""

    @abc.abstractmethod
    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        """Decodes the `k` indices of each row."""


@dataclasses.dataclass(frozen=True)
class Raw(Indices):
    """One word, 32 bits, for each index."""

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        del size
        return places

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        del k, size
        return words


@dataclasses.dataclass(frozen=True)
class Packed(Indices):
    """`⌈log₂ size⌉` bits for each index, in any order."""

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        return bits.pack(places, bits=_width(size))

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        return bits.unpack(words, bits=_width(size), size=k)


@dataclasses.dataclass(frozen=True)
class Bitmap(Indices):
    """A bit for every element of the bucket, the shortest from a density of about a quarter on.

    Every slot must be used, with different indices.
    """

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        return _ones(places, size)

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        return _places(words, k)


@dataclasses.dataclass(frozen=True)
class EliasFano(Indices):
    """`2 + log₂(size / k)` bits for each index, within half a bit of the entropy of random indices.

    The `l = ⌊log₂(size / k)⌋` low bits of each index are packed; for the high bits, index `i` sets
    bit `⌊indexᵢ / 2ˡ⌋ + i` of a bitmap of `k + ⌈size / 2ˡ⌉` bits.

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
        return _split_words(high, places, low, ones)

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        low, ones = self._split(k, size)
        high, rest = _split_parts(words, k, low, ones)
        return ((high - jnp.arange(k, dtype=jnp.uint32)[None]) << low) | rest

    def _split(self, k: int, size: int) -> tuple[int, int]:
        """The low bits of a place, and the bits of the bitmap of the rest."""
        low = max(0, math.floor(math.log2(size / k)))
        return low, k + -(-size // (1 << low))


@dataclasses.dataclass(frozen=True)
class RiceGaps(Indices, public=("bits",)):
    """Rice codes of the gaps: `r` low bits, and the quotient as a run of zeros ended by a one.

    A gap `g` takes `r + 1 + ⌊g / 2ʳ⌋` bits, with `r = max(0, 1 + ⌊log₂(ln(φ − 1) / ln(1 − p))⌋)`
    for a density `p = k / size`, where `φ` is the golden ratio: within 0.1 bit of the entropy for
    random indices. The size is static, that of the most uneven indices, which equals Elias–Fano's;
    `bits` returns the size that an entropy coder or a link of variable length would need. Low bits
    and runs are stored separately, so that all gaps are decoded in parallel.

    Example:
        >>> places = jnp.array([[3, 4, 7, 13, 14, 15, 21, 43]], jnp.uint32)
        >>> RiceGaps().decode(RiceGaps().encode(places, 48), 8, 48)
        Array([[ 3,  4,  7, 13, 14, 15, 21, 43]], dtype=uint32)
        >>> RiceGaps().bits(places, 48)
        Array([31], dtype=int32)

    References:
        Rice and Plaunt, Adaptive variable-length coding for efficient compression of spacecraft
        television data, 1971; Kiely, Selecting the Golomb parameter in Rice coding, 2004.
    """

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        low, ones = self._split(places.shape[1], size)
        found = gaps(places)
        return _split_words(from_gaps(found >> low), found, low, ones)

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        low, ones = self._split(k, size)
        ends, rest = _split_parts(words, k, low, ones)
        return from_gaps((gaps(ends) << low) | rest)

    def bits(self, places: UInt32[Array, "n k"], size: int) -> Int32[Array, " n"]:
        """The bits of each row, without unused capacity."""
        low, _ = self._split(places.shape[1], size)
        last = from_gaps(gaps(places) >> low)[:, -1].astype(jnp.int32)
        return last + 1 + low * places.shape[1]

    def _split(self, k: int, size: int) -> tuple[int, int]:
        """The low bits of a gap, and the bits of the runs at most."""
        low = rice.parameter(k / size) if 0 < k < size else 0
        return low, k + ((size - k) >> low)


def gaps(places: UInt32[Array, "n k"]) -> UInt32[Array, "n k"]:
    """The number of elements between each index and the previous one; zero for a repeated index."""
    after = jnp.pad(places[:, :-1] + jnp.uint32(1), ((0, 0), (1, 0)))
    return jnp.where(places < after, 0, places - after)


def from_gaps(gaps: UInt32[Array, "n k"]) -> UInt32[Array, "n k"]:
    """The inverse of `gaps`."""
    return jnp.cumsum(gaps + jnp.uint32(1), axis=1) - jnp.uint32(1)


def _width(size: int) -> int:
    """The bits of an index in a bucket of this size."""
    return max(1, (size - 1).bit_length())


def _split_words(
    high: UInt32[Array, "n k"], low: UInt32[Array, "n k"], width: int, ones: int
) -> UInt32[Array, "n words"]:
    """A bitmap of `ones` bits with ones at `high`, and the `width` low bits of `low`."""
    parts = [_ones(high, ones)]
    if width:
        parts.append(bits.pack(low & jnp.uint32((1 << width) - 1), bits=width))
    return jnp.concatenate(parts, axis=1)


def _split_parts(
    words: UInt32[Array, "n words"], k: int, width: int, ones: int
) -> tuple[UInt32[Array, "n k"], UInt32[Array, "n k"]]:
    """The ones of the bitmap, and the low bits."""
    end = -(-ones // bitmap.WORD)
    high = _places(words[:, :end], k)
    if not width:
        return high, jnp.zeros_like(high)
    return high, bits.unpack(words[:, end:], bits=width, size=k)


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
    """The positions of the first `k` ones of a bitmap."""
    n, count = words.shape
    padded = jnp.pad(words, ((0, 0), (0, bitmap.words(bitmap.WORD * count) - count)))
    return bitmap.places(padded, k, bitmap.from_first(n)).astype(jnp.uint32)

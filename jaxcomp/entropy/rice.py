"""Golomb–Rice codes: for gaps, which are geometric, within an eighth of a bit of the entropy.

A number `g ≥ 0` is its quotient by `2^parameter`, as so many zeros and a one, and the remainder in
`parameter` bits. Quotients and remainders are kept apart: the ones of the first part are found all
at once and say where everything is, so nothing is read one after another.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float32, Int32, UInt32

from jaxcomp import checks
from jaxcomp.entropy import prefix, stream
from jaxcomp.entropy.coder import Coder, Counts, Stream, Symbols, Words
from jaxcomp.types import Array

_GOLDEN = (math.sqrt(5) - 1) / 2
_MOST = 30
_PARAMETER = 5
"""Bits of a parameter."""


def parameter(density: float) -> int:
    """The best parameter for the gaps between places that are taken with this probability.

    `max(0, 1 + ⌊log₂(ln(φ − 1) / ln(1 − p))⌋)` with the golden ratio `φ`.

    Raises:
        ValueError: for a density that is not in (0, 1].

    Example:
        >>> [parameter(p) for p in (0.1, 0.01, 0.001, 0.0001)]
        [3, 6, 9, 13]

    References:
        Kiely, Selecting the Golomb parameter in Rice coding, 2004.
    """
    checks.fraction(density)
    return sum(density <= bound for bound in _densities())


def length(numbers: UInt32[Array, "..."], parameter: int | Array) -> Int32[Array, "..."]:
    """The bits of each number.

    Example:
        >>> length(jnp.array([0, 7, 8], jnp.uint32), 3)
        Array([4, 4, 5], dtype=int32)
    """
    parameter = jnp.asarray(parameter, jnp.uint32)
    return ((numbers >> parameter) + 1 + parameter).astype(jnp.int32)


def encode(numbers: UInt32[Array, "n k"], parameter: int, words: int) -> Words:
    """Remainders first, then quotients; what is beyond the last word is lost.

    Args:
        numbers: `[n, k]`, from zero on.
        parameter: bits of a remainder, 0 to 30.
        words: the length of a stream; `length` summed up says how many bits it takes.

    Raises:
        ValueError: for another parameter.

    Example:
        >>> words = encode(jnp.array([[5, 0, 9]], jnp.uint32), 2, words=1)
        >>> decode(words, 3, 2)
        Array([[5, 0, 9]], dtype=uint32)
    """
    checks.integer("parameter", parameter, 0, _MOST)
    n, k = numbers.shape
    rest = numbers & ((1 << parameter) - 1)
    coded = stream.write(rest, stream.every(n, k, parameter), words)
    return coded | _unary(numbers >> parameter, jnp.ones((n, k), bool), k * parameter, words)


def decode(words: Words, k: int, parameter: int) -> UInt32[Array, "n k"]:
    """The `k` numbers of each row."""
    checks.integer("parameter", parameter, 0, _MOST)
    words = prefix.pad(words)
    begins = stream.every(words.shape[0], k, parameter)
    rest = stream.read(words, begins, jnp.full_like(begins, parameter))
    quotients = _quotients(_ones(words, jnp.int32(k * parameter), k))
    return (quotients << parameter) | rest


@dataclasses.dataclass(frozen=True)
class Rice(Coder):
    """Rice codes of the gaps between nonzero levels, with each level's sign and magnitude.

    A stream consists of the number of nonzero levels, in `⌊log₂ size⌋ + 1` bits; the parameter, in
    five bits; the quotients of all gaps; for each magnitude the number of digits after the first
    one, as zeros and a one; the remainders of all gaps; and for each level its sign (1 below zero)
    and those digits. A magnitude is thus in Elias' γ code, with one bit if it is always 1.

    Args:
        k: the parameter, 0 to 30; None for the best one for each row's fraction of nonzero levels.

    Raises:
        ValueError: for another parameter.

    Example:
        >>> coder, symbols = Rice(), jnp.array([[0, 0, 2, 0, 5]], jnp.uint32)
        >>> coded = coder.encode(symbols, jnp.array([5]), (), words=1)
        >>> coder.decode(coded.words, coded.kept, 5, ())
        Array([[0, 0, 2, 0, 5]], dtype=uint32)

    References:
        Golomb, Run-length encodings, 1966; Rice, Some practical universal noiseless coding
        techniques, 1979.
    """

    k: int | None = None
    adaptive = False

    def __post_init__(self):
        if self.k is not None:
            checks.integer("k", self.k, 0, _MOST)

    def table(self, counts: Float32[Array, " symbols"]) -> tuple[()]:
        del counts
        return ()

    def encode(self, symbols: Symbols, count: Counts, table: tuple[()], words: int) -> Stream:
        del table
        n, size = symbols.shape
        place = jnp.arange(size, dtype=jnp.int32)[None]
        hits = (symbols > 0) & (place < count[:, None])
        gaps = jnp.where(hits, place - prefix.previous(hits) - 1, 0).astype(jnp.uint32)
        best = self._best(hits, count)[:, None]
        digits = jnp.maximum(stream.width(prefix.magnitude(symbols)) - 1, 0)
        lengths = jnp.where(hits, length(gaps, best) + 2 * digits + 2, 0)
        found = prefix.fit(lengths, count, stream.WORD * words - _head(size))
        real = hits & found.fits
        number = jnp.sum(real, axis=1, dtype=jnp.int32)
        quotients, rest = gaps >> best, gaps & ((jnp.uint32(1) << best) - 1)
        after = _head(size) + jnp.sum(jnp.where(real, quotients + 1, 0), axis=1).astype(jnp.int32)
        below = after + jnp.sum(jnp.where(real, digits + 1, 0), axis=1)
        begins = stream.begins(real.astype(jnp.int32)) * best.astype(jnp.int32) + below[:, None]
        coded = _unary(quotients, real, _head(size), words)
        coded = coded | _unary(digits.astype(jnp.uint32), real, after[:, None], words)
        coded = coded | stream.write(jnp.where(real, rest, 0), begins, words)
        magnitude = prefix.magnitude(symbols)
        low = magnitude & ((jnp.uint32(1) << digits.astype(jnp.uint32)) - 1)
        level = prefix.negative(symbols) | (low << 1)
        begins = stream.begins(jnp.where(real, digits + 1, 0))
        begins = begins + (below + number * best[:, 0].astype(jnp.int32))[:, None]
        coded = coded | stream.write(jnp.where(real, level, 0), begins, words)
        if 32 * words < _head(size):
            return Stream(jnp.zeros((n, words), jnp.uint32), found.kept, found.kept)
        for part, begin in ((number.astype(jnp.uint32)[:, None], 0), (best, size.bit_length())):
            coded = coded | stream.write(part, jnp.full((n, 1), begin, jnp.int32), words)
        used = _head(size) + jnp.sum(found.lengths, axis=1, dtype=jnp.int32)
        some = found.kept > 0
        return Stream(jnp.where(some[:, None], coded, 0), found.kept, jnp.where(some, used, 0))

    def decode(self, words: Words, kept: Counts, size: int, table: tuple[()]) -> Symbols:
        del table
        words, row = prefix.pad(words), jnp.arange(kept.shape[0])[:, None]
        number = prefix.take(words, jnp.zeros_like(kept), size.bit_length()).astype(jnp.int32)
        number = jnp.clip(number, 0, size)
        best = prefix.take(words, jnp.full_like(kept, size.bit_length()), _PARAMETER)
        best = jnp.minimum(best, _MOST).astype(jnp.int32)
        ones = _ones(words, jnp.int32(_head(size)), 2 * size)
        slot = jnp.arange(size, dtype=jnp.int32)[None]
        real = slot < number[:, None]
        last = jnp.take_along_axis(ones, number[:, None] * jnp.array([[1, 2]]) - 1, 1, mode="clip")
        after = jnp.where(number > 0, last[:, 0] + 1, 0)
        below = jnp.where(number > 0, last[:, 1] + 1, 0) + _head(size)
        quotients = _quotients(ones[:, :size])
        unary = jnp.take_along_axis(ones, slot + number[:, None], 1, mode="clip")
        digits = jnp.clip(_quotients(unary - after[:, None]).astype(jnp.int32), 0, 7)
        digits = jnp.where(real, digits, 0)
        begins = slot * best[:, None] + below[:, None]
        rest = stream.read(words, begins, jnp.broadcast_to(best[:, None], begins.shape))
        begins = stream.begins(jnp.where(real, digits + 1, 0))
        begins = begins + (below + number * best)[:, None]
        level = stream.read(words, begins, digits + 1)
        size_of = (jnp.uint32(1) << digits.astype(jnp.uint32)) | (level >> 1)
        # No gap, and no sum of gaps, is longer than the row, even for invalid words.
        gaps = jnp.minimum((quotients << best[:, None].astype(jnp.uint32)) | rest, size)
        steps = gaps.astype(jnp.int32) + 1
        place = lax.associative_scan(lambda a, b: jnp.minimum(a + b, size + 1), steps, axis=1) - 1
        place = jnp.where(real, jnp.minimum(place, size), size)
        found = jnp.zeros((kept.shape[0], size), jnp.uint32)
        found = found.at[row, place].set(prefix.symbol(size_of, level & 1), mode="drop")
        return jnp.where(slot < kept[:, None], found, 0)

    def least_bits(self, size: int) -> int:
        return _head(size)

    def worst_bits(self, size: int, symbols: int) -> int:
        digits = max((symbols // 2).bit_length() - 1, 0)
        worst = _head(size)
        bounds = (1.0, *_densities(), 0.0)
        for best in range(_MOST + 1) if self.k is None else (self.k,):
            dense = 1.0 if self.k is not None else bounds[best]
            number = min(size, math.ceil(size * dense) + 1)
            # The cost of each level exceeds the gain from a shorter gap.
            bits = number * (best + 3 + 2 * digits) + ((size - number) >> best)
            worst = max(worst, _head(size) + bits)
        return worst

    def _best(self, hits: Bool[Array, "n size"], count: Counts) -> UInt32[Array, " n"]:
        """The parameter of each row."""
        if self.k is not None:
            return jnp.full_like(count, self.k, jnp.uint32)
        number = jnp.sum(hits, axis=1, dtype=jnp.float32)
        bounds = jnp.array([_densities()], jnp.float32) * count.astype(jnp.float32)[:, None]
        return jnp.sum(number[:, None] <= bounds, axis=1, dtype=jnp.uint32)


def _densities() -> tuple[float, ...]:
    """The densities up to which a parameter is at least 1, 2, and so on."""
    return tuple(-math.expm1(math.log(_GOLDEN) * 2.0 ** (1 - k)) for k in range(1, _MOST + 1))


def _head(size: int) -> int:
    return size.bit_length() + _PARAMETER


def _unary(
    numbers: UInt32[Array, "n k"], real: Bool[Array, "n k"], begin: Array | int, words: int
) -> Words:
    """The given number of zeros followed by a one, starting at a bit."""
    lengths = jnp.where(real, numbers + 1, 0).astype(jnp.int32)
    ends = jnp.cumsum(lengths, axis=1) - 1 + begin
    # Padding goes to a position that is not written.
    ends = jnp.where(real, ends, stream.WORD * words)
    ones = jnp.where(real, jnp.uint32(1) << (ends & 31).astype(jnp.uint32), 0)
    row = jnp.arange(numbers.shape[0])[:, None]
    empty = jnp.zeros((numbers.shape[0], words), jnp.uint32)
    return empty.at[row, ends >> 5].add(ones, mode="drop")


def _ones(words: Words, begin: Array, k: int) -> Int32[Array, "n k"]:
    """The positions of the ones after a given bit, relative to it."""
    first = jnp.arange(words.shape[1], dtype=jnp.int32)[None] * stream.WORD
    skip = jnp.clip(begin - first, 0, stream.WORD)
    mask = jnp.uint32(0xFFFFFFFF) << jnp.minimum(skip, stream.WORD - 1).astype(jnp.uint32)
    return stream.ones(words & jnp.where(skip < stream.WORD, mask, 0), k) - begin


def _quotients(ones: Int32[Array, "n k"]) -> UInt32[Array, "n k"]:
    """The zeros before each one."""
    before = jnp.pad(ones[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return jnp.maximum(ones - before - 1, 0).astype(jnp.uint32)

"""Elias' codes of the integers, without a table: smaller integers have shorter codes."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32, UInt32

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.entropy import prefix, stream
from jaxcomp.entropy.coder import SYMBOLS, Coder, Counts, Stream, Symbols, Words
from jaxcomp.types import Array

CODES = ("omega", "gamma", "delta")


class Codeword(NamedTuple):
    """A codeword in two parts of at most 32 bits, the first bit of each its lowest.

    Attributes:
        head: the part that tells how long the other is.
        head_bits: its length.
        tail: the digits of the number.
        tail_bits: its length.
    """

    head: UInt32[Array, "..."]
    head_bits: Int32[Array, "..."]
    tail: UInt32[Array, "..."]
    tail_bits: Int32[Array, "..."]


def codeword(numbers: UInt32[Array, "..."], code: str = "omega") -> Codeword:
    """The codeword of each number, from 1 to 2³¹ − 1.

    With `L = ⌊log₂ k⌋`: γ is `L` zeros and the `L + 1` digits of `k`; δ is γ of `L + 1` and the
    digits but the first; ω writes the digits of `k`, before them those of `L`, and so on down to
    one, and a zero at the end.

    Args:
        numbers: the numbers to code.
        code: "omega", "gamma" or "delta".

    Raises:
        ValueError: for another code.

    References:
        Elias, Universal codeword sets and representations of the integers, 1975.
    """
    checks.choice("code", code, CODES)
    numbers = jnp.asarray(numbers, jnp.uint32)
    digits = stream.width(numbers)
    less = digits - 1
    zero = jnp.zeros_like(numbers)
    if code == "gamma":
        return Codeword(zero, less, prefix.reverse_bits(numbers, digits), digits)
    if code == "delta":
        length, zeros = digits.astype(jnp.uint32), stream.width(digits.astype(jnp.uint32)) - 1
        head = prefix.reverse_bits(length, zeros + 1) << zeros.astype(jnp.uint32)
        rest = numbers & ((jnp.uint32(1) << less.astype(jnp.uint32)) - 1)
        return Codeword(head, 2 * zeros + 1, prefix.reverse_bits(rest, less), less)
    head, head_bits, value = zero, jnp.zeros_like(digits), less
    for _ in range(3):
        bits = jnp.where(value > 1, stream.width(value.astype(jnp.uint32)), 0)
        group = prefix.reverse_bits(value.astype(jnp.uint32), bits)
        head = (head << bits.astype(jnp.uint32)) | group
        head_bits, value = head_bits + bits, jnp.where(value > 1, bits - 1, value)
    some = numbers > 1
    tail = jnp.where(some, prefix.reverse_bits(numbers, digits), 0)
    return Codeword(head, head_bits, tail, jnp.where(some, digits + 1, 1))


def length(numbers: UInt32[Array, "..."], code: str = "omega") -> Int32[Array, "..."]:
    """The bits of each codeword.

    Example:
        >>> length(jnp.array([1, 2, 4, 100], jnp.uint32), "omega")
        Array([ 1,  3,  6, 13], dtype=int32)
    """
    word = codeword(numbers, code)
    return word.head_bits + word.tail_bits


def read(words: Words, begin: Counts, code: str = "omega") -> tuple[UInt32[Array, " n"], Counts]:
    """The number whose codeword begins at the given bit of each row, and the bit after it."""
    checks.choice("code", code, CODES)
    if code == "omega":
        return _read_omega(words, begin)
    window = prefix.take(words, begin, stream.WORD)
    zeros = lax.population_count((window & (~window + 1)) - 1).astype(jnp.int32)
    zeros = jnp.minimum(zeros, 30)
    number, end = _digits(words, begin + zeros, zeros + 1)
    if code == "gamma":
        return number, end
    less = jnp.minimum(number, 31).astype(jnp.int32) - 1
    rest, end = _digits(words, end, less)
    return (jnp.uint32(1) << jnp.maximum(less, 0).astype(jnp.uint32)) | rest, end


def _read_omega(words: Array, begin: Array) -> tuple[UInt32[Array, " n"], Counts]:
    number = jnp.ones_like(begin, jnp.uint32)
    going = jnp.ones_like(begin, bool)
    for _ in range(4):  # The groups of a number below 2³¹ are at most four.
        going = going & (prefix.take(words, begin, 1) == 1)
        bits = jnp.where(going, jnp.minimum(number, 31).astype(jnp.int32) + 1, 0)
        group, begin = _digits(words, begin, bits)
        number = jnp.where(going, group, number)
    return number, begin + 1


def _digits(words: Array, begin: Array, bits: Array) -> tuple[Array, Array]:
    """Reads a number, highest digit first; returns the number and the bit after it."""
    return prefix.reverse_bits(prefix.take(words, begin, bits), bits), begin + bits


@dataclasses.dataclass(frozen=True)
class Elias(Coder):
    """The codes of QSGD: the magnitude of each level, and the sign of nonzero levels.

    Dense: Elias of `magnitude + 1`, then the sign if the level is not zero. Sparse: the number of
    nonzero levels, in `⌊log₂ size⌋ + 1` bits, then for each of them Elias of the gap since the
    previous one, the sign, and Elias of the magnitude. A sign is 1 for levels below zero.

    Rows are decoded in parallel, the symbols of a row sequentially.

    Args:
        code: "omega", "gamma" or "delta".
        sparse: whether to code gaps, which is shorter if most levels are zero.

    Raises:
        ValueError: for another code.

    Example:
        >>> coder, symbols = Elias(), jnp.array([[0, 1, 4]], jnp.uint32)
        >>> coded = coder.encode(symbols, jnp.array([3]), (), words=1)
        >>> int(coded.bits[0])  # 0, 100 + sign, 110 + sign.
        9
        >>> coder.decode(coded.words, coded.kept, 3, ())
        Array([[0, 1, 4]], dtype=uint32)

    References:
        Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017, sections 3.1 and A.3.

    Note:
        The paper's stream does not have the number of nonzero levels, without which a decoder does
        not know the end.
    """

    code: str = "omega"
    sparse: bool = False
    adaptive = False

    def __post_init__(self):
        checks.choice("code", self.code, CODES)
        checks.choice("sparse", self.sparse, (False, True))

    def table(self, counts: Float32[Array, " symbols"]) -> tuple[()]:
        del counts
        return ()

    def encode(self, symbols: Symbols, count: Counts, table: tuple[()], words: int) -> Stream:
        del table
        entry = jnp.take(self._levels(), symbols.astype(jnp.int32), mode="clip")
        level, lengths = entry & 0xFFFF, (entry >> 16).astype(jnp.int32)
        if not self.sparse:
            found = prefix.fit(lengths, count, stream.WORD * words)
            begins = stream.begins(found.lengths)
            coded = stream.write(jnp.where(found.fits, level, 0), begins, words)
            return Stream(coded, found.kept, jnp.sum(found.lengths, axis=1, dtype=jnp.int32))
        head, hits = _head(symbols.shape[1]), symbols > 0
        place = jnp.arange(symbols.shape[1], dtype=jnp.int32)[None]
        gap = codeword((place - prefix.previous(hits)).astype(jnp.uint32), self.code)
        total = jnp.where(hits, gap.head_bits + gap.tail_bits + lengths, 0)
        found = prefix.fit(total, count, stream.WORD * words - head)
        begins, real = stream.begins(found.lengths) + head, found.fits & hits
        number = jnp.sum(real, axis=1, keepdims=True, dtype=jnp.uint32)
        coded = stream.write(number, jnp.zeros(number.shape, jnp.int32), words)
        for part, bits in ((gap.head, gap.head_bits), (gap.tail, gap.tail_bits), (level, lengths)):
            coded = coded | stream.write(jnp.where(real, part, 0), begins, words)
            begins = begins + bits
        used = jnp.sum(found.lengths, axis=1, dtype=jnp.int32)
        return Stream(coded, found.kept, jnp.where(found.kept > 0, used + head, 0))

    def decode(self, words: Words, kept: Counts, size: int, table: tuple[()]) -> Symbols:
        del table
        words = prefix.pad(words)
        found = (self._gaps if self.sparse else self._dense)(words, kept, size)
        return jnp.where(jnp.arange(size)[None] < kept[:, None], found, 0)

    def least_bits(self, size: int) -> int:
        return _head(size) if self.sparse else 0

    def worst_bits(self, size: int, symbols: int) -> int:
        sizes = (np.arange(symbols) + 1) // 2
        numbers = np.maximum(sizes, 1) if self.sparse else sizes + 1
        longest = int(np.max(np.array([_bits(self.code, int(k)) for k in numbers]) + (sizes > 0)))
        # In the sparse code, a single gap has the most bits for each of its elements.
        return size * (longest + 1) + _head(size) if self.sparse else size * longest

    def _levels(self) -> UInt32[Array, "256"]:
        """The codeword of each symbol including its sign, with its length in the upper bits."""
        symbols = jnp.arange(SYMBOLS, dtype=jnp.uint32)
        size, sign = prefix.magnitude(symbols), prefix.negative(symbols)
        word = codeword(jnp.maximum(size, 1) if self.sparse else size + 1, self.code)
        bits = (word.head_bits + word.tail_bits).astype(jnp.uint32)
        code = word.head | (word.tail << word.head_bits.astype(jnp.uint32))
        code = (code << 1) | sign if self.sparse else code | (sign << bits)
        return code | ((bits + (symbols > 0).astype(jnp.uint32)) << 16)

    def _dense(self, words: Array, kept: Array, size: int) -> Symbols:
        def step(begin: Array, _: None) -> tuple[Array, Array]:
            number, end = read(words, begin, self.code)
            sign = jnp.where(number > 1, prefix.take(words, end, 1), 0)
            found = prefix.symbol(number - 1, sign)
            return end + (number > 1).astype(jnp.int32), found

        begin, words = axes.match_vma(jnp.zeros_like(kept), words)
        return lax.scan(step, begin, None, length=size)[1].T

    def _gaps(self, words: Array, kept: Array, size: int) -> Symbols:
        n, head = kept.shape[0], _head(size)
        number = prefix.take(words, jnp.zeros_like(kept), head).astype(jnp.int32)
        number = jnp.clip(number, 0, jnp.clip(kept, 0, size))
        row = jnp.arange(n)

        def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            begin, place, found = state
            gap, begin = read(words, begin, self.code)
            sign = prefix.take(words, begin, 1)
            level, begin = read(words, begin + 1, self.code)
            # No gap is longer than the row, even for invalid words.
            place = jnp.minimum(place + jnp.minimum(gap, size).astype(jnp.int32), size)
            place = jnp.where(i < number, place, size)
            found = found.at[row, place].set(prefix.symbol(level, sign), mode="drop")
            return begin, place, found

        begin, place = jnp.full_like(kept, head), jnp.full_like(kept, -1)
        state = axes.match_vma(begin, place, jnp.zeros((n, size), jnp.uint32), words)[:3]
        return lax.fori_loop(0, jnp.max(number, initial=0), step, state)[2]


def _head(size: int) -> int:
    """The bits of the number of nonzero levels."""
    return size.bit_length()


def _bits(code: str, k: int) -> int:
    """The bits of a codeword, as `length` has them."""
    less = k.bit_length() - 1
    if code == "gamma":
        return 2 * less + 1
    if code == "delta":
        return less + 2 * (less + 1).bit_length() - 1
    total = 1
    while k > 1:
        total, k = total + k.bit_length(), k.bit_length() - 1
    return total

"""Canonical Huffman codes, which are defined by the lengths of the codewords."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32, UInt32

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.entropy import prefix, stream
from jaxcomp.entropy.coder import SYMBOLS, Coder, Counts, Stream, Symbols, Table, Words
from jaxcomp.types import Array


@dataclasses.dataclass(frozen=True)
class Huffman(Coder):
    """The shortest code with whole bits for each symbol, none longer than `limit`.

    Without a limit it takes at most `p + 0.086` bits more than the entropy, where `p` is the
    largest probability: this is much if most levels are zero. The table contains the lengths.

    Rows are decoded in parallel, the symbols of a row sequentially.

    Args:
        limit: bits of the longest codeword, 1 to 15.

    Raises:
        ValueError: for another limit.

    Example:
        >>> coder, symbols = Huffman(), jnp.array([[0, 1, 0, 2]], jnp.uint32)
        >>> table = coder.table(jnp.array([2.0, 1.0, 1.0]))
        >>> coded = coder.encode(symbols, jnp.array([4]), table, words=1)
        >>> int(coded.bits[0])
        6
        >>> coder.decode(coded.words, coded.kept, 4, table)
        Array([[0, 1, 0, 2]], dtype=uint32)

    References:
        Huffman, A method for the construction of minimum-redundancy codes, 1952; Larmore and
        Hirschberg, A fast algorithm for optimal length-limited Huffman codes, 1990; Gallager,
        Variations on a theme by Huffman, 1978, for the redundancy.
    """

    limit: int = 15
    adaptive = True

    def __post_init__(self):
        checks.integer("limit", self.limit, 1, 15)

    def table(self, counts: Float32[Array, " symbols"]) -> Table:
        """The length of each symbol's codeword."""
        return lengths(counts, self.limit)

    def encode(self, symbols: Symbols, count: Counts, table: Table, words: int) -> Stream:
        entry = jnp.take(_codewords(table, self.limit), symbols.astype(jnp.int32), mode="clip")
        length = (entry >> 16).astype(jnp.int32)
        found = prefix.fit(length, count, stream.WORD * words)
        code = jnp.where(found.fits, entry & 0xFFFF, 0)
        coded = stream.write(code, stream.begins(found.lengths), words)
        return Stream(coded, found.kept, jnp.sum(found.lengths, axis=1, dtype=jnp.int32))

    def decode(self, words: Words, kept: Counts, size: int, table: Table) -> Symbols:
        lookup, words = _lookup(table, self.limit), prefix.pad(words)

        def step(begin: Array, _: None) -> tuple[Array, Array]:
            window = prefix.take(words, begin, self.limit).astype(jnp.int32)
            entry = jnp.take(lookup, window, mode="clip")
            return begin + (entry >> 8).astype(jnp.int32), (entry & 0xFF).astype(jnp.uint8)

        begin = axes.match_vma(jnp.zeros_like(kept), words, lookup)[0]
        _, found = lax.scan(step, begin, None, length=size)
        return jnp.where(jnp.arange(size)[None] < kept[:, None], found.T.astype(jnp.uint32), 0)

    def least_bits(self, size: int) -> int:
        del size
        return 0

    def worst_bits(self, size: int, symbols: int) -> int:
        return size * max(1, min(self.limit, symbols - 1))


def lengths(counts: Float32[Array, " symbols"], limit: int = 15) -> Table:
    """The lengths of the best prefix code whose codewords have at most `limit` bits.

    Package-merge: a codeword of `h` bits is `h` coins, worth `1/2` down to `2^-h`, which all weigh
    what its symbol does, and of the coins that are worth `symbols − 1` the lightest are taken. From
    the smallest value up, two neighbours in order of weight make a coin of the next value.

    Args:
        counts: the symbols' weights, from zero on.
        limit: bits of the longest codeword.

    Raises:
        ValueError: where `limit` bits are too few for so many symbols, or there are more than 256.

    Example:
        >>> lengths(jnp.array([8.0, 4.0, 2.0, 1.0, 1.0]))
        Array([1, 2, 3, 4, 4], dtype=uint32)
    """
    symbols = counts.size
    checks.integer("symbols", symbols, 1, SYMBOLS)
    checks.integer("limit", limit, max((symbols - 1).bit_length(), 1))
    if symbols == 1:
        return jnp.ones(1, jnp.uint32)
    counts = jnp.clip(jnp.where(counts > 0, counts, 0), 0, jnp.finfo(jnp.float32).max)
    weights = counts / jnp.where(jnp.max(counts) > 0, jnp.max(counts), 1)
    order = jnp.argsort(weights)
    leaves, own = weights[order], jnp.arange(2 * symbols) < symbols

    def merge(packages: Array, _: None) -> tuple[Array, Array]:
        # Among equal weights the leaf comes first: then the lengths are those of a prefix code,
        # even if sums are rounded.
        weight, leaf = lax.sort((jnp.concatenate([leaves, packages]), own), num_keys=1)
        return weight[0::2] + weight[1::2], jnp.cumsum(leaf, dtype=jnp.int32)

    none = axes.match_vma(jnp.full(symbols, jnp.inf, jnp.float32), leaves)[0]
    _, leaf = lax.scan(merge, none, None, length=limit)

    def take(number: Array, leaf: Array) -> tuple[Array, Array]:
        found = jnp.where(number > 0, leaf[jnp.maximum(number - 1, 0)], 0)
        return 2 * (number - found), found

    first = axes.match_vma(jnp.int32(2 * symbols - 2), leaf)[0]
    _, found = lax.scan(take, first, leaf, reverse=True)
    bits = jnp.sum(jnp.arange(symbols)[None] < found[:, None], axis=0, dtype=jnp.uint32)
    return jnp.zeros(symbols, jnp.uint32).at[order].set(bits)


def _canonical(table: Table, limit: int) -> tuple[Int32[Array, " symbols"], Table]:
    """The lengths, and the codewords aligned to the highest of `limit` bits."""
    length = jnp.clip(table.astype(jnp.int32), 1, limit)
    order = jnp.argsort(length)
    slots = jnp.uint32(1) << (limit - length[order]).astype(jnp.uint32)
    begins = jnp.cumsum(slots, dtype=jnp.uint32) - slots
    return length, jnp.zeros(table.size, jnp.uint32).at[order].set(begins)


def _codewords(table: Table, limit: int) -> Table:
    """The codeword of each symbol with its first bit lowest, and its length in the upper bits."""
    length, begins = _canonical(table, limit)
    code = prefix.reverse_bits(begins >> (limit - length).astype(jnp.uint32), length)
    return (code & 0xFFFF) | (length.astype(jnp.uint32) << 16)


def _lookup(table: Table, limit: int) -> UInt32[Array, " slots"]:
    """The first symbol in each word of `limit` bits, with its length in the upper bits."""
    length, begins = _canonical(table, limit)
    order = jnp.argsort(length)
    marks = jnp.zeros(1 << limit, jnp.int32)
    marks = marks.at[begins[order].astype(jnp.int32)].add(1, mode="drop")
    symbol = jnp.take(order, jnp.cumsum(marks) - 1, mode="clip")
    entry = symbol.astype(jnp.uint32) | (length[symbol].astype(jnp.uint32) << 8)
    # A codeword's first bit is the lowest of a window of the stream.
    number, turned = np.arange(1 << limit), np.zeros(1 << limit, int)
    for bit in range(limit):
        turned |= ((number >> bit) & 1) << (limit - 1 - bit)
    return entry[turned]

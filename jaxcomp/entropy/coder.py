"""The interface of entropy coders: rows of symbols to streams of bits and back."""

import abc
from typing import NamedTuple

from jaxtyping import Float32, Int32, UInt32

from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree

Symbols = UInt32[Array, "n size"]
Words = UInt32[Array, "n words"]
Counts = Int32[Array, " n"]
Table = UInt32[Array, " symbols"]

SYMBOLS = 256
"""The largest alphabet."""


class Stream(NamedTuple):
    """Rows of symbols as bits, in a static number of words.

    Attributes:
        words: `uint32[n, words]`, the stream of each row; zeros after its end.
        kept: `int32[n]`, the number of symbols of each row in the stream: the longest prefix that
            fits.
        bits: `int32[n]`, the number of used bits of the words, without `kept`.
    """

    words: Words
    kept: Counts
    bits: Counts


class Coder(Interface, abstract=True):
    """Maps symbols to a stream in which frequent symbols are short, and back.

    Symbols number a quantizer's levels by magnitude: 0 is zero, `2m − 1` is `+m`, `2m` is `−m`;
    there are at most 256. The first `count[b]` symbols of row `b` are real. Symbols that do not fit
    into the words are not coded; `Stream.kept` is the number of coded ones. A decoder accepts any
    input: invalid input gives meaningless symbols, but takes no longer.

    Attributes:
        adaptive: whether the code uses a table made from the symbols' frequencies.
    """

    adaptive: bool

    @abc.abstractmethod
    def table(self, counts: Float32[Array, " symbols"]) -> PyTree:
        """The table that encoder and decoder share, from the symbols' weights; `()` for none.

        A symbol of weight zero can still be coded. If all weights are zero, they count as equal.
        """

    @abc.abstractmethod
    def encode(self, symbols: Symbols, count: Counts, table: PyTree, words: int) -> Stream:
        """Encodes the symbols of each row, as many as fit into the words."""

    @abc.abstractmethod
    def decode(self, words: Words, kept: Counts, size: int, table: PyTree) -> Symbols:
        """Decodes the first `kept` symbols of each row, followed by zeros."""

    @abc.abstractmethod
    def least_bits(self, size: int) -> int:
        """The bits of a row before its first symbols."""

    @abc.abstractmethod
    def worst_bits(self, size: int, symbols: int) -> int:
        """The most bits of a row of `size` symbols of `symbols` kinds, for any table."""

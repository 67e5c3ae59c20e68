"""The interface of entropy coders: rows of symbols to streams of bits and back."""

import abc
from typing import NamedTuple

from jaxtyping import Float32, Int32, UInt32

from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree

SYMBOLS = 256
"""The largest alphabet."""


class Stream(NamedTuple):
    """Rows of symbols as bits, in a static number of words.

    Attributes:
        words: `uint32[n, words]`, the stream of each row; zeros after its end.
        kept: `int32[n]`, how many symbols of each row are in it: a prefix, as long as fits.
        bits: `int32[n]`, how many bits of the words are used, `kept` not among them.
    """

    words: UInt32[Array, "n words"]
    kept: Int32[Array, " n"]
    bits: Int32[Array, " n"]


class Coder(Interface, abstract=True):
    """Symbols ↔ a stream in which frequent symbols are short.

    Symbols number a quantizer's levels by magnitude: 0 is zero, `2m − 1` is `+m`, `2m` is `−m`, at
    most 256 of them. Of row `b`, the first `count[b]` are real. What does not fit into the words is
    not coded, and `Stream.kept` says so. A decoder may be given anything: the result is then as
    meaningless as the input, but takes no longer.

    Attributes:
        adaptive: whether the code follows a table, made from how often each symbol occurs.
    """

    adaptive: bool

    @abc.abstractmethod
    def table(self, counts: Float32[Array, " symbols"]) -> PyTree:
        """The table that both sides must know, from any weights of the symbols; `()` for none.

        A symbol of weight zero can still be coded. All weights zero are like all equal.
        """

    @abc.abstractmethod
    def encode(
        self, symbols: UInt32[Array, "n size"], count: Int32[Array, " n"], table: PyTree, words: int
    ) -> Stream:
        """The symbols of each row, as many as fit into the words."""

    @abc.abstractmethod
    def decode(
        self, words: UInt32[Array, "n words"], kept: Int32[Array, " n"], size: int, table: PyTree
    ) -> UInt32[Array, "n size"]:
        """The first `kept` symbols of each row, then zeros."""

    @abc.abstractmethod
    def least_bits(self, size: int) -> int:
        """Bits of a row before its first symbols."""

    @abc.abstractmethod
    def worst_bits(self, size: int, symbols: int) -> int:
        """The most bits of a row of `size` symbols out of `symbols` kinds, whatever the table."""

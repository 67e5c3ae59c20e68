"""Indices as gaps, in blocks of equal width."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Int32, UInt32

from jaxcomp import checks
from jaxcomp.entropy import stream
from jaxcomp.sparsify.indices import EliasFano, Indices, from_gaps, gaps
from jaxcomp.types import Array

_WIDTH = 6
"""Bits of a block's width field: 0 to 32."""

_ROOM = 3
"""Capacity in bits for each index, beyond log₂(size / k)."""

_DELTAS, _ELIAS_FANO = 0, 1


@dataclasses.dataclass(frozen=True)
class Deltas(Indices, public=("bits",)):
    """Gaps in blocks of 128, in `⌈log₂ largest gap⌉` bits each, and six bits per block.

    If indices are so uneven that this takes more than `3 + log₂(size / k)` bits each, they are
    Elias–Fano coded in the same words; the first word says which code is used. The size is static,
    and larger than that of Elias–Fano; `bits` returns the size that an entropy coder or a link of
    variable length would need.

    Args:
        block: the number of indices in a block.

    Raises:
        ValueError: for a block that is not positive.
    """

    block: int = 128

    def __post_init__(self):
        checks.integer("block", self.block, 1)

    def encode(self, places: UInt32[Array, "n k"], size: int) -> UInt32[Array, "n words"]:
        n, k = places.shape
        blocks, total = self._blocks(k), self._words(k, size)
        found = gaps(places)
        widths = self._widths(found)
        lengths = jnp.repeat(widths, self.block, axis=1)[:, :k]
        begins = stream.begins(lengths)
        head = stream.write(
            widths.astype(jnp.uint32), stream.every(n, blocks, _WIDTH), _head(blocks)
        )
        body = stream.write(found, begins, total - _head(blocks) - 1)
        deltas = jnp.concatenate([jnp.full((n, 1), _DELTAS, jnp.uint32), head, body], axis=1)
        coded = EliasFano().encode(places, size)
        spare = jnp.zeros((n, total - 1 - coded.shape[1]), jnp.uint32)
        flag = jnp.full((n, 1), _ELIAS_FANO, jnp.uint32)
        other = jnp.concatenate([flag, coded, spare], axis=1)
        fits = begins[:, -1] + lengths[:, -1] <= 32 * body.shape[1]
        return jnp.where(fits[:, None], deltas, other)

    def decode(self, words: UInt32[Array, "n words"], k: int, size: int) -> UInt32[Array, "n k"]:
        n, blocks = words.shape[0], self._blocks(k)
        head, body = words[:, 1 : 1 + _head(blocks)], words[:, 1 + _head(blocks) :]
        widths = stream.read(head, stream.every(n, blocks, _WIDTH), jnp.full((n, blocks), _WIDTH))
        lengths = jnp.repeat(widths.astype(jnp.int32), self.block, axis=1)[:, :k]
        found = stream.read(body, stream.begins(lengths), lengths)
        deltas = from_gaps(found)
        other = EliasFano().decode(words[:, 1 : 1 + _other_words(k, size)], k, size)
        return jnp.where(words[:, :1] == _DELTAS, deltas, other)

    def bits(self, places: UInt32[Array, "n k"]) -> Int32[Array, " n"]:
        """The bits of the gaps and widths of each row, without unused capacity."""
        k = places.shape[1]
        begin = jnp.arange(self._blocks(k), dtype=jnp.int32) * self.block
        real = jnp.minimum(k - begin, self.block)
        return jnp.sum(self._widths(gaps(places)) * real + _WIDTH, axis=1, dtype=jnp.int32)

    def _widths(self, gaps: UInt32[Array, "n k"]) -> Int32[Array, "n blocks"]:
        n, k = gaps.shape
        blocks = self._blocks(k)
        padded = jnp.pad(gaps, ((0, 0), (0, blocks * self.block - k)))
        return stream.width(jnp.max(padded.reshape(n, blocks, self.block), axis=2))

    def _blocks(self, k: int) -> int:
        return -(-k // self.block)

    def _words(self, k: int, size: int) -> int:
        """The words for the larger of both codes, and the word that says which is used."""
        body = -(-math.ceil(k * (_ROOM + max(0.0, math.log2(size / k)))) // stream.WORD)
        return 1 + max(_other_words(k, size), _head(self._blocks(k)) + body)


def _other_words(k: int, size: int) -> int:
    """Words of the Elias–Fano code."""
    like = jax.ShapeDtypeStruct((1, k), jnp.uint32)
    return jax.eval_shape(lambda places: EliasFano().encode(places, size), like).shape[1]


def _head(blocks: int) -> int:
    """Words of the widths."""
    return -(-blocks * _WIDTH // stream.WORD)

"""Codecs of a part of each rotated block, in which all elements are statistically alike."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec, Facts, WrappedCodec
from jaxcomp.codecs import inner
from jaxcomp.codecs.combinators import times
from jaxcomp.types import Array, ArrayLike, AxisName, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(WrappedCodec):
    """Sends the first `k = ⌈fraction · block⌉` elements of each block; the rest decodes to zero.

    It is made for blocks that were rotated at random, in which all elements are statistically
    alike, and allows less than one bit per element. Put it inside `Rotated`, which derives its bias
    and error from `power`; used alone it is neither unbiased nor contractive.

    Args:
        codec: the codec of the sent elements.
        fraction: the fraction of elements that are sent, in (0, 1].
        power: the exponent of the factor `(block / k)^power` on the sent elements: 1 is unbiased, ½
            keeps the length of the block, 0 applies no factor.
        block: elements that were rotated together; None for the whole bucket.

    Raises:
        ValueError: for a fraction outside (0, 1], a block that is not positive, or a codec that
            needs more than the payload to decode, as with adaptive levels.
    """

    codec: Codec
    fraction: int | float
    power: int | float = 1
    block: int | None = None
    unbiased = False
    contractive = False

    def __post_init__(self):
        inner.check("codec", self.codec)
        checks.fraction(self.fraction)
        checks.choice("power", self.power, (0, 0.5, 1))
        _check_block(self.block)

    @functools.cached_property
    def facts(self) -> Facts:
        """A part represents a whole block."""
        known = super().facts
        mixed = max(self.block or self.bucket_size or math.inf, known.mixed)
        return dataclasses.replace(known, bits_per_element=None, reorders=False, mixed=mixed)

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        del side
        n, size = like.shape
        block, k = self._sizes(size)
        found = times(self.codec, key, payload, self.inner_like(like), (block / k) ** self.power)
        whole = jnp.pad(found.reshape(n, -1, k), ((0, 0), (0, 0), (0, block - k)))
        return whole.reshape(n, -1)[:, :size]

    def transform(self, key: Key, x: Array, count: Array) -> tuple[Array, Array]:
        """The elements that are sent, and the number of real ones."""
        del key
        block, k = self._sizes(x.shape[1])
        blocks, left = _in_blocks(x, count, block)
        return blocks[..., :k].reshape(x.shape[0], -1), jnp.minimum(left, k).sum(1)

    def _sizes(self, size: int) -> tuple[int, int]:
        """The number of elements of a block, and the number sent."""
        block = min(self.block or size, size)
        return block, max(1, math.ceil(round(self.fraction * block, 6)))

    def inner_like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        n, size = like.shape
        block, k = self._sizes(size)
        return jax.ShapeDtypeStruct((n, -(-size // block) * k), like.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split(Codec):
    """Encodes the first `fraction · block` elements of each block with `first`, the rest otherwise.

    The rest is encoded with `second`. It is made for blocks that were rotated at random, and gives
    rates between two whole widths.

    Args:
        first: the codec of the first elements.
        second: the codec of the rest.
        fraction: the fraction of elements for `first`, in (0, 1].
        block: elements that were rotated together; None for the whole bucket.

    Raises:
        ValueError: for another fraction, a block that is not positive, codecs of different bucket
            sizes, or codecs that need more than the payload to decode, as with adaptive levels.
    """

    first: Codec
    second: Codec
    fraction: int | float
    block: int | None = None

    def __post_init__(self):
        inner.check("first", self.first)
        inner.check("second", self.second)
        checks.fraction(self.fraction)
        _check_block(self.block)
        if self.first.bucket_size != self.second.bucket_size:
            raise ValueError(
                "`first` and `second` must have the same bucket size, got "
                f"{self.first.bucket_size} and {self.second.bucket_size}"
            )

    @property
    def unbiased(self) -> bool:
        """Whether both codecs are unbiased."""
        return self.first.unbiased and self.second.unbiased

    @property
    def contractive(self) -> bool:
        return self.first.contractive and self.second.contractive

    @property
    def bucket_size(self) -> int | None:
        return self.first.bucket_size

    @functools.cached_property
    def facts(self) -> Facts:
        first, second = self.first.facts, self.second.facts
        return Facts(
            homogeneous=first.homogeneous and second.homogeneous,
            mixed=max(first.mixed, second.mixed),
            agrees=first.agrees or second.agrees,
        )

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The sum of both bounds: no element of a part is larger than the bucket's largest."""
        if peak is None:
            return None
        like = jax.ShapeDtypeStruct((1, size), jnp.float32)
        bounds = [codec.variance_bound(part.shape[1], peak) for codec, part in self._parts(like)]
        known = [bound for bound in bounds if bound is not None]
        return sum(known) if len(known) == len(bounds) else None

    def init(self, like: ArrayLike) -> tuple:
        return tuple(codec.init(part) for codec, part in self._parts(like))

    def agree(self, key: Key, x: Array, count: Array, state: tuple, axis_name: AxisName) -> tuple:
        return tuple(
            codec.agree(key, part, left, own, axis_name)
            for (codec, part, left), own in zip(self._cut(x, count), state, strict=True)
        )

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[tuple, tuple]:
        found = [
            codec.encode(key, part, left, own)
            for (codec, part, left), own in zip(self._cut(x, count), state, strict=True)
        ]
        return tuple(payload for payload, _ in found), tuple(own for _, own in found)

    def decode(self, key: Key, payload: tuple, like: ArrayLike, side: Any = None) -> Array:
        del side
        n, size = like.shape
        blocks = self._blocks(size)
        found = [
            codec.decode(key, own, part).reshape(n, blocks, -1)
            for (codec, part), own in zip(self._parts(like), payload, strict=True)
        ]
        return jnp.concatenate(found, axis=2).reshape(n, -1)[:, :size]

    def _cut(self, x: Array, count: Array) -> list[tuple[Codec, Array, Array]]:
        """Each codec with its columns, and their number of real elements."""
        n, size = x.shape
        blocks, left = _in_blocks(x, count, self._block(size))
        found, begin = [], 0
        for codec, part in self._parts(x):
            width = part.shape[1] // self._blocks(size)
            columns = blocks[..., begin : begin + width].reshape(n, -1)
            found.append((codec, columns, jnp.clip(left - begin, 0, width).sum(1)))
            begin += width
        return found

    def _parts(self, like: ArrayLike) -> list[tuple[Codec, jax.ShapeDtypeStruct]]:
        n, size = like.shape
        block, blocks = self._block(size), self._blocks(size)
        k = min(max(1, round(self.fraction * block)), block)
        sizes = [(self.first, k), (self.second, block - k)]
        return [(c, jax.ShapeDtypeStruct((n, blocks * s), like.dtype)) for c, s in sizes if s]

    def _block(self, size: int) -> int:
        return min(self.block or size, size)

    def _blocks(self, size: int) -> int:
        return -(-size // self._block(size))


def _check_block(block: Any) -> None:
    if block is not None:
        checks.integer("block", block, 1)


def _in_blocks(x: Array, count: Array, block: int) -> tuple[Array, Array]:
    """`[n, size]` as `[n, blocks, block]`, zero-padded, and the real elements of each block."""
    n, size = x.shape
    number = -(-size // block)
    x = jnp.pad(x, ((0, 0), (0, number * block - size))).reshape(n, number, block)
    begin = jnp.arange(number, dtype=count.dtype)[None] * block
    return x, jnp.clip(count[:, None] - begin, 0, block)

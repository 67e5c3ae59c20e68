"""Codecs of a part of each bucket, where one part is as good as another."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks, offers
from jaxcomp.codecs.combinators import times
from jaxcomp.protocols import Array, ArrayLike, AxisName, Codec, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The first `⌈fraction · size⌉` elements of each bucket; they stand for the rest too.

    For buckets that were rotated at random, of which one part is as good as another: less than a
    bit an element.

    Args:
        codec: what encodes them.
        fraction: their share, in (0, 1].
        power: how to make up for the others, by `(size / k)^power`: 1 is unbiased, ½ keeps the
            length, 0 counts the rest as zero.

    Raises:
        ValueError: for a fraction outside (0, 1], or a codec whose decoders need more than the
            payload, as those of adaptive levels do.
    """

    codec: Codec
    fraction: int | float
    power: int | float = 1
    unbiased = False
    linear = False

    def __post_init__(self):
        offers.check_inner("codec", self.codec)
        checks.fraction(self.fraction)
        checks.choice("power", self.power, (0, 0.5, 1))

    @property
    def contractive(self) -> bool:
        """As the codec, where the rest counts as zero."""
        return self.power == 0 and offers.contractive(self.codec)

    @property
    def bucket_size(self) -> int | None:
        return self.codec.bucket_size

    def init(self, like: ArrayLike) -> Any:
        return self.codec.init(self._like(like))

    @property
    def agrees(self) -> bool:
        """As the codec."""
        return offers.agrees(self.codec)

    def agree(self, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
        k = self._k(x.shape[1])
        return offers.agree(self.codec, key, x[:, :k], jnp.minimum(count, k), state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, Any]:
        k = self._k(x.shape[1])
        return self.codec.encode(key, x[:, :k], jnp.minimum(count, k), state)

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        del side
        part = self._like(like)
        factor = (like.shape[1] / part.shape[1]) ** self.power
        found = times(self.codec, key, payload, part, factor)
        return jnp.pad(found, ((0, 0), (0, like.shape[1] - part.shape[1])))

    def _k(self, size: int) -> int:
        return max(1, math.ceil(round(self.fraction * size, 6)))

    def _like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((like.shape[0], self._k(like.shape[1])), like.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The first `⌈fraction · size⌉` elements of each bucket to one codec, the rest to another.

    For buckets that were rotated at random: widths between two whole numbers.

    Args:
        first: what encodes the first ones.
        second: what encodes the rest.
        fraction: the share of the first ones, in (0, 1].

    Raises:
        ValueError: for another fraction, codecs of different bucket sizes, or decoders that need
            more than the payload, as those of adaptive levels do.
    """

    first: Codec
    second: Codec
    fraction: int | float
    linear = False

    def __post_init__(self):
        offers.check_inner("first", self.first)
        offers.check_inner("second", self.second)
        checks.fraction(self.fraction)
        if self.first.bucket_size != self.second.bucket_size:
            raise ValueError(
                "`first` and `second` must have the same bucket size, got "
                f"{self.first.bucket_size} and {self.second.bucket_size}"
            )

    @property
    def unbiased(self) -> bool:
        """If both are."""
        return self.first.unbiased and self.second.unbiased

    @property
    def contractive(self) -> bool:
        return offers.contractive(self.first) and offers.contractive(self.second)

    @property
    def bucket_size(self) -> int | None:
        return self.first.bucket_size

    def init(self, like: ArrayLike) -> tuple:
        return tuple(codec.init(part) for codec, part in self._parts(like))

    @property
    def agrees(self) -> bool:
        """If one of them does."""
        return offers.agrees(self.first) or offers.agrees(self.second)

    def agree(self, key: Key, x: Array, count: Array, state: tuple, axis_name: AxisName) -> tuple:
        return tuple(
            offers.agree(codec, key, part, left, own, axis_name)
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
        found = [
            codec.decode(key, own, part)
            for (codec, part), own in zip(self._parts(like), payload, strict=True)
        ]
        return jnp.concatenate(found, axis=1)

    def _cut(self, x: Array, count: Array) -> list[tuple[Codec, Array, Array]]:
        """Each codec with its columns, and how many of them are real."""
        found, begin = [], 0
        for codec, part in self._parts(x):
            end = begin + part.shape[1]
            left = jnp.clip(count - begin, 0, part.shape[1])
            found.append((codec, x[:, begin:end], left))
            begin = end
        return found

    def _parts(self, like: ArrayLike) -> list[tuple[Codec, jax.ShapeDtypeStruct]]:
        n, size = like.shape
        k = min(max(1, round(self.fraction * size)), size)
        sizes = [(self.first, k), (self.second, size - k)]
        return [(c, jax.ShapeDtypeStruct((n, s), like.dtype)) for c, s in sizes if s]

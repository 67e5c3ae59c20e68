"""Codecs of what was rotated at random, and of a part of it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import UInt32

from jaxcomp import checks, chunks, noise, offers, summing
from jaxcomp.codecs.combinators import times as decode_times
from jaxcomp.protocols import Array, ArrayLike, AxisName, Codec, Key
from jaxcomp.rotate import embedding, hadamard

_ROTATION = 0x526F7461
"""Folded into the key, so that signs and dither have nothing in common."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotated:
    """A codec of `H D x / √B`: random signs, then the Hadamard transform, in blocks of `B`.

    Rotated, every bucket looks Gaussian, and none has an outlier; rotated back, the error is spread
    evenly. A bucket is filled up with zeros to whole blocks, the last power of two at least as
    large for buckets smaller than a block.

    Args:
        codec: what encodes the rotated buckets.
        block: elements that are rotated together, a power of two from 2 to 32,768.
        times: how often; one rotation of signs and a transform leaves some sparse inputs biased
            where the codec is unbiased only on average over rotations, two leave next to nothing.
        shared: the same rotation on all workers, which is undone once, after the sum; else each
            worker has its own, and errors of workers that agree average out.
        unbiased_on_average: the codec is unbiased if the rotation is random, as one with
            `fit="unbiased"` is.

    Raises:
        ValueError: for a block that is not such a power of two, or `times` other than 1 or 2.

    References:
        Suresh et al., `Distributed mean estimation with limited communication
        <https://arxiv.org/abs/1611.00429>`_, 2017.

    Note:
        Elements below 2⁻¹¹⁴ count as zero: they are brought down before they are added up, so that
        the largest floats do not overflow.
    """

    codec: Codec
    block: int = 4096
    times: int = 1
    shared: bool = False
    unbiased_on_average: bool = False

    def __post_init__(self):
        checks.part("codec", self.codec, Codec)
        checks.choice("block", self.block, tuple(2**i for i in range(1, 16)))
        checks.choice("times", self.times, (1, 2))

    @property
    def bucket_size(self) -> int | None:
        return self.codec.bucket_size

    @property
    def unbiased(self) -> bool:
        """As the codec; on average over rotations only where they are two.

        Of a `Part`, random signs alone are enough: `E[D Hᵀ P H D] = B · k/B` for `k` rows `P`.
        """
        inner = self.codec
        if isinstance(inner, Part) and inner.scaled and inner.codec.unbiased:
            return True
        return inner.unbiased or (self.unbiased_on_average and self.times == 2)

    @property
    def contractive(self) -> bool:
        """As the codec's own: a rotation keeps lengths."""
        return offers.contractive(self.codec) and not self.unbiased_on_average

    @property
    def linear(self) -> bool:
        """As the codec, if the rotation is shared."""
        return self.codec.linear and self.shared

    @property
    def reorders(self) -> bool:
        """A shared rotation is undone once, after the sum, which rounds differently."""
        return self.shared

    @property
    def bits_per_element(self) -> float | None:
        """As the codec's own, where a bucket is whole blocks."""
        size = self.bucket_size
        if size is not None and self._padded(size)[0] != size:
            return None
        return offers.bits_per_element(self.codec)

    def variance_bound(self, size: int) -> float | None:
        """That of the codec for the rotated bucket."""
        return offers.variance_bound(self.codec, self._padded(size)[0])

    def init(self, like: ArrayLike) -> Any:
        return self.codec.init(self._like(like))

    def agree(self, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
        if getattr(self.codec, "agree", None) is None:
            return state
        z = self.rotate(key, x)
        return offers.agree(self.codec, key, z, jnp.full_like(count, z.shape[1]), state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, Any]:
        def some(first, x, count):
            own = key._replace(first=first)
            z = self.rotate(own, x)
            payload, _ = self.codec.encode(own, z, jnp.full_like(count, z.shape[1]), state)
            return payload

        if jax.tree.leaves(state):
            z = self.rotate(key, x)
            return self.codec.encode(key, z, jnp.full_like(count, z.shape[1]), state)
        return chunks.over_rows(some, key.first, x, count), state

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        def some(first, payload):
            rows = jax.tree.leaves(payload)[0].shape[0]
            part = jax.ShapeDtypeStruct((rows, like.shape[1]), like.dtype)
            own = key._replace(first=first)
            z = self.codec.decode(own, payload, self._like(part), side)
            return self.unrotate(own, z, part)

        return chunks.over_rows(some, key.first, payload)

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        inner, wide = self._like(like), summing.accumulator(like)
        if self.shared:
            z = summing.decode_sum(self.codec, keys, payloads, inner, weights)
            return self.unrotate(keys, z, wide)

        def term(index):
            key = keys._replace(own=keys.own[index])
            payload = jax.tree.map(lambda leaf: leaf[index], payloads)
            x = self.decode(key, payload, wide)
            return summing.weighted(x, None if weights is None else weights[index])

        return summing.in_order(term, keys.own.shape[0])

    def rotate(self, key: Key, x: Array) -> Array:
        """`[n, size]` rotated, filled up to whole blocks, float32."""
        n, size = x.shape
        padded, block = self._padded(size)
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padded - size)))
        for seeds in self._seeds(key, n):
            x = hadamard.rotate(x * jnp.float32(1 / block), *seeds, block)
            x = x * jnp.float32(_root(block))
        return x

    def unrotate(self, key: Key, z: Array, like: ArrayLike) -> Array:
        """The inverse of `rotate`, for buckets like these."""
        n, size = like.shape
        _, block = self._padded(size)
        largest = jnp.finfo(like.dtype).max.astype(jnp.float32)
        for seeds in reversed(self._seeds(key, n)):
            z = hadamard.unrotate(z * jnp.float32(1 / block), *seeds, block)
            z = z * jnp.float32(block / _root(block))
        z = jnp.where(jnp.isinf(z), jnp.sign(z) * largest, z)
        return z[:, :size].astype(like.dtype)

    def _seeds(self, key: Key, n: int) -> list[tuple[UInt32[Array, " n"], UInt32[Array, " n"]]]:
        seed = key.shared if self.shared else key.own
        return [
            noise.seeds(noise.fold(seed, _ROTATION, turn), key.first, n)
            for turn in range(self.times)
        ]

    def _padded(self, size: int) -> tuple[int, int]:
        """A bucket's size in whole blocks, and the block."""
        block = min(self.block, max(2, 1 << (size - 1).bit_length()))
        return -(-size // block) * block, block

    def _like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((like.shape[0], self._padded(like.shape[1])[0]), jnp.float32)


def _root(block: int) -> float:
    """About a sixteenth of the block's root, so that no rotated element overflows where none did
    before; a power of two, so that no product rounds.
    """
    return 2.0 ** ((block.bit_length() - 1) // 2 - 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The first `⌈fraction · size⌉` elements of each bucket, sent larger in proportion.

    For buckets that were rotated at random, of which one part is as good as another: less than a
    bit an element.

    Args:
        codec: what encodes them.
        fraction: their share, in (0, 1].
        scaled: whether to make up for the others, by `size / k`.

    Raises:
        ValueError: for a fraction outside (0, 1].
    """

    codec: Codec
    fraction: int | float
    scaled: bool = True
    unbiased = False
    linear = False

    def __post_init__(self):
        checks.part("codec", self.codec, Codec)
        checks.fraction(self.fraction)

    @property
    def contractive(self) -> bool:
        """As the codec, where the rest counts as zero."""
        return not self.scaled and offers.contractive(self.codec)

    @property
    def bucket_size(self) -> int | None:
        return self.codec.bucket_size

    def init(self, like: ArrayLike) -> Any:
        return self.codec.init(self._like(like))

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, Any]:
        k = self._k(x.shape[1])
        return self.codec.encode(key, x[:, :k], jnp.minimum(count, k), state)

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        del side
        part = self._like(like)
        factor = like.shape[1] / part.shape[1] if self.scaled else 1.0
        found = decode_times(self.codec, key, payload, part, factor)
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
        fraction: the share of the first ones, in (0, 1).

    Raises:
        ValueError: for another fraction, or codecs of different bucket sizes.
    """

    first: Codec
    second: Codec
    fraction: int | float
    linear = False

    def __post_init__(self):
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

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[tuple, tuple]:
        payloads, states, begin = [], [], 0
        for (codec, part), own in zip(self._parts(x), state, strict=True):
            size = part.shape[1]
            left = jnp.clip(count - begin, 0, size)
            payload, own = codec.encode(key, x[:, begin : begin + size], left, own)
            payloads.append(payload)
            states.append(own)
            begin += size
        return tuple(payloads), tuple(states)

    def decode(self, key: Key, payload: tuple, like: ArrayLike, side: Any = None) -> Array:
        del side
        found = [
            codec.decode(key, own, part)
            for (codec, part), own in zip(self._parts(like), payload, strict=True)
        ]
        return jnp.concatenate(found, axis=1)

    def _parts(self, like: ArrayLike) -> list[tuple[Codec, jax.ShapeDtypeStruct]]:
        n, size = like.shape
        k = min(max(1, round(self.fraction * size)), size)
        sizes = [(self.first, k), (self.second, size - k)]
        return [(c, jax.ShapeDtypeStruct((n, s), like.dtype)) for c, s in sizes if s]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedded:
    """A codec of democratic coordinates: more of them than elements, and none of them large.

    Each block of `B` coordinates `z` holds `⌊B / redundancy⌋` elements: `x = S z`, the frame `S`
    made of random signs, a Hadamard transform, and the elements kept. Of all such `z` it is one
    whose largest coordinate is small: `‖z‖∞ ≤ K ‖x‖ / √B`, with a constant `K`.

    Args:
        codec: what encodes the coordinates.
        redundancy: coordinates an element, above 1, at most 4.
        block: coordinates that are transformed together, a power of four from 4 to 16,384.
        shared: the same frame on all workers; else each has its own.

    Raises:
        ValueError: for another redundancy or block.

    References:
        Saha, Pilanci and Goldsmith, `Efficient randomized subspace embeddings for distributed
        optimization under a communication budget <https://arxiv.org/abs/2103.07578>`_, 2022;
        Lyubarskii and Vershynin, `Uncertainty principles and vector quantization
        <https://arxiv.org/abs/math/0611343>`_, 2010.
    """

    codec: Codec
    redundancy: int | float = 1.5
    block: int = 4096
    shared: bool = False
    contractive = False
    linear = False

    def __post_init__(self):
        checks.part("codec", self.codec, Codec)
        checks.number("redundancy", self.redundancy, 1.0, 4.0)
        checks.choice("block", self.block, tuple(4**i for i in range(1, 8)))

    @property
    def bucket_size(self) -> int | None:
        """Elements of a block, where the codec's bucket is one block of coordinates."""
        if self.codec.bucket_size is None:
            return None
        return int(self.codec.bucket_size / self.redundancy)

    @property
    def unbiased(self) -> bool:
        """As the codec: the way back is linear."""
        return self.codec.unbiased

    def init(self, like: ArrayLike) -> Any:
        return self.codec.init(self._like(like))

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, Any]:
        n, size = x.shape
        real, block, blocks = self._sizes(size)
        kept = embedding.slots(real, block)
        rows = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, real * blocks - size)))
        rows = rows.reshape(n, blocks, real)
        spread = jnp.zeros((n, blocks, block), jnp.float32).at[:, :, kept].set(rows)
        high, low = self._seeds(key, n)
        z = embedding.democratic(spread.reshape(n, -1), high, low, real, block, kept)
        return self.codec.encode(key, z, jnp.full_like(count, z.shape[1]), state)

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        n, size = like.shape
        real, block, blocks = self._sizes(size)
        z = self.codec.decode(key, payload, self._like(like), side)
        largest = jnp.finfo(like.dtype).max.astype(jnp.float32)
        x = hadamard.unrotate(z * jnp.float32(1 / block), *self._seeds(key, n), block)
        x = x.reshape(n, blocks, block)[:, :, embedding.slots(real, block)]
        x = x.reshape(n, -1)[:, :size] * jnp.float32(block**0.5)
        return jnp.where(jnp.isinf(x), jnp.sign(x) * largest, x).astype(like.dtype)

    def _seeds(self, key: Key, n: int) -> tuple[UInt32[Array, " n"], UInt32[Array, " n"]]:
        seed = key.shared if self.shared else key.own
        return noise.seeds(noise.fold(seed, _ROTATION, 0), key.first, n)

    def _sizes(self, size: int) -> tuple[int, int, int]:
        """Elements of a block, its coordinates, and the blocks of a bucket."""
        block = self.block
        while block > 4 and int(block / 4 / self.redundancy) >= size:
            block //= 4
        real = max(1, int(block / self.redundancy))
        return real, block, -(-size // real)

    def _like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        _, block, blocks = self._sizes(like.shape[1])
        return jax.ShapeDtypeStruct((like.shape[0], block * blocks), jnp.float32)

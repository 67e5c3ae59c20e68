"""Codecs of randomly rotated buckets."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import UInt32

from jaxcomp import base, checks
from jaxcomp.backend import blocking
from jaxcomp.base import Codec, Facts, Hints, WrappedCodec, decode_sum
from jaxcomp.codecs import inner
from jaxcomp.codecs.parts import Part
from jaxcomp.numerics import addition, noise
from jaxcomp.rotate import hadamard
from jaxcomp.theory import worst_case
from jaxcomp.types import Array, ArrayLike, Key, Weights

ROTATION = 0x526F7461
"""Folded into the key, so that signs are independent of dither."""

_UNBIASED_BLOCK = 64
"""Elements that two rotations mix well enough: of 8, one bit brings 1 and 0.6 back as 1.12 and
0.40, of 32 and more as what they were.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotated(WrappedCodec, public=("rotate", "unrotate")):
    """Encodes `H D x / √B`: random signs, then the Hadamard transform, in blocks of `B`.

    After the rotation, every bucket looks Gaussian and has no outliers; after the inverse rotation,
    the error is spread evenly. A bucket is padded with zeros to whole blocks. A bucket smaller than
    a block is padded to the next power of two, and to at least 64 if it is rotated twice.

    Args:
        codec: the codec of the rotated buckets.
        block: elements that are rotated together, a power of two from 2 to 32,768.
        times: the number of rotations. With a codec that is unbiased only on average over
            rotations, one rotation leaves a bias for some sparse inputs; two leave almost none.
        shared: True for the same rotation on all workers, which is inverted once, after the sum;
            False for a separate rotation on each, so that errors of similar gradients average out.
        unbiased_on_average: whether the codec is unbiased on average over random rotations, as with
            `fit="unbiased"`.

    Raises:
        ValueError: for a block that is not such a power of two, `times` other than 1 or 2, a codec
            that needs more than the payload to decode, as with adaptive levels, or a codec that
            uses a fitted step or a part for more elements than are rotated together.

    References:
        Suresh et al., `Distributed mean estimation with limited communication
        <https://arxiv.org/abs/1611.00429>`_, 2017.

    Note:
        Elements below 2⁻¹¹⁴ count as zero: elements are scaled down before they are summed, so that
        the largest floats do not overflow.
    """

    codec: Codec
    block: int = 4096
    times: int = 1
    shared: bool = False
    unbiased_on_average: bool = False

    def __post_init__(self):
        inner.check("codec", self.codec, sums=self.shared, guesses=True)
        checks.choice("block", self.block, tuple(2**i for i in range(1, 16)))
        checks.choice("times", self.times, (1, 2))
        inner.check_mixed(self.codec, self.block)

    @property
    def unbiased(self) -> bool:
        """Whether the codec is unbiased, or is unbiased on average and rotated twice.

        For a `Part`, random signs alone are enough: `E[D Hᵀ P H D] = B · k/B` for `k` rows `P` of
        each block.
        """
        inner = self.codec
        if isinstance(inner, Part) and inner.power == 1 and inner.codec.unbiased:
            return True
        twice = self.times == 2 and self.block >= _UNBIASED_BLOCK
        return inner.unbiased or (self.unbiased_on_average and twice)

    @property
    def contractive(self) -> bool:
        """Whether the codec is contractive; a rotation keeps lengths.

        A `Part` with `power=0` is contractive too: with random signs, `k` rows of each block have
        `k/B` of its energy on average, for every input.
        """
        inner = self.codec
        if isinstance(inner, Part):
            return inner.power == 0 and inner.codec.contractive
        return inner.contractive and not self.unbiased_on_average

    @property
    def linear(self) -> bool:
        """Whether the codec is linear and the rotation is shared."""
        return self.codec.linear and self.shared

    @functools.cached_property
    def facts(self) -> Facts:
        """The codec's claim of its bits is kept if a bucket is whole blocks.

        A shared rotation is inverted once after the sum, which then rounds.
        """
        known, size = super().facts, self.bucket_size
        whole = size is None or self._sizes(size)[0] == size
        bits = known.bits_per_element if whole else None
        return dataclasses.replace(known, bits_per_element=bits, reorders=self.shared, mixed=0)

    @functools.cached_property
    def hints(self) -> Hints:
        """The unit of the codec, in whole blocks."""
        unit = self.codec.hints.unit
        unit = None if unit is None else self._sizes(unit)[0]
        return Hints(alone=1 / 2, unit=unit, decodes_in_passes=True)

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The codec's bound for the rotated bucket, which has no outliers."""
        del peak
        padded, block = self._sizes(size)
        bounds = [
            self.codec.variance_bound(padded),
            self.codec.variance_bound(padded, worst_case.rotated_peak(block)),
        ]
        return min((bound for bound in bounds if bound is not None), default=None)

    def summable(self, workers: int) -> "Rotated":
        """The same rotation around the summable form of the codec, inverted once.

        Raises:
            ValueError: if the rotation is not shared, or the codec's payloads cannot be added.
        """
        if not self.shared:
            raise base.not_summable(self, "it needs one rotation for all workers: use shared=True")
        return dataclasses.replace(self, codec=self.codec.summable(workers))

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, Any]:
        if self.facts.guided and jax.tree.leaves(state):
            z, count = self.transform(key, x, count)
            return self.codec.encode(key, z, count, self._guesses(key, state))[0], state
        if jax.tree.leaves(state):  # The state belongs to the whole batch.
            return self.codec.encode(key, *self.transform(key, x, count), state)
        common = (key.shared, key.own, state)
        return blocking.over_rows(_encoder(self), key.first, x, count, common=common), state

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        some = _decoder(self, like.shape[1], jnp.dtype(like.dtype))
        if self.facts.guided and side is not None:
            return some(key.first, payload, self._guesses(key, side), key.shared, key.own)
        return blocking.over_rows(some, key.first, payload, side, common=(key.shared, key.own))

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Weights = None, side: Any = None
    ) -> Array:
        if not self.shared or self.facts.guided:
            return super().decode_sum(keys, payloads, like, weights, side)
        z = decode_sum.decode_sum(self.codec, keys, payloads, self.inner_like(like), weights, side)
        return self.unrotate(keys, z, addition.accumulator(like))

    def transform(self, key: Key, x: Array, count: Array) -> tuple[Array, Array]:
        """The rotated buckets in whole blocks, in which every element is real."""
        z = self.rotate(key, x)
        return z, jnp.full_like(count, z.shape[1])

    def rotate(self, key: Key, x: Array) -> Array:
        """Rotates `[n, size]`, padded to whole blocks, in float32."""
        n, size = x.shape
        padded, block = self._sizes(size)
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, padded - size)))
        for seeds in self._seeds(key, n):
            x = hadamard.rotate(x, *seeds, block, down=1 / block, up=_root(block))
        return x

    def _guesses(self, key: Key, guesses: Array) -> Array:
        """Guesses of the rotated buckets, for a codec that is guided by them."""
        return jax.vmap(lambda guess: self.rotate(key, guess))(guesses)

    def unrotate(self, key: Key, z: Array, like: ArrayLike) -> Array:
        """The inverse of `rotate`, for buckets like these."""
        n, size = like.shape
        _, block = self._sizes(size)
        largest = addition.limit(like.dtype)
        for seeds in reversed(self._seeds(key, n)):
            z = hadamard.unrotate(z, *seeds, block, down=1 / block, up=block / _root(block))
        # Finite values stay finite, also beyond the range of a narrow dtype.
        z = jnp.where(jnp.abs(z) > largest, jnp.sign(z) * largest, z)
        return z[:, :size].astype(like.dtype)

    def _seeds(self, key: Key, n: int) -> list[tuple[UInt32[Array, " n"], UInt32[Array, " n"]]]:
        seed = key.shared if self.shared else key.own
        return [
            noise.seeds(noise.fold(seed, ROTATION, turn), key.first, n)
            for turn in range(self.times)
        ]

    def _sizes(self, size: int) -> tuple[int, int]:
        """A bucket's size in whole blocks, and the block."""
        least = _UNBIASED_BLOCK if self.times == 2 else 2
        block = min(self.block, max(least, 1 << (size - 1).bit_length()))
        return -(-size // block) * block, block

    def inner_like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((like.shape[0], self._sizes(like.shape[1])[0]), jnp.float32)


@functools.lru_cache(maxsize=1024)
def _encoder(codec: Rotated) -> Callable[..., Any]:
    """Encodes some rows, by the number of the first of them."""

    def encode(first: Array, x: Array, count: Array, shared: Array, own: Array, state: Any) -> Any:
        key = Key(shared, own, first)
        return codec.codec.encode(key, *codec.transform(key, x, count), state)[0]

    return encode


@functools.lru_cache(maxsize=1024)
def _decoder(codec: Rotated, size: int, dtype: Any) -> Callable[..., Array]:
    """Decodes some rows of this size, by the number of the first of them."""

    def decode(first: Array, payload: Any, side: Any, shared: Array, own: Array) -> Array:
        rows = jax.tree.leaves(payload)[0].shape[0]
        like = jax.ShapeDtypeStruct((rows, size), dtype)
        key = Key(shared, own, first)
        z = codec.codec.decode(key, payload, codec.inner_like(like), side)
        return codec.unrotate(key, z, like)

    return decode


def _root(block: int) -> float:
    """A power of two near a sixteenth of the block's root.

    It keeps rotated elements from overflowing, and products with it do not round.
    """
    return 2.0 ** ((block.bit_length() - 1) // 2 - 4)

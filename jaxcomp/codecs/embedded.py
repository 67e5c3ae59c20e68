"""Codecs of democratic coordinates: more of them than elements, and none of them large."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import UInt32

from jaxcomp import checks
from jaxcomp.base import Codec, WrappedCodec
from jaxcomp.codecs import inner
from jaxcomp.codecs.rotated import ROTATION
from jaxcomp.numerics import noise, summing
from jaxcomp.rotate import embedding, hadamard
from jaxcomp.types import Array, ArrayLike, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedded(WrappedCodec):
    """A codec of democratic coordinates: more of them than elements, and none of them large.

    Each block of `B` coordinates `z` holds `⌊B / redundancy⌋` elements: `x = S z`, the frame `S`
    made of random signs, a Hadamard transform, and the elements kept. Of all such `z` it is one
    whose largest coordinate is small: `‖z‖∞ ≤ K ‖x‖ / √B`, with a constant `K`.

    Args:
        codec: what encodes the coordinates.
        redundancy: coordinates an element, from 1 to 4.
        block: coordinates that are transformed together, a power of four from 4 to 16,384.
        shared: the same frame on all workers; else each has its own.

    Raises:
        ValueError: for another redundancy or block, or a codec whose decoders need more than the
            payload, as those of adaptive levels do.

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
    bits_per_element = None
    reorders = False
    mixed = 0

    def __post_init__(self):
        inner.check("codec", self.codec)
        checks.number("redundancy", self.redundancy, 1.0, 4.0)
        checks.choice("block", self.block, tuple(4**i for i in range(1, 8)))
        inner.check_mixed(self.codec, self.block)

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

    def transform(self, key: Key, x: Array, count: Array) -> tuple[Array, Array]:
        """The coordinates of each bucket."""
        n, size = x.shape
        real, block, blocks = self._sizes(size)
        kept = embedding.slots(real, block)
        rows = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, real * blocks - size)))
        rows = rows.reshape(n, blocks, real)
        spread = jnp.zeros((n, blocks, block), jnp.float32).at[:, :, kept].set(rows)
        high, low = self._seeds(key, n)
        z = embedding.democratic(spread.reshape(n, -1), high, low, real, block, kept)
        return z, jnp.full_like(count, z.shape[1])

    def restore(self, key: Key, z: Array, like: ArrayLike) -> Array:
        """The elements of coordinates, for buckets like these."""
        n, size = like.shape
        real, block, blocks = self._sizes(size)
        largest = summing.limit(like.dtype)
        x = hadamard.unrotate(z * jnp.float32(1 / block), *self._seeds(key, n), block)
        x = x.reshape(n, blocks, block)[:, :, embedding.slots(real, block)]
        x = x.reshape(n, -1)[:, :size] * jnp.float32(block**0.5)
        return jnp.where(jnp.abs(x) > largest, jnp.sign(x) * largest, x).astype(like.dtype)

    def _seeds(self, key: Key, n: int) -> tuple[UInt32[Array, " n"], UInt32[Array, " n"]]:
        seed = key.shared if self.shared else key.own
        return noise.seeds(noise.fold(seed, ROTATION, 0), key.first, n)

    def _sizes(self, size: int) -> tuple[int, int, int]:
        """Elements of a block, its coordinates, and the blocks of a bucket."""
        block = self.block
        while block > 4 and int(block / 4 / self.redundancy) >= size:
            block //= 4
        real = max(1, int(block / self.redundancy))
        return real, block, -(-size // real)

    def inner_like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        _, block, blocks = self._sizes(like.shape[1])
        return jax.ShapeDtypeStruct((like.shape[0], block * blocks), jnp.float32)

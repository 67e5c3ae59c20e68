"""Codecs of democratic embeddings: redundant coordinates of which none is large."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import UInt32

from jaxcomp import checks
from jaxcomp.base import Codec, Hints, WrappedCodec, changed
from jaxcomp.codecs import inner
from jaxcomp.codecs.rotated import ROTATION
from jaxcomp.numerics import addition, noise
from jaxcomp.rotate import embedding, hadamard
from jaxcomp.types import Array, ArrayLike, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedded(WrappedCodec):
    """Encodes a democratic embedding: redundant coordinates of which none is large.

    Each block of `B` coordinates `z` represents `⌊B / redundancy⌋` elements: `x = S z`, where the
    frame `S` consists of random signs, a Hadamard transform, and a selection of elements. Among all
    such `z`, the codec uses one whose largest coordinate is small: `‖z‖∞ ≤ K ‖x‖ / √B`, with a
    constant `K`.

    Args:
        codec: the codec of the coordinates.
        redundancy: the number of coordinates per element, from 1 to 4.
        block: the number of coordinates transformed together, a power of four from 4 to 16,384.
        shared: True for one frame on all workers, False for a separate frame on each.

    Raises:
        ValueError: for another redundancy or block, or a codec that needs more than the payload to
            decode, as with adaptive levels.

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
    facts = changed(bits_per_element=None, reorders=False, mixed=0)
    hints = Hints(alone=1 / 2, decodes_in_passes=True)

    def __post_init__(self):
        inner.check("codec", self.codec)
        checks.number("redundancy", self.redundancy, 1.0, 4.0)
        checks.choice("block", self.block, tuple(4**i for i in range(1, 8)))
        inner.check_mixed(self.codec, self.block)

    @property
    def bucket_size(self) -> int | None:
        """The number of elements of a block, if the codec's bucket is one block of coordinates."""
        if self.codec.bucket_size is None:
            return None
        return int(self.codec.bucket_size / self.redundancy)

    @property
    def unbiased(self) -> bool:
        """Whether the codec is unbiased; `restore` is linear."""
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
        """The elements for these coordinates, in the shape and dtype of `like`."""
        n, size = like.shape
        real, block, blocks = self._sizes(size)
        largest = addition.limit(like.dtype)
        x = hadamard.unrotate(z * jnp.float32(1 / block), *self._seeds(key, n), block)
        x = x.reshape(n, blocks, block)[:, :, embedding.slots(real, block)]
        x = x.reshape(n, -1)[:, :size] * jnp.float32(block**0.5)
        return jnp.where(jnp.abs(x) > largest, jnp.sign(x) * largest, x).astype(like.dtype)

    def _seeds(self, key: Key, n: int) -> tuple[UInt32[Array, " n"], UInt32[Array, " n"]]:
        seed = key.shared if self.shared else key.own
        return noise.seeds(noise.fold(seed, ROTATION, 0), key.first, n)

    def _sizes(self, size: int) -> tuple[int, int, int]:
        """The elements of a block, the coordinates of a block, and the blocks of a bucket."""
        block = self.block
        while block > 4 and int(block / 4 / self.redundancy) >= size:
            block //= 4
        real = max(1, int(block / self.redundancy))
        return real, block, -(-size // real)

    def inner_like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        _, block, blocks = self._sizes(like.shape[1])
        return jax.ShapeDtypeStruct((like.shape[0], block * blocks), jnp.float32)

"""Codecs in the basis of the cosine transform."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32

from jaxcomp import checks
from jaxcomp.base import Codec, Facts, Hints, WrappedCodec, decode_sum
from jaxcomp.codecs import inner
from jaxcomp.numerics import addition
from jaxcomp.types import Array, ArrayLike, Key, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(WrappedCodec):
    """Encodes the orthonormal two-dimensional cosine transform (DCT-II) of square blocks.

    Each bucket is cut into squares of `chunk × chunk` consecutive elements, `z = A X Aᵀ`. Values
    that vary slowly along or across a square need few coefficients. The transform is inverted
    once, after the sum over workers. A bucket is padded with zeros to whole squares.

    Args:
        codec: the codec of the coefficients.
        chunk: the side of a square, 2 to 256.

    Raises:
        ValueError: for a side out of range, or a codec that needs more than the payload to decode,
            or that does not scale with its input, such as a fixed threshold.

    Example:
        >>> import jaxcomp
        >>> codec = Cosine(codec=jaxcomp.top_k(fraction=0.01, bucket_size=4096))
        >>> x = jnp.outer(jnp.ones(64), jnp.arange(64.0)).reshape(-1)
        >>> float(jnp.linalg.norm(jaxcomp.roundtrip(codec, 0, x) - x) / jnp.linalg.norm(x)) < 0.01
        True
    """

    codec: Codec
    chunk: int = 64
    hints = Hints(alone=1 / 2)

    def __post_init__(self):
        inner.check("codec", self.codec)
        if not self.codec.facts.homogeneous:
            raise ValueError(
                "`codec` must scale with its input, since coefficients are divided by a power of "
                f"two, got {self.codec!r}; use for instance jaxcomp.top_k(fraction=0.01)"
            )
        checks.integer("chunk", self.chunk, 2, 256)

    @property
    def unbiased(self) -> bool:
        """Whether the codec is unbiased; the transform is linear."""
        return self.codec.unbiased

    @property
    def linear(self) -> bool:
        """Whether the codec is linear."""
        return self.codec.linear

    @functools.cached_property
    def facts(self) -> Facts:
        names = self.codec.facts.names_senders
        return dataclasses.replace(
            super().facts, bits_per_element=None, reorders=True, mixed=0, names_senders=names
        )

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Weights = None, side: Any = None
    ) -> Array:
        z = decode_sum.decode_sum(self.codec, keys, payloads, self.inner_like(like), weights, side)
        return self.restore(keys, z, addition.accumulator(like))

    def mean_of_senders(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Weights = None
    ) -> Array:
        """The mean of each coefficient over the workers that sent it."""
        z = self.codec.mean_of_senders(keys, payloads, self.inner_like(like), weights)
        return self.restore(keys, z, addition.accumulator(like))

    def transform(
        self, key: Key, x: Array, count: Array
    ) -> tuple[Float32[Array, "n padded"], Array]:
        """The coefficients of each bucket, padded to whole squares, divided by a power of two."""
        del key
        size = x.shape[1]
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, self._padded_size(size) - size)))
        z = _both(x * jnp.float32(1 / self._down), self.chunk, False)
        return z, jnp.full_like(count, z.shape[1])

    def restore(self, key: Key, z: Array, like: ArrayLike) -> Array:
        """The inverse of `transform`, for buckets like these."""
        del key
        x = _both(z.astype(jnp.float32), self.chunk, True)
        largest = jnp.float32(min(float(jnp.finfo(d).max) for d in (like.dtype, jnp.float32)))
        down = jnp.float32(self._down)
        # Finite values stay finite, and non-finite values stay non-finite.
        up = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest / down, largest / down) * down, x)
        return up[:, : like.shape[1]].astype(like.dtype)

    @property
    def _down(self) -> int:
        """The divisor of all elements, so that sums of the largest floats do not overflow."""
        return 2 << (self.chunk - 1).bit_length()

    def _padded_size(self, size: int) -> int:
        square = self.chunk**2
        return -(-size // square) * square

    def inner_like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((like.shape[0], self._padded_size(like.shape[1])), jnp.float32)


# Always run one compiled program, because the compiler chooses the order of a matrix product.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _both(x: Float32[Array, "n size"], chunk: int, inverse: bool) -> Float32[Array, "n size"]:
    """The transform along both sides of each square, or its inverse."""
    basis = jnp.asarray(_basis(chunk).T if inverse else _basis(chunk))

    def along(x: Array) -> Array:  # Transforms the last axis of each square, then transposes.
        rows = lax.dot_general(
            x.reshape(-1, chunk),
            basis,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return rows.reshape(-1, chunk, chunk).swapaxes(1, 2)

    return along(along(x)).reshape(x.shape)


@functools.lru_cache
def _basis(chunk: int) -> np.ndarray:
    """The matrix whose rows are the orthonormal cosines."""
    k, j = np.arange(chunk)[:, None], np.arange(chunk)[None]
    rows = np.sqrt(2 / chunk) * np.cos(np.pi * (2 * j + 1) * k / (2 * chunk))
    rows[0] /= np.sqrt(2)
    return rows.astype(np.float32)

"""Codecs of buckets in the basis of cosines."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32

from jaxcomp import checks, offers, summing
from jaxcomp.protocols import Array, ArrayLike, AxisName, Codec, Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine:
    """A codec of the orthonormal two-dimensional cosine transform (DCT-II) of squares.

    Each bucket is cut into squares of `chunk × chunk` consecutive elements, `z = A X Aᵀ`. What
    varies slowly along or across a square is gathered in few coefficients. The transform is undone
    once, after the sum over workers. A bucket is filled up with zeros to whole squares.

    Args:
        codec: what encodes the coefficients.
        chunk: the side of a square, 2 to 256.

    Raises:
        ValueError: for a side out of range, or a codec whose decoders need more than the payload or
            that does not scale with its input, such as a fixed threshold.

    Example:
        >>> import jaxcomp
        >>> codec = Cosine(codec=jaxcomp.top_k(fraction=0.01, bucket_size=4096))
        >>> x = jnp.outer(jnp.ones(64), jnp.arange(64.0)).reshape(-1)
        >>> float(jnp.linalg.norm(jaxcomp.roundtrip(codec, 0, x) - x) / jnp.linalg.norm(x)) < 0.01
        True
    """

    codec: Codec
    chunk: int = 64

    def __post_init__(self):
        offers.check_inner("codec", self.codec)
        if not offers.homogeneous(self.codec):
            raise ValueError(
                "`codec` must scale with its input, since it is given coefficients over a power of "
                f"two, got {self.codec!r}; take one such as jaxcomp.top_k(fraction=0.01)"
            )
        checks.integer("chunk", self.chunk, 2, 256)

    @property
    def bucket_size(self) -> int | None:
        return self.codec.bucket_size

    @property
    def unbiased(self) -> bool:
        """As the codec: the transform is linear."""
        return self.codec.unbiased

    @property
    def contractive(self) -> bool:
        """As the codec: the transform keeps lengths."""
        return offers.contractive(self.codec)

    @property
    def linear(self) -> bool:
        """As the codec."""
        return self.codec.linear

    @property
    def homogeneous(self) -> bool:
        """As the codec."""
        return offers.homogeneous(self.codec)

    reorders = True

    def init(self, like: ArrayLike) -> Any:
        return self.codec.init(self._like(like))

    @property
    def agrees(self) -> bool:
        """As the codec."""
        return offers.agrees(self.codec)

    def agree(self, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName) -> Any:
        z = self.transform(x)
        return offers.agree(self.codec, key, z, jnp.full_like(count, z.shape[1]), state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[Any, Any]:
        z = self.transform(x)
        return self.codec.encode(key, z, jnp.full_like(count, z.shape[1]), state)

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        return self.inverse(self.codec.decode(key, payload, self._like(like), side), like)

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        inner = self._like(like)
        z = summing.decode_sum(self.codec, keys, payloads, inner, weights)
        return self.inverse(z, summing.accumulator(like))

    @property
    def names_senders(self) -> bool:
        """As the codec."""
        return offers.names_senders(self.codec)

    def mean_of_senders(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        """Of each coefficient, over those who sent it."""
        z = offers.mean_of_senders(self.codec, keys, payloads, self._like(like), weights)
        return self.inverse(z, summing.accumulator(like))

    def transform(self, x: Array) -> Float32[Array, "n padded"]:
        """The coefficients of each bucket, filled up to whole squares, over a power of two."""
        size = x.shape[1]
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, self._padded(size) - size)))
        return _both(x * jnp.float32(1 / self._down), self.chunk, False)

    def inverse(self, z: Array, like: ArrayLike) -> Array:
        """The inverse of `transform`, for buckets like these."""
        x = _both(z.astype(jnp.float32), self.chunk, True)
        largest = jnp.float32(min(float(jnp.finfo(d).max) for d in (like.dtype, jnp.float32)))
        down = jnp.float32(self._down)
        # What was finite stays so; what was not stays seen.
        up = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest / down, largest / down) * down, x)
        return up[:, : like.shape[1]].astype(like.dtype)

    @property
    def _down(self) -> int:
        """What elements are divided by, so that sums of the largest floats do not overflow."""
        return 2 << (self.chunk - 1).bit_length()

    def _padded(self, size: int) -> int:
        square = self.chunk**2
        return -(-size // square) * square

    def _like(self, like: ArrayLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((like.shape[0], self._padded(like.shape[1])), jnp.float32)


# One program for every way of calling it: a product of matrices has its order from its compiler.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _both(x: Float32[Array, "n size"], chunk: int, inverse: bool) -> Float32[Array, "n size"]:
    """The transform along both sides of each square, or its inverse."""
    basis = jnp.asarray(_basis(chunk).T if inverse else _basis(chunk))

    def along(x: Array) -> Array:  # The last axis of each square is transformed, then turned.
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
    """The rows are the orthonormal cosines."""
    k, j = np.arange(chunk)[:, None], np.arange(chunk)[None]
    rows = np.sqrt(2 / chunk) * np.cos(np.pi * (2 * j + 1) * k / (2 * chunk))
    rows[0] /= np.sqrt(2)
    return rows.astype(np.float32)

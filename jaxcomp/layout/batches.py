"""Batches: pieces of leaves as the rows of one codec call, and a device's slice of the rows."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Codec
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, Key


class Piece(NamedTuple):
    """Elements `start` to `stop` of a flattened leaf; only a leaf's last bucket is padded."""

    leaf: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Pieces of leaves that one call of a codec encodes, as `[buckets, size]`.

    Attributes:
        codec: the codec of the pieces.
        dtype: the dtype of the leaves.
        size: elements in a bucket.
        pieces: the encoded pieces, in order.
        parted: whether the batch is most of one leaf, whose tail is in another batch.
    """

    codec: Codec
    dtype: np.dtype
    size: int
    pieces: tuple[Piece, ...]
    parted: bool = False

    @property
    def buckets(self) -> int:
        return sum(padded_buckets(piece, self.size) for piece in self.pieces)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.buckets, self.size), self.dtype)

    def counts(self) -> Array:
        """The number of real elements of each bucket, `int32[buckets]`."""
        lasts, numbers, end = [], [], 0
        for piece in self.pieces:
            end += padded_buckets(piece, self.size)
            tail = (piece.stop - piece.start) % self.size
            if tail:
                lasts.append(end - 1)
                numbers.append(tail)
        full = jnp.full(self.buckets, self.size, jnp.int32)
        if not lasts:
            return full
        return full.at[np.array(lasts)].set(np.array(numbers, np.int32))

    @property
    def full(self) -> bool:
        """Whether no bucket is padded."""
        return all((piece.stop - piece.start) % self.size == 0 for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's slice of a batch: one of `n` equal contiguous runs of its buckets.

    Empty buckets pad the last slices.

    Attributes:
        whole: the batch.
        shares: the number of slices.
        axis_name: the axis whose workers have one slice each.
    """

    whole: "Batch | Shard"
    shares: int
    axis_name: AxisName

    @property
    def codec(self) -> Codec:
        return self.whole.codec

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def buckets(self) -> int:
        return -(-self.whole.buckets // self.shares)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.buckets, self.size), self.dtype)

    def counts(self) -> Array:
        """The number of real elements of each bucket, `int32[buckets]`."""
        return self.own(self.whole.counts())

    @property
    def full(self) -> bool:
        """Whether no bucket is padded, or empty."""
        return self.whole.full and self.whole.buckets % self.shares == 0

    def padded(self, x: Array) -> Array:
        """The rows of the whole batch, padded with zeros to full slices."""
        missing = self.buckets * self.shares - x.shape[0]
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x

    def rows(self, x: Array) -> Array:
        """The rows of the whole batch as `[shares, buckets, …]`."""
        return self.padded(x).reshape(self.shares, self.buckets, *x.shape[1:])

    def own(self, x: Array) -> Array:
        """This device's slice of the rows of the whole batch."""
        if self.shares == 1:
            return x
        start = lax.axis_index(self.axis_name) * self.buckets
        return lax.dynamic_slice_in_dim(self.padded(x), start, self.buckets)


@dataclasses.dataclass(frozen=True)
class Recut:
    """The same rows in shorter buckets, for another codec; each row is padded at its end.

    Attributes:
        whole: the batch or slice.
        codec: the codec of the shorter buckets.
    """

    whole: "Batch | Shard"
    codec: Codec

    @property
    def dtype(self) -> np.dtype:
        return self.whole.dtype

    @property
    def size(self) -> int:
        return min(self.codec.bucket_size or self.whole.size, self.whole.size)

    @property
    def cuts(self) -> int:
        """The number of buckets for each row."""
        return -(-self.whole.size // self.size)

    @property
    def buckets(self) -> int:
        return self.whole.buckets * self.cuts

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.buckets, self.size), self.dtype)

    def counts(self) -> Array:
        """The number of real elements of each bucket, `int32[buckets]`."""
        begins = jnp.arange(self.cuts, dtype=jnp.int32) * self.size
        left = self.whole.counts()[:, None] - begins
        return jnp.clip(left, 0, self.size).reshape(-1)

    @property
    def full(self) -> bool:
        """Whether no bucket is padded, or empty."""
        return self.whole.full and self.whole.size % self.size == 0

    def cut(self, x: Array) -> Array:
        """Rows of the whole as these buckets."""
        missing = self.cuts * self.size - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, missing))) if missing else x
        return x.reshape(-1, self.size)

    def joined(self, x: Array) -> Array:
        """These buckets as rows of the whole."""
        return x.reshape(-1, self.cuts * self.size)[:, : self.whole.size]


def real(batch: "Batch | Shard | Recut", x: Array) -> Array:
    """The rows with zeros in the padding.

    A codec may decode padding to anything, as signs do. In a memory, these values would enter the
    next message and affect scales.
    """
    if batch.full:
        return x
    place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(place < batch.counts()[:, None], x, 0)


def lanes(payload: Any, size: int, leading: int = 1) -> int:
    """The number of neighbouring decoded elements that come from neighbours in the payload.

    Codes are planar: each field of the words holds the codes of this many adjacent elements. Other
    arrays of a payload have one entry an element, as in a cast, or one for a run of elements, such
    as the steps of blocks.

    Args:
        payload: the payload of a batch.
        size: elements in a bucket.
        leading: the number of axes of the payload before those of a bucket.
    """
    found, planar = size, False
    for leaf in jax.tree.leaves(payload):
        length = math.prod(leaf.shape[leading:])
        if leaf.ndim > leading and (leaf.dtype == jnp.uint32 or length == size):
            found, planar = math.gcd(found, length), True
        elif length > 1:
            found = math.gcd(found, size // length)
    return found if planar else 1


def shards(batches: "Sequence[Batch | Shard]", axis_name: AxisName) -> tuple[Shard, ...]:
    """The slices of every batch over the workers of an axis."""
    workers = axes.size(axis_name)
    return tuple(Shard(batch, workers, axis_name) for batch in batches)


def padded_buckets(piece: Piece, size: int) -> int:
    """The number of buckets of a piece."""
    return -(-(piece.stop - piece.start) // size)


def batch_key(key: Array, number: int, worker: Array | int, first: Array | int = 0) -> Key:
    """The key of batch `number` of a step's key, on this worker, from bucket `first` on."""
    shared = noise.fold(key, number)
    return Key(shared, noise.fold(shared, worker), jnp.asarray(first).astype(jnp.uint32))

"""Batches: pieces of leaves as the rows of one codec call, and other rows made of these."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import Codec
from jaxcomp.numerics import noise
from jaxcomp.numerics.segments import Segments
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
        pieces: what is encoded, in this order.
        parted: whether it is most of one leaf, of which the rest is in another batch.
        chosen: the codec of the leaves, where `codec` is its form for several leaves in a bucket;
            else None.
        slices: buckets of such a batch: each has a slice of every leaf.
        segments: those slices, where leaves share buckets; else None.
    """

    codec: Codec
    dtype: np.dtype
    size: int
    pieces: tuple[Piece, ...]
    parted: bool = False
    chosen: Codec | None = None
    slices: int = 1
    segments: Segments | None = None

    @property
    def buckets(self) -> int:
        if self.segments is not None:
            return self.slices
        return sum(padded_buckets(piece, self.size) for piece in self.pieces)

    @property
    def picked(self) -> Codec:
        """The codec of the leaves."""
        return self.codec if self.chosen is None else self.chosen

    def with_codec(self, codec: Codec) -> "Batch":
        """The same leaves for another codec of buckets of the same size.

        Raises:
            ValueError: if leaves share buckets, and the codec has no form for that.
        """
        if self.segments is None:
            return dataclasses.replace(self, codec=codec)
        together = codec.segmented(self.segments)
        if together is None:
            raise ValueError(
                f"{codec!r} must have a bucket_size, or let leaves share a bucket, as "
                f"{self.picked!r} does whose leaves it encodes in another phase"
            )
        return dataclasses.replace(self, codec=together, chosen=codec)

    def in_dtype_of(self, likes: Sequence[Any]) -> "Batch":
        """The same batch in a dtype that represents those of its leaves."""
        dtypes = {likes[piece.leaf].dtype for piece in self.pieces}
        return dataclasses.replace(self, dtype=jnp.result_type(*dtypes))

    def bytes_of(self, total: float) -> list[tuple[int, float]]:
        """The number of each leaf, and its part of `total` bytes."""
        if self.segments is None:
            each = [padded_buckets(piece, self.size) for piece in self.pieces]
        else:
            each = [piece.stop - piece.start for piece in self.pieces]
        whole = sum(each)
        return [(p.leaf, total * n / whole) for p, n in zip(self.pieces, each, strict=True)]

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.buckets, self.size), self.dtype)

    def counts(self) -> Array:
        """The number of real elements: `int32[buckets]`, or `int32[buckets, segments]`."""
        if self.segments is not None:
            stretches = np.asarray(self.segments.sizes)
            left = np.array([piece.stop for piece in self.pieces])
            left = left - np.arange(self.slices)[:, None] * stretches
            return jnp.asarray(np.clip(left, 0, stretches), jnp.int32)
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
        if self.segments is not None:
            elements = sum(piece.stop for piece in self.pieces)
            return self.buckets * self.segments.size == elements
        return all((piece.stop - piece.start) % self.size == 0 for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Other rows of a batch: a device's slice of them, in the buckets of a codec, several times.

    Attributes:
        whole: the batch, or rows of it.
        codec: the codec of these rows. In shorter buckets than those of `whole`, each row is cut
            into several, and padded at its end.
        slices: the number of equal contiguous slices, of which a device has one. Empty buckets pad
            the last ones.
        axis_name: the axis whose workers have one slice each.
        times: how many messages of these rows lie one after another.
    """

    whole: "Batch | Rows"
    codec: Codec
    slices: int = 1
    axis_name: AxisName = None
    times: int = 1

    @property
    def picked(self) -> Codec:
        """The codec of the leaves."""
        return self.whole.picked

    @property
    def segments(self) -> Segments | None:
        return None if self.codec.segments is None else self.whole.segments

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
        return -(-self.whole.buckets // self.slices) * self.cuts * self.times

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.buckets, self.size), self.dtype)

    @property
    def full(self) -> bool:
        """Whether no bucket is padded, or empty."""
        even = self.whole.buckets % self.slices == 0 and self.whole.size % self.size == 0
        return self.whole.full and even

    def counts(self) -> Array:
        """The number of real elements: `int32[buckets]`, or `int32[buckets, segments]`."""
        found = self._cut_counts(self.own(self.whole.counts()))
        return jnp.tile(found, (self.times,) + (1,) * (found.ndim - 1)) if self.times > 1 else found

    def _cut_counts(self, whole: Array) -> Array:
        """Those of the cut rows. A bucket that leaves share is full: zeros between them count."""
        segments = self.whole.segments
        if self.cuts == 1 and (segments is None or self.segments is not None):
            return whole
        begins = jnp.arange(self.cuts, dtype=jnp.int32)[None] * self.size
        if segments is None:
            left = whole[:, None] - begins
        elif segments.width % self.size:
            return jnp.full(whole.shape[0] * self.cuts, self.size, jnp.int32)
        else:
            each = jnp.repeat(segments.row_counts(whole), segments.width // self.size, axis=1)
            left = each - (begins % segments.width)
        return jnp.clip(left, 0, self.size).reshape(-1)

    def padded(self, x: Array) -> Array:
        """The rows of the whole, padded with zeros to full slices."""
        missing = -x.shape[0] % self.slices
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x

    def rows(self, x: Array) -> Array:
        """The rows of the whole as `[slices, rows, …]`."""
        padded = self.padded(x)
        return padded.reshape(self.slices, -1, *x.shape[1:])

    def own(self, x: Array) -> Array:
        """This device's slice of the rows of the whole."""
        if self.slices == 1:
            return x
        padded = self.padded(x)
        each = padded.shape[0] // self.slices
        return lax.dynamic_slice_in_dim(padded, lax.axis_index(self.axis_name) * each, each)

    def cut(self, x: Array) -> Array:
        """Rows of the whole as these buckets."""
        missing = self.cuts * self.size - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, missing))) if missing else x
        return x.reshape(-1, self.size)

    def joined(self, x: Array) -> Array:
        """These buckets as rows of the whole."""
        return x.reshape(-1, self.cuts * self.size)[:, : self.whole.size]


def real(batch: "Batch | Rows", x: Array) -> Array:
    """The rows with zeros in the padding.

    A codec may decode padding to anything, as signs do. In a memory, these values would enter the
    next message and affect scales.
    """
    if batch.full:
        return x
    segments = batch.segments
    if segments is not None:
        return jnp.where(segments.real(batch.counts()), x, 0)
    if isinstance(batch, Rows) and batch.whole.segments is not None:
        whole = batch.whole.segments.real(batch.whole.counts())
        return jnp.where(batch.cut(whole), x, 0)
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


def padded_buckets(piece: Piece, size: int) -> int:
    """The number of buckets of a piece."""
    return -(-(piece.stop - piece.start) // size)


def batch_key(key: Array, number: int, worker: Array | int, first: Array | int = 0) -> Key:
    """The key of batch `number` of a step's key, on this worker, from bucket `first` on."""
    shared = noise.fold(key, number)
    return Key(shared, noise.fold(shared, worker), jnp.asarray(first).astype(jnp.uint32))


def batch_keys(
    key: Array, batches: Sequence[Any], worker: Array | int, *, numbered: bool = False
) -> list[Key]:
    """The key of every batch on this worker, from its first bucket on.

    Folded as one array: a program of many batches has these operations once. With `numbered`, the
    buckets of all workers are numbered one worker after another.
    """
    if not batches:
        return []
    numbers = jnp.arange(len(batches), dtype=jnp.uint32)
    shared = jax.vmap(noise.fold, in_axes=(None, 0))(key, numbers)
    own = jax.vmap(noise.fold, in_axes=(0, None))(shared, worker)

    keys = []
    for number, batch in enumerate(batches):
        # Subscripts would be eight lines of the program each.
        pair = [lax.index_in_dim(x, number, keepdims=False) for x in (shared, own)]
        first = jnp.uint32(worker * batch.buckets) if numbered else jnp.uint32(0)
        keys.append(Key(pair[0], pair[1], first))
    return keys

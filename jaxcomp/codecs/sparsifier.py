"""The sparsifier: a few elements, and their indices."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt32

from jaxcomp import checks
from jaxcomp.backend import platforms
from jaxcomp.base import Codec, Facts, Hints
from jaxcomp.codecs import inner
from jaxcomp.numerics import addition, exact, noise, segments as segments_
from jaxcomp.numerics.segments import Segments, change_width
from jaxcomp.sparsify import leaves
from jaxcomp.sparsify.choices import Choice
from jaxcomp.sparsify.competitors import Leaves, Parts, Row
from jaxcomp.sparsify.indices import Bitmap, EliasFano, Indices
from jaxcomp.sparsify.unjoined import LONG, UnjoinedLeaves, long_leaves
from jaxcomp.types import Array, ArrayLike, Key, Weights

_CHOICE = 0x53706172
"""Folded into the key, so that the choice is independent of the rounding of values."""


class SparsePayload(NamedTuple):
    """The values (or the payload of their codec), their indices as words, and their number.

    The number is sent only if it is not fixed.
    """

    values: Any
    places: UInt32[Array, "n words"]
    number: Int32[Array, "n ..."] | tuple


_WHOLE = Hints(joined_leaf=2**30)
_IN_BUCKETS = Hints(joined_leaf=2**30, alone=1 / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparsifier(Codec):
    """Sends a few elements of each bucket and their indices; the others decode to zero.

    Args:
        choice: the rule that selects the elements.
        values: a codec for their values, with its own buckets; None sends them unchanged.
        indices: the encoding of the indices.
        bucket_size: elements in a bucket; None for one bucket per leaf.
        segments: the leaves in each bucket, where `segmented` has put several into one.

    Raises:
        ValueError: for parts of the wrong kind, or a codec of values that has state, needs
            agreement between workers, or whose error may be larger than its input or has no known
            bound.
    """

    choice: Choice
    values: Codec | None = None
    indices: Indices = EliasFano()
    bucket_size: int | None = None
    segments: Segments | None = dataclasses.field(default=None, repr=False)
    unbiased = False

    @property
    def hints(self) -> Hints:
        """A program for one more size or shape takes the compiler two seconds."""
        return _WHOLE if self.bucket_size is None else _IN_BUCKETS

    def __post_init__(self):
        checks.part("choice", self.choice, Choice)
        checks.part("indices", self.indices, Indices)
        checks.bucket_size(self.bucket_size)
        if self.values is not None:
            inner.check("values", self.values, agreement=False)
            if self.segments is not None:
                return
            if jax.tree.leaves(self.values.init(jax.ShapeDtypeStruct((1, 8), jnp.float32))):
                raise ValueError(
                    f"`values` must be a codec without state, got {self.values!r}; use one such "
                    "as jaxcomp.qsgd_inf(bits=8)"
                )
            if not self.contractive:
                objection = "whose error may be larger"
                if self._bound is None:
                    objection = "whose error has no known bound"
                raise ValueError(
                    "`values` must be a codec whose error is below its input, since a residual "
                    f"stores the error, got {self.values!r}, {objection}; use more "
                    "bits, smaller buckets as in jaxcomp.qsgd_inf(bits=4, bucket_size=128), a "
                    "rotation as in jaxcomp.ndsc(bits=4), or "
                    "jaxcomp.codecs.Contractive(codec=..., omega=...)"
                )

    @property
    def contractive(self) -> bool:
        """Whether the sent values are closer to their elements than zero is."""
        if self.values is None or self.values.contractive:
            return True
        if self.values.unbiased:
            bound = self._bound
            return bound is not None and bound < 1
        # Logarithmic values are close to all chosen elements, if not to all elements.
        return self.choice.span <= self.values.facts.span

    @property
    def _bound(self) -> float | None:
        """The relative variance of unbiased values, None if it is not known."""
        values: Any = self.values
        return values.variance_bound(values.bucket_size or 512) if values.unbiased else None

    @functools.cached_property
    def facts(self) -> Facts:
        values = Facts(keeps_zeros=True) if self.values is None else self.values.facts
        return Facts(
            homogeneous=self.choice.homogeneous and values.homogeneous,
            keeps_zeros=values.keeps_zeros,
            names_senders=True,
            guided=self.choice.guided,
        )

    def segmented(self, segments: Segments) -> "Sparsifier | None":
        """None where values of several leaves would share a bucket, or a bitmap lacks places."""
        if isinstance(self.indices, Bitmap) and not self.choice.fills:
            return None
        values = self.values
        if values is not None:
            rooms = tuple(self.choice.room(size) for size in segments.sizes)
            values = None if values.bucket_size else values.segmented(segments_.of(rooms))
            if values is None:
                return None
        return dataclasses.replace(self, values=values, segments=segments)

    def init(self, like: ArrayLike) -> Any:
        return self.choice.init(like.shape[0], len(self._parts(like.shape[1]).sizes))

    def _parts(self, size: int) -> Parts:
        return Row(size) if self.segments is None else Leaves(self.segments)

    def _rooms(self, size: int) -> Segments:
        """The slots of each part of a bucket."""
        return Segments(tuple(map(self.choice.room, self._parts(size).sizes)), 1)

    # Compile it for eager callers too; otherwise hundreds of small operations compile one by one.
    @functools.partial(jax.jit, static_argnums=0)
    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[SparsePayload, Any]:
        return self._encode(key, x, state, self._parts(x.shape[1]), *x.shape)

    def leafwise(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """A CPU reads and makes long leaves where they lie, unless too few elements are in them."""
        if self.segments is None or not self.choice.unjoined:
            return None
        sizes = self.segments.sizes
        long = long_leaves(sizes)
        if 2 * sum(sizes[number] for number in long) <= sum(sizes):
            return None
        # Decoding holds less memory beside the joined leaves, so more of them can be joined.
        longest = [number for number in long if sizes[number] >= 2 * LONG] or long
        return (
            functools.partial(self._encode_leaves, self.segments, long),
            functools.partial(self._decode_leaves, self.segments, longest),
        )

    def _encode_leaves(
        self, segments: Segments, long: Sequence[int], key: Key, flat: Any, count: Any, state: Any
    ) -> tuple[SparsePayload, Any]:
        def joined(key: Key, flat: Any, count: Any, state: Any) -> tuple[SparsePayload, Any]:
            return self.encode(key, segments.join(flat), count, state)

        def unjoined(key: Key, flat: Any, _: Any, state: Any) -> tuple[SparsePayload, Any]:
            parts = UnjoinedLeaves(segments, long)
            return self._encode(key, parts.split(flat), state, parts, 1, segments.size)

        return platforms.choose(joined, unjoined, key, flat, count, state)

    def _decode_leaves(
        self,
        segments: Segments,
        long: Sequence[int],
        key: Key,
        payload: SparsePayload,
        like: ArrayLike,
    ) -> tuple[Array, ...]:
        def joined(key: Key, payload: SparsePayload) -> tuple[Array, ...]:
            return tuple(segments.cut(self.decode(key, payload, like)))

        def unjoined(key: Key, payload: SparsePayload) -> tuple[Array, ...]:
            entries = self._entries(key, payload, 1, segments.size, like.dtype, counted=False)
            return UnjoinedLeaves(segments, long).scatter(*entries, self._rooms(segments.size))

        return platforms.choose(joined, unjoined, key, payload)

    def _encode(
        self, key: Key, x: Any, state: Any, parts: Parts, n: int, size: int
    ) -> tuple[SparsePayload, Any]:
        slots, number_of = self._rooms(size), len(parts.sizes)
        first = key.first * jnp.uint32(number_of)
        start, _ = noise.seeds(noise.fold(key.own, _CHOICE), first, n * number_of)
        start = start.reshape(n, number_of)
        places, number, state, values = self.choice.choose(x, start, state, parts)
        if values is None:
            own = places if number is None else leaves.slots(places, number, slots)
            values = parts.take(x, own.astype(jnp.int32), slots)
        if number is not None:
            values = jnp.where(slots.real(number), values, 0)
            slot = lax.broadcasted_iota(jnp.int32, places.shape, 1)
            found = jnp.sum(number, axis=1, keepdims=True, dtype=jnp.int32)
            places = jnp.where(slot < found, places, jnp.uint32(size))
        sent = self._encode_values(key, values, number, slots)
        words = self.indices.encode(places, size)
        if number is not None and self.segments is None:
            number = number[:, 0]
        return SparsePayload(sent, words, () if number is None else number), state

    def decode(self, key: Key, payload: SparsePayload, like: ArrayLike, side: Any = None) -> Array:
        del side
        return self._add(key, jnp.zeros(like.shape, like.dtype), payload, None)

    def decode_sum(
        self,
        keys: Key,
        payloads: SparsePayload,
        like: ArrayLike,
        weights: Weights = None,
        side: Any = None,
    ) -> Array:
        """Adds a scatter of sorted, unique indices per worker: deterministic on all platforms."""
        del side
        like = addition.accumulator(like)
        return self._sum(keys, payloads, jnp.zeros(like.shape, like.dtype), weights)

    def mean_of_senders(
        self, keys: Key, payloads: SparsePayload, like: ArrayLike, weights: Weights = None
    ) -> Array:
        """`Σ wᵢ·decode(payloadᵢ) / Σ wᵢ` over the senders of each element, zero without senders."""
        total = self.decode_sum(keys, payloads, like, weights)
        none = jnp.zeros(like.shape, jnp.float32)
        count = self._sum(keys, payloads, none, weights, counted=True)
        sent = count > 0
        count = jnp.where(sent, count, 1)
        if total.dtype == jnp.float64:
            return jnp.where(sent, total / count, 0)
        return jnp.where(sent, total * exact.reciprocal(count), 0)

    def _sum(
        self,
        keys: Key,
        payloads: SparsePayload,
        total: Array,
        weights: Weights,
        *,
        counted: bool = False,
    ) -> Array:
        def add(index, total):
            key = keys._replace(own=keys.own[index])
            payload = jax.tree.map(lambda leaf: leaf[index], payloads)
            weight = None if weights is None else weights[index]
            return self._add(key, total, payload, weight, counted)

        workers = keys.own.shape[0]
        for index in range(min(workers, addition.UNROLLED)):
            total = add(index, total)
        if workers > addition.UNROLLED:
            total = lax.fori_loop(addition.UNROLLED, workers, add, total)
        return total

    @functools.partial(jax.jit, static_argnums=(0, 5))
    def _add(
        self,
        key: Key,
        total: Array,
        payload: SparsePayload,
        weight: Array | None,
        counted: bool = False,
    ) -> Array:
        """Adds one worker's values, or a one for each of its elements, to the total."""
        n, size = total.shape
        places, values = self._entries(key, payload, n, size, total.dtype, counted)
        return total.at[jnp.arange(n)[:, None], places].add(
            addition.weigh(values, weight),
            indices_are_sorted=self.segments is None or isinstance(payload.number, tuple),
            unique_indices=True,
            mode="drop",
        )

    def _entries(
        self, key: Key, payload: SparsePayload, n: int, size: int, dtype: Any, counted: bool
    ) -> tuple[Array, Array]:
        """The places and values of one worker in the slots of each part."""
        slots = self._rooms(size)
        places = self.indices.decode(payload.places, slots.size, size).astype(jnp.int32)
        values = jnp.ones(places.shape, dtype)
        if not counted:
            values = self._decode_values(key, payload.values, n, slots, dtype)
        if not isinstance(payload.number, tuple):  # Unused slots get invalid, distinct indices.
            slot = lax.broadcasted_iota(jnp.int32, places.shape, 1)
            number = payload.number.reshape(n, -1)
            places = leaves.slots(places, number, slots)
            places = jnp.where(slots.real(number), places, size + slot)
        return places, values.astype(dtype)

    def _encode_values(self, key: Key, values: Array, number: Array | None, slots: Segments) -> Any:
        """The payload of the values: each of its arrays has a row for each bucket."""
        if self.values is None:
            return values
        n = len(values)
        if self.values.segments is not None:
            real = jnp.broadcast_to(jnp.asarray(slots.sizes, jnp.int32), (n, slots.number))
            own = change_width(values, slots, self.values.segments)
            real = real if number is None else number
            return self.values.encode(key, own, real, self.values.init(own))[0]
        room, (parts, size) = slots.size, self._buckets(slots.size)
        padded = jnp.pad(values, ((0, 0), (0, parts * size - room))).reshape(n * parts, size)
        real = jnp.full((n, 1), room, jnp.int32) if number is None else number
        begin = jnp.arange(parts, dtype=jnp.int32)[None] * size
        count = jnp.clip(real - begin, 0, size).reshape(-1)
        own = key._replace(first=key.first * jnp.uint32(parts))
        payload, _ = self.values.encode(own, padded, count, self.values.init(padded))
        return jax.tree.map(lambda leaf: leaf.reshape(n, parts, *leaf.shape[1:]), payload)

    def _decode_values(self, key: Key, sent: Any, n: int, slots: Segments, dtype: Any) -> Array:
        if self.values is None:
            return sent
        if self.values.segments is not None:
            like = jax.ShapeDtypeStruct((n, self.values.segments.size), dtype)
            return change_width(self.values.decode(key, sent, like), self.values.segments, slots)
        parts, size = self._buckets(slots.size)
        payload = jax.tree.map(lambda leaf: leaf.reshape(n * parts, *leaf.shape[2:]), sent)
        own = key._replace(first=key.first * jnp.uint32(parts))
        like = jax.ShapeDtypeStruct((n * parts, size), dtype)
        return self.values.decode(own, payload, like).reshape(n, -1)[:, : slots.size]

    def _buckets(self, room: int) -> tuple[int, int]:
        """Buckets of values, and their size."""
        size = room
        if self.values is not None and self.values.bucket_size is not None:
            size = min(room, self.values.bucket_size)
        return math.ceil(room / size), size

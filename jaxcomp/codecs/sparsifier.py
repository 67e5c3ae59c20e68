"""The sparsifier: a few elements as they are, and where they belong."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt32

from jaxcomp import bits, checks, summing
from jaxcomp.protocols import Array, ArrayLike, Key
from jaxcomp.sparsify import selection


class SparsePayload(NamedTuple):
    """Values in the dtype of the gradient, and their places packed to the bits they need."""

    values: Array
    places: UInt32[Array, "n words"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """The `⌈fraction · size⌉` elements of largest magnitude of each bucket, unchanged.

    Args:
        fraction: share of the elements that is sent, in (0, 1].
        bucket_size: elements in a bucket; None for one bucket a leaf.
    """

    fraction: float
    bucket_size: int | None = None
    unbiased = False
    linear = False

    def __post_init__(self):
        checks.fraction(self.fraction)
        checks.bucket_size(self.bucket_size)

    def k(self, size: int) -> int:
        """Elements sent of a bucket of this size: at least one."""
        return max(1, math.ceil(round(self.fraction * size, 6)))

    def init(self, like: ArrayLike) -> tuple:
        del like
        return ()

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[SparsePayload, tuple]:
        del key, count
        places = selection.top_k(x, self.k(x.shape[1]))
        values = jnp.take_along_axis(x, places.astype(jnp.int32), axis=1)
        return SparsePayload(values, bits.pack(places, bits=_width(x.shape[1]))), state

    def decode(self, key: Key, payload: SparsePayload, like: ArrayLike, side: Any = None) -> Array:
        del key, side
        return self._add(jnp.zeros(like.shape, like.dtype), payload)

    def decode_sum(
        self, keys: Key, payloads: SparsePayload, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        """One scatter of sorted, unique places a worker: deterministic on every platform."""
        like = summing.accumulator(like)

        def add(index, total):
            values = summing.weighted(
                payloads.values[index], None if weights is None else weights[index]
            )
            return self._add(total, SparsePayload(values, payloads.places[index]))

        total, workers = jnp.zeros(like.shape, like.dtype), keys.own.shape[0]
        for index in range(min(workers, summing.UNROLLED)):
            total = add(index, total)
        if workers > summing.UNROLLED:
            total = lax.fori_loop(summing.UNROLLED, workers, add, total)
        return total

    def _add(self, total: Array, payload: SparsePayload) -> Array:
        n, size = total.shape
        width, k = _width(size), payload.values.shape[1]
        places = bits.unpack(payload.places, bits=width, size=k).astype(jnp.int32)
        row = jnp.arange(n)[:, None]
        return total.at[row, places].add(
            payload.values.astype(total.dtype), indices_are_sorted=True, unique_indices=True
        )


def _width(size: int) -> int:
    """Bits of a place in a bucket of this size."""
    return max(1, (size - 1).bit_length())

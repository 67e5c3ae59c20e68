"""Random sparsification with a shared key: values are sent, indices are not."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32

from jaxcomp import checks
from jaxcomp.base import Codec
from jaxcomp.numerics import noise, summing
from jaxcomp.quantize import sums
from jaxcomp.types import Array, ArrayLike, Key


class SampledPayload(NamedTuple):
    """The sampled elements, in the dtype of the gradient."""

    values: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomK(Codec, public=("group",)):
    """Sends one random element of each group of `w` neighbours, the same on all workers.

    With `scaled`, values are multiplied by `w`, which is unbiased with `ω = w − 1`. The codec is
    linear: the decoded sum of payloads is the sum of the decoded payloads.

    Args:
        fraction: the fraction that is sent; a group has `w = round(1 / fraction)` elements.
        scaled: True multiplies values by `w`, which is unbiased; False sends them unchanged, a
            contraction with `δ = 1/w`.
        bucket_size: elements in a bucket; None for one bucket a leaf.
    """

    fraction: int | float
    scaled: bool = True
    bucket_size: int | None = None
    linear = True
    reorders = True

    def __post_init__(self):
        checks.fraction(self.fraction)
        checks.bucket_size(self.bucket_size)

    @property
    def unbiased(self) -> bool:
        """Whether values are scaled."""
        return self.scaled

    @property
    def group(self) -> int:
        """The number of elements of a group."""
        return max(1, round(1 / self.fraction))

    def variance_bound(self, size: int) -> float | None:
        """`ω` with `E‖x̂ − x‖² = ω‖x‖²`."""
        return min(self.group, size) - 1.0 if self.scaled else None

    def encode(
        self, key: Key, x: Array, count: Array, state: tuple
    ) -> tuple[SampledPayload, tuple]:
        del count
        n, size = x.shape
        group, k = self._groups(size)
        rows = jnp.pad(x, ((0, 0), (0, group * k - size))).reshape(n, k, group)
        chosen = (
            lax.broadcasted_iota(jnp.int32, rows.shape, 2) == self._chosen(key, n, size)[..., None]
        )
        # Sum the bits: only one summand is nonzero, so the sum does not round.
        width = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = jnp.where(chosen, lax.bitcast_convert_type(rows, width), 0)
        values = lax.bitcast_convert_type(jnp.sum(words, axis=2, dtype=width), x.dtype)
        # Non-finite elements must stay visible even if they are not sampled.
        seen = sums.is_finite(sums.max_abs(x))
        return SampledPayload(jnp.where(seen, values, jnp.nan).astype(x.dtype)), state

    def decode(self, key: Key, payload: SampledPayload, like: ArrayLike, side: Any = None) -> Array:
        del side
        return self._spread(key, payload.values.astype(summing.wide(like.dtype)), like)

    def decode_sum(
        self,
        keys: Key,
        payloads: SampledPayload,
        like: ArrayLike,
        weights: Array | None = None,
        side: Any = None,
    ) -> Array:
        """Adds the values of all workers, then scatters the sum once."""
        del side
        dtype = summing.wide(like.dtype)

        def term(index):
            values = payloads.values[index].astype(dtype)
            return summing.weighted(values, None if weights is None else weights[index])

        return self._spread(
            keys, summing.in_order(term, keys.own.shape[0]), summing.accumulator(like)
        )

    def _spread(self, key: Key, values: Array, like: ArrayLike) -> Array:
        n, size = like.shape
        group, _ = self._groups(size)
        factor = jnp.asarray(group if self.scaled else 1, values.dtype)
        largest = jnp.finfo(like.dtype).max.astype(values.dtype)
        values = values * factor
        values = jnp.where(jnp.abs(values) > largest, jnp.sign(values) * largest, values)
        chosen = self._chosen(key, n, size)[..., None]
        place = lax.broadcasted_iota(jnp.int32, (*values.shape, group), 2)
        rows = jnp.where((place == chosen) | jnp.isnan(values)[..., None], values[..., None], 0)
        return rows.reshape(n, -1)[:, :size].astype(like.dtype)

    def _groups(self, size: int) -> tuple[int, int]:
        """The elements of a group, and the groups of a bucket."""
        group = min(self.group, size)
        return group, math.ceil(size / group)

    def _chosen(self, key: Key, n: int, size: int) -> Int32[Array, "n k"]:
        """The index of the chosen element in each group."""
        group, k = self._groups(size)
        high, low = (part[:, None] for part in noise.seeds(key.shared, key.first, n))
        word = noise.at(high, low, jnp.arange(k, dtype=jnp.uint32)[None])
        # Multiply sixteen bits at a time: the product exceeds 32 bits. The bias is below 2^-32.
        upper = (word >> 16) * jnp.uint32(group)
        lower = (word & 0xFFFF) * jnp.uint32(group)
        if group >= 1 << 16:
            return (word % jnp.uint32(group)).astype(jnp.int32)
        return ((upper + (lower >> 16)) >> 16).astype(jnp.int32)

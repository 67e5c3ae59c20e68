"""Random sparsification with a shared key: values are sent, indices are not."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt32

from jaxcomp import checks
from jaxcomp.base import Codec, Facts
from jaxcomp.numerics import addition, noise
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize import totals
from jaxcomp.sparsify.competitors import INF, Leaves
from jaxcomp.types import Array, ArrayLike, Key, Weights


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
        bucket_size: elements in a bucket; None for one bucket per leaf.
        segments: the leaves in each bucket, where `segmented` has put several into one.
    """

    fraction: int | float
    scaled: bool = True
    bucket_size: int | None = None
    segments: Segments | None = dataclasses.field(default=None, repr=False)
    linear = True
    facts = Facts(reorders=True)

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

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """`ω` with `E‖x̂ − x‖² = ω‖x‖²`."""
        del peak
        size = size if self.segments is None else max(self.segments.sizes)
        return min(self.group, size) - 1.0 if self.scaled else None

    def segmented(self, segments: Segments) -> "RandomK":
        return dataclasses.replace(self, segments=segments)

    def encode(
        self, key: Key, x: Array, count: Array, state: tuple
    ) -> tuple[SampledPayload, tuple]:
        del count
        if self.segments is not None:
            return self._of_leaves(self.segments, key, x), state
        n, size = x.shape
        group, k = self._groups(size)
        rows = jnp.pad(x, ((0, 0), (0, group * k - size))).reshape(n, k, group)
        place = lax.broadcasted_iota(jnp.int32, rows.shape, 2)
        chosen = place == self._choose(key, n, size)[..., None]
        # Sum the bits: only one summand is nonzero, so the sum does not round.
        width = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = jnp.where(chosen, lax.bitcast_convert_type(rows, width), 0)
        values = lax.bitcast_convert_type(jnp.sum(words, axis=2, dtype=width), x.dtype)
        # Non-finite elements must stay visible even if they are not sampled.
        seen = totals.is_finite(totals.max_abs(x))
        return SampledPayload(jnp.where(seen, values, jnp.nan).astype(x.dtype)), state

    def decode(self, key: Key, payload: SampledPayload, like: ArrayLike, side: Any = None) -> Array:
        del side
        return self._spread(key, payload.values.astype(addition.wide(like.dtype)), like)

    def decode_sum(
        self,
        keys: Key,
        payloads: SampledPayload,
        like: ArrayLike,
        weights: Weights = None,
        side: Any = None,
    ) -> Array:
        """Adds the values of all workers, then scatters the sum once."""
        del side
        dtype = addition.wide(like.dtype)

        def term(index):
            values = payloads.values[index].astype(dtype)
            return addition.weigh(values, None if weights is None else weights[index])

        total = addition.in_order(term, keys.own.shape[0])
        return self._spread(keys, total, addition.accumulator(like))

    def _spread(self, key: Key, values: Array, like: ArrayLike) -> Array:
        n, size = like.shape
        if self.segments is not None:
            chosen, group = self._places(self.segments, key, n)
            row, slot = jnp.arange(n)[:, None], lax.broadcasted_iota(jnp.int32, chosen.shape, 1)
            values = self._scale(values, group, like.dtype).astype(like.dtype)
            places = jnp.where(chosen < 0, size + slot, chosen)
            # All elements of a leaf that is not finite, as in a bucket of its own.
            bad = self._slots(self.segments).largest(jnp.isnan(values).astype(jnp.int32)) > 0
            rest = self.segments.per_element(jnp.where(bad, jnp.nan, 0).astype(like.dtype))
            return rest.at[row, places].set(values, unique_indices=True, mode="drop")
        group, _ = self._groups(size)
        values = self._scale(values, group, like.dtype)
        chosen = self._choose(key, n, size)[..., None]
        place = lax.broadcasted_iota(jnp.int32, (*values.shape, group), 2)
        rows = jnp.where((place == chosen) | jnp.isnan(values)[..., None], values[..., None], 0)
        return rows.reshape(n, -1)[:, :size].astype(like.dtype)

    def _scale(self, values: Array, group: Array | int, dtype: Any) -> Array:
        """The values as many times as large as a group has elements, as far as the dtype goes."""
        largest = jnp.finfo(dtype).max.astype(values.dtype)
        values = values * jnp.asarray(group if self.scaled else 1, values.dtype)
        return jnp.where(jnp.abs(values) > largest, jnp.sign(values) * largest, values)

    def _of_leaves(self, segments: Segments, key: Key, x: Array) -> SampledPayload:
        """The values of all leaves; a leaf that is not finite sends NaN."""
        slots, (places, _) = self._slots(segments), self._places(segments, key, len(x))
        values = jnp.take_along_axis(x, jnp.maximum(places, 0), axis=1, mode="clip")
        seen = slots.per_element(Leaves(segments).largest(x) < INF)
        values = jnp.where(places < 0, 0, values)
        return SampledPayload(jnp.where(seen, values, jnp.nan).astype(x.dtype))

    def _slots(self, segments: Segments) -> Segments:
        """As many places for each leaf as it has groups."""
        return Segments(tuple(self._groups(size)[1] for size in segments.sizes), 1)

    def _places(
        self, segments: Segments, key: Key, n: int
    ) -> tuple[Int32[Array, "n k"], Int32[Array, "n k"]]:
        """The places that are sent, -1 for those of padding, and the elements of their groups."""
        slots = self._slots(segments)

        def each(numbers: Sequence[int]) -> Array:
            whole = jnp.asarray(numbers, jnp.int32)
            return slots.per_element(jnp.broadcast_to(whole, (n, len(numbers))))

        group = each([self._groups(size)[0] for size in segments.sizes])
        word = noise.at(*noise.rows(key.shared, key.first, (n, slots.size)))
        place = slots.place(n) * group + _below(word, group.astype(jnp.uint32))
        return jnp.where(place < each(segments.sizes), each(segments.starts) + place, -1), group

    def _groups(self, size: int) -> tuple[int, int]:
        """The elements of a group, and the groups of a bucket."""
        group = min(self.group, size)
        return group, math.ceil(size / group)

    def _choose(self, key: Key, n: int, size: int) -> Int32[Array, "n k"]:
        """The index of the chosen element in each group."""
        group, k = self._groups(size)
        word = noise.at(*noise.rows(key.shared, key.first, (n, k)))
        return _below(word, jnp.uint32(group))


def _below(word: UInt32[Array, "n k"], group: UInt32[Array, "..."]) -> Int32[Array, "n k"]:
    """A number below that of the elements of a group, from a random word."""
    # Sixteen bits at a time, since the product has no room in 32: the bias is below 2^-32.
    upper, lower = (word >> 16) * group, (word & 0xFFFF) * group
    found = jnp.where(group >= 1 << 16, word % group, (upper + (lower >> 16)) >> 16)
    return found.astype(jnp.int32)

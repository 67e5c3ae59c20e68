"""Integers that collectives can add: fields of a word so wide that no sum overflows them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32, UInt32

from jaxcomp import checks
from jaxcomp.backend import axes
from jaxcomp.base import Codec, Facts
from jaxcomp.bits.planes import Plane, lanes
from jaxcomp.codecs.in_rows import InRows
from jaxcomp.numerics import noise
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize import rounding as rounding_, totals
from jaxcomp.quantize.levels import FRACTION, Levels
from jaxcomp.quantize.rounding import Rounding
from jaxcomp.quantize.scales import Scale
from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array, ArrayLike, AxisName, Key

WIDEST = 16
"""The most bits of a field: a wider one would take a word, as a float32 does."""


class SummedPayload(NamedTuple):
    """Words of integers, or their sum over workers."""

    words: UInt32[Array, "n words"]


class AgreedSteps(NamedTuple):
    """The step size that all workers use, and the factor that brings elements to codes."""

    step: Float32[Array, "..."]
    factor: Float32[Array, "..."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summed(Codec, public=("agreed", "measure", "repacked", "width", "words")):
    """Each bucket as integers times a step that all workers agree on; the integers may be added.

    `Σᵢ x̂ᵢ = step · Σᵢ qᵢ` with `|qᵢ| ≤ limit`. A word is `Σₚ qₚ · 2^(w·p)` modulo 2³². The sum of
    the workers' words is the word of the sums; adding `limit · workers` to every field makes the
    fields non-negative. So any all-reduce of 32-bit integers adds words exactly, in any order, and
    a word of zeros adds nothing. The width `w` holds `2 · limit · workers + 1` values; field `p` of
    word `j` is element `p · words + j`.

    Args:
        levels: the values of the codes.
        scale: the scale of a bucket; the largest scale of all workers is used.
        rounding: the rule that rounds an element to a level.
        limit: the largest integer that a worker sends; if it is smaller than the largest level,
            larger elements are clipped.
        workers: the largest number of workers in a sum.
        bucket_size: elements in a bucket; None for one bucket per leaf.

    Raises:
        ValueError: if a sum may need more than 16 bits, or `limit` exceeds the levels.

    Example:
        >>> from jaxcomp.quantize import levels, rounding, scales
        >>> parts = dict(scale=scales.MaxAbs(), rounding=rounding.Stochastic())
        >>> Summed(levels=levels.Uniform(steps=7), limit=7, workers=8, **parts).width
        7

    Note:
        The step is not part of the payload, so decoding needs the agreed steps.
    """

    levels: Levels
    scale: Scale
    rounding: Rounding
    limit: int
    workers: int
    bucket_size: int | None = 512
    linear = True
    contractive = False

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)
        checks.part("levels", self.levels, Levels)
        checks.integer("limit", self.limit, 1, self.levels.magnitude)
        checks.integer("workers", self.workers, 1)
        if self.width > WIDEST:
            most = (2**WIDEST - 1) // (2 * self.limit)
            raise ValueError(
                f"`workers` must be at most {most} for sums of integers up to ±{self.limit} in "
                f"{WIDEST} bits, got {self.workers}; use fewer bits, or a reducer that does not "
                "add payloads, such as jaxcomp.TwoShot or jaxcomp.Gather"
            )

    @property
    def unbiased(self) -> bool:
        """Whether rounding is unbiased and no element is clipped."""
        return self.rounding.unbiased and self.levels.dithers and not self._clips

    @property
    def width(self) -> int:
        """Bits of a field."""
        return (2 * self._most).bit_length()

    @functools.cached_property
    def facts(self) -> Facts:
        """The claim of bits is without the agreed steps; sums are these steps times integers."""
        claim = 32 / self._plane.fields
        if self.bucket_size is not None:
            claim = 32 * lanes(self.bucket_size, self._plane) / self.bucket_size
        return Facts(bits_per_element=claim, agrees=True, sided=True, scales_sums=True)

    def agree(
        self, key: Key, x: Array, count: Array, state: Any, axis_name: AxisName
    ) -> AgreedSteps:
        """The steps for the largest scale of all workers."""
        del key, state
        scale = axes.maximum(self.measure(x, count[:, None])[:, 0], axis_name)
        return self.agreed(scale, x.dtype)

    def measure(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Array:
        """The scale of each row, `[n, 1]`."""
        return self.scale(x, count, rows)

    def words(self, size: int) -> int:
        """Words of so many fields."""
        return lanes(size, self._plane)

    def repacked(self, words: Array, before: int, after: int) -> Array:
        """The words of the same integers in rows of `after` elements, and not of `before`."""
        return self._pack(self._unpack(words, before).reshape(-1, after))

    def segmented(self, segments: Segments) -> InRows | None:
        if self.bucket_size is not None:
            return None
        rows = dataclasses.replace(self, bucket_size=segments.width)
        return InRows(codec=rows, segments=segments)

    def side(self, agreed: AgreedSteps) -> Float32[Array, "..."]:
        """The step of each bucket."""
        return agreed.step

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[SummedPayload, tuple]:
        agreed = state
        if not isinstance(state, AgreedSteps):
            agreed = self.agreed(self.measure(x, count[:, None])[:, 0], x.dtype)
        seed = key.shared if self.rounding.shared else key.own
        points = rounding_.points(x, agreed.factor[:, None])
        if self._clips:
            end = float(self.limit << FRACTION)
            points = jnp.clip(points, -end, end)
        dither = self.rounding.dither(*noise.rows(seed, key.first, x.shape))
        values = self.levels.values(self.levels.codes(points, dither))
        return SummedPayload(self._pack(values.astype(jnp.int32))), ()

    def decode(
        self, key: Key, payload: SummedPayload, like: ArrayLike, side: Array | None = None
    ) -> Array:
        del key
        if side is None:
            raise ValueError(
                "`side` must be the steps that the workers agreed on, which are not part of the "
                "payload, got None"
            )
        values = self._unpack(payload.words, like.shape[1]).astype(jnp.float32)
        return (values * side[:, None]).astype(like.dtype)  # This product does not round.

    def agreed(self, scale: Float32[Array, "..."], dtype: Any) -> AgreedSteps:
        """Steps whose products are exact, with a code in `dtype` and with a sum in float32."""
        spare = 24 - rounding_.significant(1, dtype, 0)
        whole = self.limit == self.levels.magnitude
        own = self.levels.precision if whole else self.limit.bit_length()
        precision = max(own, self._most.bit_length() - spare)
        most = self.levels.magnitude
        return AgreedSteps(*rounding_.exact_step(scale, most, dtype, precision=precision))

    def _pack(self, values: Int32[Array, "n size"]) -> UInt32[Array, "n words"]:
        n, size = values.shape
        plane = self._plane
        words = lanes(size, plane)
        rows = jnp.pad(values.astype(jnp.uint32), ((0, 0), (0, plane.fields * words - size)))
        rows = rows.reshape(n, plane.fields, words)
        # Negative fields borrow from the fields above, which the sum modulo 2³² takes into account.
        fields = np.arange(plane.fields)[None, :, None]
        return jnp.sum(plane.put(rows, fields, whole=True), axis=1, dtype=jnp.uint32)

    def _unpack(self, words: UInt32[Array, "n words"], size: int) -> Int32[Array, "n size"]:
        plane = self._plane
        ends = sum(self._most << (plane.width * field) for field in range(plane.fields))
        fields = np.arange(plane.fields)[None, :, None]
        found = plane.take(words[:, None] + np.uint32(ends % 2**32), fields)
        return found.reshape(words.shape[0], -1)[:, :size].astype(jnp.int32) - self._most

    @property
    def _clips(self) -> bool:
        return not self.scale.covers or self.limit < self.levels.magnitude

    @property
    def _most(self) -> int:
        """The largest sum."""
        return self.limit * self.workers

    @property
    def _plane(self) -> Plane:
        return Plane(self.width)

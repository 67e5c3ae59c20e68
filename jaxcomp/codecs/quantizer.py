"""The quantizer: scale, levels and rounding as settings of one codec."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float32, UInt32

from jaxcomp import axes, bits, checks, trees
from jaxcomp.protocols import Array, ArrayLike, AxisName, Key
from jaxcomp.quantize import rounding as rounding_
from jaxcomp.quantize.levels import FRACTION, Levels
from jaxcomp.quantize.rounding import Rounding
from jaxcomp.quantize.scales import MaxAbs, MeanAbs, Scale


class QuantizedPayload(NamedTuple):
    """Packed codes, and what one step of each bucket is worth."""

    words: UInt32[Array, "n words"]
    steps: Float32[Array, " n"]


class AgreedScale(NamedTuple):
    """The bucket scales that all workers use in this step."""

    scale: Float32[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Each bucket as small integers times one step.

    `x̂ᵢ = step · round(xᵢ / step)` with `step = scale(x) / levels.magnitude`, clipped to the levels.
    Scales are float32, for any input: elements of a float64 gradient beyond its range (1e-38 to
    3e38) become zero or non-finite.

    Args:
        levels: the values a code may stand for.
        scale: what a bucket is measured against.
        rounding: how an element finds its level.
        bucket_size: elements in a bucket; None for one bucket a leaf.
        shared: use the largest scale of all workers, so that codes may be added.
    """

    levels: Levels
    scale: Scale
    rounding: Rounding
    bucket_size: int | None = 512
    shared: bool = False
    linear = False

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)
        checks.part("levels", self.levels, Levels)
        checks.part("scale", self.scale, Scale)
        checks.part("rounding", self.rounding, Rounding)

    @property
    def unbiased(self) -> bool:
        """Rounding is unbiased and nothing is clipped."""
        return self.rounding.unbiased and self.levels.dithers and self.scale.covers

    @property
    def contractive(self) -> bool:
        """The error never exceeds the input: rounding to nearest, of elements that are not all
        small against the scale.
        """
        if not self.levels.dithers:  # Signs: ±s is closer than zero while s ≤ 2·mean|x|.
            return isinstance(self.scale, MeanAbs)
        return not self.rounding.unbiased and isinstance(self.scale, MaxAbs)

    @property
    def bits_per_element(self) -> float:
        """Bits an element of a full bucket, with its step."""
        if self.bucket_size is None:
            return float(self.levels.bits)
        words = bits.words(self.bucket_size, self.levels.bits)
        return 32 * (words + 1) / self.bucket_size

    def init(self, like: ArrayLike) -> tuple:
        del like
        return ()

    def agree(self, x: Array, count: Array, state: tuple, axis_name: AxisName) -> Any:
        """The largest scale of all workers, if it is shared."""
        if not self.shared:
            return state
        return AgreedScale(axes.maximum(self.scale(x, count), axis_name))

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[QuantizedPayload, Any]:
        scale = state.scale if isinstance(state, AgreedScale) else self.scale(x, count)
        step, factor = rounding_.exact_step(scale, self.levels.magnitude, x.dtype)
        dither = self.rounding.dither(key, (x.shape[0], x.shape[1]))
        codes = self.levels.codes(self._points(x, factor), dither)
        return QuantizedPayload(bits.pack(codes, bits=self.levels.bits), step), ()

    def decode(
        self, key: Key, payload: QuantizedPayload, like: ArrayLike, side: Any = None
    ) -> Array:
        del key, side
        codes = bits.unpack(payload.words, bits=self.levels.bits, size=like.shape[1])
        return (self.levels.values(codes) * payload.steps[:, None]).astype(like.dtype)

    def _points(self, x: Array, factor: Array) -> Array:
        """Where each element lies among the levels, in 2⁻²⁰ of a step."""
        points = x.astype(jnp.float32) * factor[:, None]
        if self.scale.covers:
            return points
        end = float(self.levels.magnitude << FRACTION)
        return jnp.clip(points, -end, end)  # Else an outlier would wrap around.

    def exact_variance(self, x: Array) -> Float32[Array, ""]:
        """The expected squared error of stochastic rounding, without sampling it.

        `Σ step² · f(1 − f)` over the elements, `f` the fraction of a step above the level below;
        what clipping costs is added.

        Args:
            x: an array of any shape; it is cut into buckets as `jaxcomp.encode` does.

        Raises:
            ValueError: if the rounding is not stochastic.
        """
        if not self.rounding.unbiased:
            raise ValueError(
                f"`rounding` must be stochastic for a variance, got {self.rounding!r}; measure "
                "the error of a deterministic codec with `jaxcomp.roundtrip`"
            )
        total = jnp.zeros((), jnp.float32)
        layout = trees.layout(self, x)
        for batch in layout.batches:
            rows = trees.stack(batch, jax.tree.leaves(x)).astype(jnp.float32)
            scale = self.scale(rows, trees.counts(batch))
            step, factor = rounding_.exact_step(scale, self.levels.magnitude, x.dtype)
            inside = self._points(rows, factor) * 2.0**-FRACTION
            part = inside - jnp.floor(inside)
            outside = rows * (factor * 2.0**-FRACTION)[:, None] - inside
            variance = part * (1 - part) + outside**2
            total += jnp.sum(variance * (step * step)[:, None])
        return total

"""The quantizer: scale, levels and rounding as settings of one codec."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float32, UInt32

from jaxcomp import axes, bits, checks, trees
from jaxcomp.protocols import Array, ArrayLike, AxisName, Key
from jaxcomp.quantize import rounding as rounding_, sums
from jaxcomp.quantize.levels import FRACTION, Levels
from jaxcomp.quantize.rounding import Rounding
from jaxcomp.quantize.scales import MaxAbs, MeanAbs, Scale
from jaxcomp.quantize.sums import Rows


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
        implementation: "reference", "gpu" or "tpu" to force one, or "gpu_interpret" or
            "tpu_interpret" to run a kernel in an interpreter; None for the platform's own. All
            give the same bits.
    """

    levels: Levels
    scale: Scale
    rounding: Rounding
    bucket_size: int | None = 512
    shared: bool = False
    implementation: str | None = None
    linear = False

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)
        checks.part("levels", self.levels, Levels)
        checks.part("scale", self.scale, Scale)
        checks.part("rounding", self.rounding, Rounding)
        checks.choice("implementation", self.implementation, (None, *bits.IMPLEMENTATIONS))

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
            return isinstance(self.scale, MeanAbs) and not self.shared
        return not self.rounding.unbiased and isinstance(self.scale, MaxAbs) and not self.shared

    @property
    def bits(self) -> int | float:
        """Width of a code."""
        return self.levels.bits

    @property
    def bits_per_element(self) -> float:
        """Bits an element of a full bucket, with its step."""
        if self.bucket_size is None:
            return float(self.bits)
        words = bits.words(self.bucket_size, self.bits)
        return 32 * (words + 1) / self.bucket_size

    def init(self, like: ArrayLike) -> tuple:
        del like
        return ()

    def agree(self, x: Array, count: Array, state: tuple, axis_name: AxisName) -> Any:
        """The largest scale of all workers, if it is shared."""
        if not self.shared:
            return state
        return AgreedScale(axes.maximum(self.scale(x, count[:, None])[:, 0], axis_name))

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[QuantizedPayload, Any]:
        agreed = state.scale if isinstance(state, AgreedScale) else None
        words, steps = bits.encode(
            self, x, count, key.own, key.first, agreed, implementation=self.implementation
        )
        return QuantizedPayload(words, steps), ()

    def decode(
        self, key: Key, payload: QuantizedPayload, like: ArrayLike, side: Any = None
    ) -> Array:
        del side
        return self.decode_sum(key, jax.tree.map(lambda x: x[None], payload), like)

    def decode_sum(
        self, keys: Key, payloads: QuantizedPayload, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        del keys
        words, steps = payloads
        if weights is not None:
            weights = weights.astype(jnp.float32)
            steps = rounding_.weighted_step(steps, weights, self.levels.magnitude)
        return bits.decode_sum(self, words, steps, like, implementation=self.implementation)

    def step(self, scale: Array, dtype: Any, rows: Rows) -> tuple[Array, Array]:
        """What one step is worth for each scale, and what brings elements to codes."""
        return rounding_.exact_step(scale, self.levels.magnitude, dtype, rows)

    def codes(self, x: Array, factor: Array, high: Array, low: Array, position: Array) -> Array:
        """The code of each element, with the dither of its position."""
        dither = self.rounding.dither(high, low, position)
        return self.levels.codes(self._points(x, factor), dither)

    def values(self, codes: Array) -> Array:
        """What each code is worth in steps."""
        return self.levels.values(codes)

    def _points(self, x: Array, factor: Array) -> Array:
        """Where each element lies among the levels, in 2⁻²⁰ of a step."""
        points = x.astype(jnp.float32) * factor
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
        if not (self.rounding.unbiased and self.levels.dithers):
            raise ValueError(
                f"`rounding` must be stochastic, on `levels` that take dither, for a variance, got "
                f"{self.rounding!r} and {self.levels!r}; measure the error of a deterministic "
                "codec with `jaxcomp.roundtrip`"
            )
        total = jnp.zeros((), jnp.float32)
        layout = trees.layout(self, x)
        for batch in layout.batches:
            rows = trees.stack(batch, jax.tree.leaves(x)).astype(jnp.float32)
            scale = self.scale(rows, trees.counts(batch)[:, None])
            step, factor = self.step(scale, x.dtype, sums.IN_XLA)
            inside = self._points(rows, factor) * 2.0**-FRACTION
            part = inside - jnp.floor(inside)
            outside = rows * (factor * 2.0**-FRACTION) - inside
            variance = part * (1 - part) + outside**2
            total += jnp.sum(variance * (step * step))
        return total

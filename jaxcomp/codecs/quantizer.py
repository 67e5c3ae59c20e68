"""The quantizer, a codec whose settings are a scale, levels, a rounding and steps."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import base, bits, checks
from jaxcomp.backend import axes, xla
from jaxcomp.base import Codec, Facts
from jaxcomp.codecs import compatibility
from jaxcomp.codecs.in_rows import InRows
from jaxcomp.codecs.payload import AgreedScale, QuantizedPayload
from jaxcomp.codecs.summed import Summed
from jaxcomp.numerics import addition, noise
from jaxcomp.numerics.segments import Segments
from jaxcomp.quantize import bounds, fits, rounding as rounding_, totals
from jaxcomp.quantize.levels import FRACTION, Levels, MidRise, Uniform
from jaxcomp.quantize.rounding import Rounding, Subtractive
from jaxcomp.quantize.scales import MaxAbs, MeanAbs, Scale
from jaxcomp.quantize.steps import Derived, Exact, Steps
from jaxcomp.quantize.totals import Rows
from jaxcomp.types import Array, ArrayLike, AxisName, Key, Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer(
    Codec,
    public=(
        "agreed",
        "bits",
        "codes",
        "fits",
        "fitted",
        "measure",
        "repacked",
        "step",
        "values",
        "words",
    ),
):
    """Each bucket as small integers times one step.

    `x̂ᵢ = step · round(xᵢ / step)` with `step = scale(x) / levels.magnitude`, clipped to the
    levels. Scales are float32, for any input: elements of a float64 gradient beyond its range
    (1e-38 to 3e38) become zero or non-finite.

    Args:
        levels: the values of the codes.
        scale: the scale of a bucket.
        rounding: the rule that rounds an element to a level.
        steps: the wire format of the steps.
        bucket_size: elements in a bucket; None for one bucket per leaf.
        block: elements that share a step, fewer than a bucket; None for the whole bucket.
        fit: the step that is sent after the codes are chosen: "unbiased" (if the elements that
            share the step were rotated together at random), "least_squares" or "norm"; None for the
            step that the codes were chosen with.
        shared: True to use the largest scale of all workers, so that codes can be added.
        sum_bits: the width of a sum over the workers in a reducer that adds codes (`Psum`): each of
            `n` workers clips its codes to `(2^(sum_bits − 1) − 1) // n`. None makes the sum as wide
            as needed instead.
        implementation: "reference", "gpu" or "tpu" to force one, or "gpu_interpret" or
            "tpu_interpret" to run a kernel in an interpreter; None for the platform's own. All
            give the same bits. Steps other than `Exact()`, blocks and subtractive dither have no
            kernel; fits have one on a GPU, which None uses.

    Raises:
        ValueError: for parts of the wrong kind, or parts that cannot be combined.
    """

    levels: Levels
    scale: Scale
    rounding: Rounding
    steps: Steps = Exact()
    bucket_size: int | None = 512
    block: int | None = None
    fit: str | None = None
    shared: bool = False
    sum_bits: int | None = None
    implementation: str | None = None

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)
        checks.part("levels", self.levels, Levels)
        checks.part("scale", self.scale, Scale)
        checks.part("rounding", self.rounding, Rounding)
        checks.part("steps", self.steps, Steps)
        checks.choice("fit", self.fit, fits.FITS)
        if self.block is not None:
            checks.integer("block", self.block, 1)
        checks.choice("implementation", self.implementation, (None, *bits.IMPLEMENTATIONS))
        compatibility.check(self, kernels=self._is_fused)

    @property
    def unbiased(self) -> bool:
        """Whether rounding is unbiased and no element is clipped."""
        return (
            self.rounding.unbiased
            and self.levels.dithers
            and self.scale.covers
            and self.steps.unbiased
            and self.fit is None
        )

    @property
    def contractive(self) -> bool:
        """Whether the error never exceeds the input.

        True for a least-squares fit, for signs with a mean scale, and for rounding to nearest with
        a scale and levels that never enlarge small elements.
        """
        if self.fit in ("least_squares", "norm") and not self.rounding.unbiased:
            return self.fit == "least_squares"  # The error of a projection is at most the input.
        if not self.levels.dithers:  # Signs: ±s is closer than zero while s ≤ 2·mean|x|.
            return isinstance(self.scale, MeanAbs) and not self.shared and self.fit is None
        if isinstance(self.levels, MidRise) or self.fit:
            return False  # Elements much smaller than the scale grow to its lowest level.
        return not self.rounding.unbiased and isinstance(self.scale, MaxAbs) and not self.shared

    @functools.cached_property
    def facts(self) -> Facts:
        """A step fitted "unbiased" is one for elements that were rotated together.

        Signs, and ternary levels at a mean of the largest elements, have no range beyond which
        elements are clipped.
        """
        limits = self.bits >= 2 or self.rounding.unbiased
        plain = isinstance(self.levels, Uniform) and isinstance(self.scale, MaxAbs)
        exact = plain and isinstance(self.steps, Exact) and not self.fit and not self.shared
        covers = self.scale.covers and self.steps.covers
        fitted = self.block or self.bucket_size or math.inf
        return Facts(
            bits_per_element=self._claim,
            mixed=fitted if self.fit == "unbiased" else 0,
            span=self.levels.span,
            worst=1 / self.levels.magnitude if exact else None,
            agrees=self.shared,
            clips=limits and not covers and not self.shared,
        )

    @property
    def bits(self) -> int | float:
        """Width of a code."""
        return self.levels.bits

    @property
    def _claim(self) -> float:
        """Bits an element of a full bucket, with its steps."""
        if self.bucket_size is None:
            return float(self.bits) + (self.steps.bits(1) / self.block if self.block else 0)
        words = self.words(self.bucket_size)
        return (32 * words + self.steps.bits(self._blocks(self.bucket_size))) / self.bucket_size

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The smallest known `ω` with `E‖x̂ − x‖² ≤ ω‖x‖²` for every bucket of `size` elements.

        None if the codec is biased or no bound is known. A `peak` gives another bound with the
        largest magnitude as the scale.
        """
        if not self.unbiased or self.block:
            return None
        plain = isinstance(self.scale, MaxAbs) and isinstance(self.steps, Exact)
        if peak is not None and plain and isinstance(self.levels, Uniform | MidRise):
            return peak * bounds.even(self.levels, self.rounding, size)
        return bounds.variance(self.levels, self.scale, self.rounding, self.steps, size)

    def agree(self, key: Key, x: Array, count: Array, state: tuple, axis_name: AxisName) -> Any:
        """The largest scale of all workers, if it is shared."""
        if not self.shared:
            return state
        return self.agreed(axes.maximum(self.measure(x, count[:, None])[:, 0], axis_name), x.dtype)

    def measure(self, x: Array, count: Array, rows: Rows = totals.IN_XLA) -> Array:
        """The scale of each row, `[n, 1]`."""
        return self.scale(x, count, rows)

    def agreed(self, scale: Array, dtype: Any) -> AgreedScale:
        """The state with which rows of this dtype are encoded at these scales."""
        del dtype
        return AgreedScale(scale)

    def words(self, size: int) -> int:
        """Words of so many codes."""
        return bits.words(size, self.bits)

    def repacked(self, words: Array, before: int, after: int) -> Array:
        """The words of the same codes in rows of `after` elements, and not of `before`."""
        codes = bits.unpack(words, bits=self.bits, size=before)
        return bits.pack(codes.reshape(-1, after), bits=self.bits)

    def segmented(self, segments: Segments) -> InRows | None:
        """None with blocks, fits or rounded steps, which are about a leaf alone."""
        if not self._is_fused or self.bucket_size is not None:
            return None
        rows = dataclasses.replace(self, bucket_size=segments.width)
        return InRows(codec=rows, segments=segments)

    def summable(self, workers: int) -> Summed:
        """The codec with the same integers in fields wide enough for the sum over `workers`.

        Raises:
            ValueError: if the step differs between workers, or the sum has too many bits.
        """
        if not self.shared:
            raise base.not_summable(self, "it needs one scale for all workers: use shared=True")
        if isinstance(self.rounding, Subtractive) or not isinstance(self.steps, Exact):
            raise base.not_summable(self, "it needs steps=Exact() and no subtractive dither")
        limit = self.levels.magnitude
        if self.sum_bits is not None:
            most = 2 ** (self.sum_bits - 1) - 1
            if workers > most:
                raise ValueError(
                    f"`workers` must be at most {most} for sums of sum_bits={self.sum_bits}, got "
                    f"{workers}; use more bits, or sum_bits=None for a wider sum"
                )
            limit = min(limit, most // workers)
        return Summed(
            levels=self.levels,
            scale=self.scale,
            rounding=self.rounding,
            limit=limit,
            workers=workers,
            bucket_size=self.bucket_size,
        )

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[QuantizedPayload, Any]:
        agreed = state.scale if isinstance(state, AgreedScale) else None
        seed = key.shared if self.rounding.shared else key.own
        given = x, count, seed, key.first
        if self._is_fused:
            words, steps = bits.encode(self, *given, agreed, implementation=self.implementation)
            return QuantizedPayload(words, (steps,)), ()
        if self.fit and self.block is None and self.implementation is None and x.size:
            return QuantizedPayload(*bits.encode_fitted(self, self._encode, *given)), ()
        return self._encode(*given, agreed), ()

    def clipped(self, key: Key, x: Array, count: Array) -> Array:
        seed = key.shared if self.rounding.shared else key.own
        blocks, derived, *_ = self._derive(seed, key.first, x, count, None)
        points = jnp.abs(rounding_.points(blocks, derived.factor[..., None]))
        beyond = (points > float(self.levels.magnitude << FRACTION)) & self.facts.clips
        return jnp.stack([jnp.sum(beyond, axis=(1, 2), dtype=jnp.int32), count], axis=1)

    def _encode(
        self, x: Array, count: Array, seed: Array, first: Array, agreed: Array | None = None
    ) -> QuantizedPayload:
        """`encode` for settings without a kernel."""
        n, size = x.shape
        blocks, derived, high, low = self._derive(seed, first, x, count, agreed)
        position = jnp.arange(blocks.shape[1] * blocks.shape[2], dtype=jnp.uint32)
        position = position.reshape(1, *blocks.shape[1:])
        factor, high, low = (part[..., None] for part in (derived.factor, high, low))
        codes = self.codes(blocks, factor, high, low, position).reshape(n, -1)[:, :size]
        sent = derived.sent
        if self.fit:  # Otherwise both uses recompute the codes, comparing with every level.
            kept = xla.compile_separately(lambda codes: codes.astype(jnp.uint8))
            codes = kept(codes).astype(jnp.uint32)
            values = self._in_blocks(self.levels.values(codes)).reshape(-1, blocks.shape[2])
            rows = blocks.reshape(values.shape)
            step = fits.fit_step(
                self.fit, self.levels, values, rows, self._counts(x, count), x.dtype
            )
            sent = (step.reshape(n if self.block is None else blocks.shape[:2]),)
        return QuantizedPayload(bits.pack(codes, bits=self.bits), sent)

    def _counts(self, x: Array, count: Array) -> Array:
        """The real elements of each block, `[n · blocks, 1]`."""
        block = self._block(x.shape[1])
        begin = jnp.arange(self._blocks(x.shape[1]), dtype=count.dtype)[None] * block
        return jnp.clip(count[:, None] - begin, 0, block).reshape(-1, 1)

    def _derive(
        self, seed: Array, first: Array, x: Array, count: Array, agreed: Array | None
    ) -> tuple[Array, Derived, Array, Array]:
        """The elements as `[n, blocks, block]`, their steps, and the seeds of the noise."""
        blocks = self._in_blocks(x)
        n, number, block = blocks.shape
        high, low = (part[:, None] for part in noise.seeds(seed, first, n))
        scale = self.scale(blocks.reshape(-1, block), self._counts(x, count)).reshape(n, number)
        scale = scale if agreed is None else agreed[:, None]

        def derive(scale: Array, high: Array, low: Array) -> Derived:
            return self.steps.derive(scale, self.levels, blocks.dtype, high, low)

        # Compute it once a block: fused with the rounding, it would be computed for each element.
        derived = xla.compile_separately(derive)(scale, high, low)
        if self.block is None:  # One a bucket.
            derived = derived._replace(sent=tuple(part.reshape(n) for part in derived.sent))
        return blocks, derived, high, low

    def decode(
        self, key: Key, payload: QuantizedPayload, like: ArrayLike, side: Any = None
    ) -> Array:
        del side
        keys = key._replace(own=key.own[None])
        return self.decode_sum(keys, jax.tree.map(lambda x: x[None], payload), like)

    def decode_sum(
        self,
        keys: Key,
        payloads: QuantizedPayload,
        like: ArrayLike,
        weights: Weights = None,
        side: Any = None,
    ) -> Array:
        del side
        sent = payloads.steps
        if self.block is None:
            sent = tuple(part[..., None] for part in sent)
        steps = self.steps.received(sent)
        if isinstance(self.rounding, Subtractive):  # Up to half a spacing beyond the last level.
            reach = self.levels.magnitude + self._spacing / 2
            steps = jnp.minimum(steps, rounding_.largest_step(reach, like.dtype))
        if weights is not None:
            precision = self._precision
            steps = rounding_.weighted_step(steps, weights.astype(jnp.float32), precision)
        if self.block is None and not isinstance(self.rounding, Subtractive):
            return bits.decode_sum(
                self, payloads.words, steps[..., 0], like, implementation=self.implementation
            )
        return self._decode_sum(keys, payloads.words, steps, like)

    def _decode_sum(self, keys: Key, packed: Array, steps: Array, like: ArrayLike) -> Array:
        """`decode_sum` for settings without a kernel."""
        n, size = like.shape

        def term(index):
            values = self.levels.values(bits.unpack(packed[index], bits=self.bits, size=size))
            if isinstance(self.rounding, Subtractive):
                seed = keys.shared if self.rounding.shared else keys.own[index]
                offset = self.rounding.offset(*noise.rows(seed, keys.first, like.shape))
                values = values + self._spacing * offset
            values = self._in_blocks(values) * steps[index][..., None]
            return values.reshape(n, -1)[:, :size].astype(addition.wide(like.dtype))

        return addition.in_order(term, packed.shape[0]).astype(like.dtype)

    def step(self, scale: Array, dtype: Any, rows: Rows) -> tuple[Array, Array]:
        """The step size for each scale, and the factor that brings elements to codes."""
        return rounding_.exact_step(
            scale, self.levels.magnitude, dtype, rows, precision=self._precision
        )

    def codes(self, x: Array, factor: Array, high: Array, low: Array, position: Array) -> Array:
        """The code of each element, with the dither of its position."""
        dither = self.rounding.dither(high, low, position)
        return self.levels.codes(self._points(x, factor), dither)

    def fitted(self, x: Array, codes: Array, count: Array, rows: Rows) -> Array:
        """The step that fits the codes of each row."""
        return fits.fit_step(self.fit, self.levels, self.values(codes), x, count, x.dtype, rows)

    def values(self, codes: Array) -> Array:
        """The value of each code in steps."""
        return self.levels.values(codes)

    def _points(self, x: Array, factor: Array) -> Array:
        """The position of each element among the levels, in units of 2⁻²⁰ of a step."""
        points = rounding_.points(x, factor)
        if self.scale.covers and self.steps.covers:
            return points
        end = float(self.levels.magnitude << FRACTION)
        # Otherwise an outlier would wrap around. Not `jnp.clip`: on a GPU, a kernel's drops NaN.
        points = jnp.where(points > end, end, points)
        return jnp.where(points < -end, -end, points)

    @property
    def _is_fused(self) -> bool:
        """Whether one kernel, or its reference, does the whole encoding."""
        return self.block is None and self.fit is None and isinstance(self.steps, Exact)

    @property
    def _precision(self) -> int:
        """The significant bits that a product with a step needs beyond those of the step."""
        if isinstance(self.rounding, Subtractive):
            return self.levels.magnitude.bit_length() + rounding_.SUBTRACTED + 1
        return self.levels.precision

    def _block(self, size: int) -> int:
        """Elements that share a step in a bucket of this size."""
        return min(self.block or size, size)

    @property
    def _spacing(self) -> float:
        """The distance between even levels, in steps."""
        return 2.0 if isinstance(self.levels, MidRise) else 1.0

    def _blocks(self, size: int) -> int:
        return -(-size // self._block(size))

    def _in_blocks(self, x: Array) -> Array:
        """`[n, size]` as `[n, blocks, block]`, zero-padded."""
        n, size = x.shape
        number, block = self._blocks(size), self._block(size)
        missing = number * block - size
        x = jnp.pad(x, ((0, 0), (0, missing))) if missing else x
        return x.reshape(n, number, block)

"""A quantizer whose levels adapt to the gradients; the levels are state shared by all workers."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float32, Int32

from jaxcomp import bits, checks
from jaxcomp.backend import axes, conditional, xla
from jaxcomp.base import Codec, Facts, Hints
from jaxcomp.codecs.payload import QuantizedPayload
from jaxcomp.numerics import addition, counting, noise
from jaxcomp.quantize import adaptive, rounding, totals
from jaxcomp.quantize.scales import L2, Scale
from jaxcomp.types import Array, ArrayLike, AxisName, Key, Weights

_PRECISION = 14
"""Bits of a level: 2⁻¹⁴ of the scale is fine enough for buckets of 8,192."""

_FRACTION = 15
"""Fractional bits of a level in the comparison with magnitudes; bits of the dither."""


class AdaptiveState(NamedTuple):
    """The levels, and the histogram since the last update of the levels.

    Attributes:
        levels: `int32[positive + 1]`, the levels in units of 2⁻¹⁴ of the scale, from zero; the same
            on every worker.
        histogram: this worker's histogram of magnitudes since the last update.
        top: a power of two that is at least every norm in the histogram; its square has weight one.
        step: the number of calls of the codec.
    """

    levels: Int32[Array, " levels"]
    histogram: adaptive.Histogram
    top: Float32[Array, ""]
    step: Int32[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveQuantizer(Codec):
    """Unbiased rounding to levels that are updated from time to time to fit the gradients.

    Between two updates each worker keeps a histogram of its magnitudes `|x| / scale`. At an update
    the histograms are summed (an all-reduce of four kilobytes), and the levels become those of
    least variance for the sum. Each step all-reduces the levels themselves, four bytes each. Until
    the first update they are the levels for a Gaussian bucket. Without a mesh (`jaxcomp.encode`)
    there is no agreement, and the levels do not change.

    Args:
        width: the bits of a code, 2 to 8: a sign and `2^(width − 1) − 1` levels above zero.
        rule: "alq" moves each level separately, "amq" has levels `p, p², …` and moves `p`.
        every: the number of steps between updates; the first update comes after one step.
        pooled: True to weight all buckets equally, False to weight them by their squared norm.
        scale: the scale of a bucket.
        bucket_size: elements in a bucket; None for one bucket per leaf.

    Raises:
        ValueError: for a width, rule or schedule out of range.
    """

    width: int = 4
    rule: str = "alq"
    every: int = 100
    pooled: bool = False
    scale: Scale = L2()
    bucket_size: int | None = 512
    unbiased = True
    hints = Hints(alone=1 / 2)

    def __post_init__(self):
        checks.integer("width", self.width, 2, 8)
        checks.choice("rule", self.rule, ("alq", "amq"))
        checks.integer("every", self.every, 1)
        checks.part("scale", self.scale, Scale)
        checks.bucket_size(self.bucket_size)
        if not self.scale.covers:
            raise ValueError(f"`scale` must cover every element, as L2() does, got {self.scale!r}")

    @functools.cached_property
    def facts(self) -> Facts:
        claim = float(self.width)
        if self.bucket_size is not None:
            claim = 32 * (bits.words(self.bucket_size, self.width) + 1) / self.bucket_size
        return Facts(bits_per_element=claim, agrees=True, sided=True)

    def init(self, like: ArrayLike) -> AdaptiveState:
        weight, moment, top = map(jnp.asarray, _EMPTY)
        return AdaptiveState(
            levels=jnp.asarray(_start(self.rule, self.width, max(like.shape[1], 1)), jnp.int32),
            histogram=adaptive.Histogram(weight, moment),
            top=top,
            step=jnp.zeros((), jnp.int32),
        )

    def agree(
        self, key: Key, x: Array, count: Array, state: AdaptiveState, axis_name: AxisName
    ) -> AdaptiveState:
        """Sums the histograms over workers and updates the levels if an update is due."""
        del key
        scale = self.scale(x, count[:, None])
        usable = totals.is_finite(scale) & (scale >= jnp.finfo(jnp.float32).tiny)
        magnitude = jnp.abs(totals.unit(x, jnp.where(usable, scale, 0)))
        largest = jnp.max(jnp.where(usable, scale, 0), initial=0)
        top = jnp.maximum(state.top, _power_of_two(largest))
        share = jnp.where(usable, scale / jnp.where(top > 0, top, 1), 0)[:, 0]
        weight = None if self.pooled else share * share
        seen = adaptive.histogram(jnp.where(usable, magnitude, 0), weight)
        total = jax.tree.map(jnp.add, self._reweight(state.histogram, state.top, top), seen)
        # Each worker has a count of its own, and all are equal.
        due = conditional.name_agreed(state.step % self.every == min(1, self.every - 1))

        def update():
            largest = axes.maximum(top, axis_name)
            mine = jnp.stack(self._reweight(total, top, largest))
            everyone = adaptive.Histogram(*lax.psum(mine, axis_name))
            # Type replicated values as varying, as in the other branch.
            fitted = axes.vary((_fit(self.rule, self.width, everyone), *_EMPTY), axis_name)
            return tuple(axes.match_vma(jnp.asarray(x), magnitude)[0] for x in fitted)

        def keep():
            kept = axes.vary((state.levels, *total, top), axis_name)
            return tuple(axes.match_vma(jnp.asarray(x), magnitude)[0] for x in kept)

        levels, weight, moment, top = lax.cond(due, update, keep)
        # Equal on all workers already; this makes the type say so, which a decoder needs.
        levels = axes.maximum(levels.astype(jnp.float32), axis_name).astype(jnp.int32)
        step = counting.after(state.step, self.every)
        return AdaptiveState(levels, adaptive.Histogram(weight, moment), top, step)

    def _reweight(
        self, histogram: adaptive.Histogram, old: Array, new: Array
    ) -> adaptive.Histogram:
        """Rescales the histogram's weights to units of another norm's square."""
        share = jnp.where(new > 0, old / jnp.where(new > 0, new, 1), 0)
        factor = jnp.ones_like(share) if self.pooled else share * share
        return jax.tree.map(lambda part: part * factor, histogram)

    def side(self, agreed: AdaptiveState) -> Int32[Array, " levels"]:
        """The levels, which all decoders share."""
        return agreed.levels

    def encode(
        self, key: Key, x: Array, count: Array, state: AdaptiveState
    ) -> tuple[QuantizedPayload, AdaptiveState]:
        scale = self.scale(x, count[:, None])
        step, factor = rounding.exact_step(scale, 1 << _PRECISION, x.dtype, precision=_PRECISION)
        dither = noise.below(_FRACTION, *noise.rows(key.own, key.first, x.shape))
        # Points are in 2⁻²⁰ of a step, which needs five bits more than the integer has.
        spare = jnp.float32(2.0 ** (_FRACTION - rounding.FRACTION))
        size_ = rounding.points(jnp.abs(x), factor * spare).astype(jnp.int32)
        number = jnp.zeros(x.shape, jnp.int32)
        for place in range(2 ** (self.width - 1) - 1):
            # A random threshold between two levels gives each its right probability.
            lower, upper = state.levels[place], state.levels[place + 1]
            threshold = (upper << _FRACTION) - (upper - lower) * dither
            number = number + (size_ >= threshold).astype(jnp.int32)
        negative = (x < 0).astype(jnp.int32) << (self.width - 1)
        codes = (negative | number).astype(jnp.uint32)
        return QuantizedPayload(bits.pack(codes, bits=self.width), (step[:, 0],)), state

    def decode(
        self, key: Key, payload: QuantizedPayload, like: ArrayLike, side: Any = None
    ) -> Array:
        keys = key._replace(own=key.own[None])
        return self.decode_sum(keys, jax.tree.map(lambda x: x[None], payload), like, side=side)

    def decode_sum(
        self,
        keys: Key,
        payloads: QuantizedPayload,
        like: ArrayLike,
        weights: Weights = None,
        side: Any = None,
    ) -> Array:
        del keys
        (steps,) = payloads.steps
        if weights is not None:
            steps = rounding.weighted_step(steps, weights.astype(jnp.float32), _PRECISION)
        levels = self.init(like).levels if side is None else side

        def term(index):
            codes = bits.unpack(payloads.words[index], bits=self.width, size=like.shape[1])
            number = (codes & (2 ** (self.width - 1) - 1)).astype(jnp.int32)
            value = jnp.zeros(codes.shape, jnp.int32)
            for place in range(1, levels.shape[0]):
                value = jnp.where(number == place, levels[place], value)
            negative = (codes >> (self.width - 1)) & 1
            values = jnp.where(negative == 1, -value, value).astype(jnp.float32)
            return (values * steps[index][:, None]).astype(addition.wide(like.dtype))

        return addition.in_order(term, payloads.words.shape[0]).astype(like.dtype)


_EMPTY = tuple(np.zeros(shape, np.float32) for shape in (adaptive.BINS, adaptive.BINS, ()))
"""The weights, moments and largest norm of an empty histogram."""


def _power_of_two(x: Float32[Array, ""]) -> Float32[Array, ""]:
    """The next power of two, 2¹²⁷ at most; a change of units by it does not round."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    above = jnp.minimum((bits + (2**23 - 1)) >> 23, 254) << 23
    return lax.bitcast_convert_type(above, jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fit(rule: str, width: int, histogram: adaptive.Histogram) -> Int32[Array, " levels"]:
    find = {"alq": adaptive.alq, "amq": adaptive.amq}[rule]
    levels = find(histogram, 2 ** (width - 1) - 2)
    return jnp.round(levels * jnp.float32(2**_PRECISION)).astype(jnp.int32)


@functools.lru_cache
def _start(rule: str, width: int, size: int) -> tuple[int, ...]:
    """The levels for a Gaussian bucket, as constants."""
    start = xla.evaluate(lambda: _fit(rule, width, adaptive.half_normal(size)))
    return tuple(np.asarray(start).tolist())

"""The modulo quantizer: codes modulo an alphabet, which a decoder completes with what it knows."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float32, Int32, UInt32

from jaxcomp import bits as bits_, checks
from jaxcomp.backend import xla
from jaxcomp.base import Codec, Facts
from jaxcomp.codecs import inner
from jaxcomp.numerics import addition, exact, noise
from jaxcomp.quantize import totals
from jaxcomp.quantize.levels import FRACTION, TRIT
from jaxcomp.types import Array, ArrayLike, Key

_ONE = 1 << FRACTION
_MARGIN = 2.0**-5
"""Allowance in steps for rounding errors of floats; elements are at most `_FINEST` steps."""
_FINEST = 2.0**16
_TINY = 2.0**-120
"""Smallest radius that is sent: the reciprocal of a smaller one would not be a normal number."""


class ModuloPayload(NamedTuple):
    """The codes, and the radius of each bucket: negative if they are relative to the guess."""

    words: UInt32[Array, "n words"]
    radius: Float32[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modulo(Codec, public=("bits",)):
    """Sends the integers of a fine grid modulo `levels`; a guess tells the decoder which ones.

    With the guess `y`, the radius `Δ ≥ max|x − y|` of a bucket and steps `ε`, the encoder sends
    `z mod k` of `z = ⌊x/ε + u⌋`, with uniform dither `u`. With shared dither, `ε = 2Δ/(k − 1)`, and
    the decoder takes the `ẑ` with this remainder that is nearest to `y/ε + u − ½` and returns
    `ε(ẑ − u + ½)`: the error is uniform, of variance `ε²/12`. With private rounding,
    `ε = 2Δ/(k − 2)`, `ẑ` is nearest to `y/ε`, and `εẑ` has variance at most `ε²/4`, `ε²/6` on
    average. So the error depends on how good the guess is, and not on how large `x` is.

    A bucket for which the guess does not help is encoded with the guess zero, by a radius of
    `max|x|`: a plain quantizer in the same payload. Then its radius is positive; else the sign says
    that the decoder needs the guess. That happens if the guess is not nearer to `x` than zero is,
    if a fixed `distance` is exceeded, or if something is not finite.

    The state is the guess, `[1, buckets, size]` or more, of which the first is used, as
    `jaxcomp.federated.Uplink` gives it from a `Side`; without one, the guess is zero.

    Args:
        levels: `k`, the size of the alphabet: 2 to 256, or 3 to 256 for private rounding.
        private: False for subtractive dither, which encoder and decoder draw from the same key;
            True for rounding with dither that the decoder does not need.
        distance: `Δ`, if the encoder does not measure it; None for the smallest that holds.
        relative: whether `distance` is in units of the bucket's largest element.
        blind: whether the encoder does not know the guess, so that it cannot check `distance`. An
            element that is further off decodes to a wrong value, off by multiples of `kε`.
        bucket_size: elements that share a radius; None for one per leaf.

    Raises:
        ValueError: for another number of levels, a distance that is not positive, or `blind` or
            `relative` without a distance.

    Example:
        >>> import jax, jaxcomp
        >>> codec, x = Modulo(levels=4), jnp.linspace(5.0, 6.0, 64)
        >>> error = lambda y: jnp.abs(y - x).max()
        >>> alone = jaxcomp.roundtrip(codec, 0, x)
        >>> from jaxcomp.layout import batches
        >>> key, guess = batches.batch_key(jnp.zeros(2, jnp.uint32), 0, 0), x[None, None] + 0.05
        >>> payload, _ = codec.encode(key, x[None], jnp.array([64]), guess)
        >>> guided = codec.decode(key, payload, x[None], guess)
        >>> bool(error(alone) > 1), bool(error(guided) < 0.02)
        (True, True)

    References:
        Mayekar, Suresh and Tyagi, `Wyner–Ziv estimators: efficient distributed mean estimation with
        side information <https://arxiv.org/abs/2011.12160>`_, 2021; Liang et al., Wyner–Ziv
        gradient compression for federated learning, 2021.

    Note:
        The papers' steps are `2Δ/(k − 2)` for both ways of rounding; with shared dither the decoder
        knows `z` better, which allows fewer. Steps are wider by a few percent at small alphabets,
        for rounding errors of floats, and at least `max|x|/2¹⁶`. The papers rotate first, as
        `jaxcomp.wyner_ziv(rotated=True)` does.
    """

    levels: int
    private: bool = False
    distance: float | None = None
    relative: bool = False
    blind: bool = False
    bucket_size: int | None = 512
    unbiased = True

    def __post_init__(self):
        checks.integer("levels", self.levels, 3 if self.private else 2, 256)
        checks.bucket_size(self.bucket_size)
        for name in ("private", "relative", "blind"):
            checks.choice(name, getattr(self, name), (False, True))
        if self.distance is not None:
            checks.positive("distance", self.distance)
        elif self.relative or self.blind:
            raise ValueError(
                "`distance` must be a positive number with relative=True or blind=True, got None"
            )

    @property
    def bits(self) -> int | float:
        """Width of a code."""
        return TRIT if self.levels == 3 else (self.levels - 1).bit_length()

    @functools.cached_property
    def facts(self) -> Facts:
        """A distance that is measured or relative scales with the input."""
        claim = float(self.bits)
        if self.bucket_size is not None:
            claim = 32 * (bits_.words(self.bucket_size, self.bits) + 1) / self.bucket_size
        scales = self.distance is None or self.relative
        return Facts(bits_per_element=claim, homogeneous=scales, sided=True, guided=True)

    def variance_bound(self, size: int, peak: float | None = None) -> float:
        """`d/12` or `d/4` squared steps of a bucket whose guess is zero; with a guess it is less.

        For a blind encoder, that of a guess within the distance.
        """
        bound = size / (4 if self.private else 12) / self._steps**2
        return bound if peak is None else peak * bound

    @property
    def _steps(self) -> float:
        """The steps in a radius."""
        return (self.levels - (2 if self.private else 1)) / 2 - _MARGIN

    def side(self, agreed: Any) -> Any:
        """The guess, if there is one."""
        return agreed if inner.has_guesses(agreed) else None

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[ModuloPayload, Any]:
        del count
        wide = x.astype(jnp.float32)
        top = totals.max_abs(wide)
        off = (
            totals.max_abs(wide - state[0].astype(jnp.float32)) if inner.has_guesses(state) else top
        )
        reach = off
        if self.distance is not None:
            reach = jnp.float32(self.distance) * (top if self.relative else jnp.ones_like(top))
        # Comparisons with NaN are false.
        helps = (reach < top) & ((off <= reach) | self.blind) & totals.is_finite(top)
        least = top * jnp.float32(self._steps / _FINEST)
        radius = jnp.where(helps, jnp.maximum(reach, least), top)
        whole, part = self._position(wide, _deriver(self._steps)(radius))
        dither = noise.below(FRACTION, *noise.rows(key.own, key.first, x.shape))
        number = whole + ((part + dither) >> FRACTION)
        codes = jnp.remainder(number, self.levels).astype(jnp.uint32)
        words = bits_.pack(codes, bits=self.bits)
        radius = jnp.where(totals.is_finite(top), jnp.where(helps, -radius, radius), jnp.nan)
        return ModuloPayload(words, radius[:, 0]), state

    def decode(self, key: Key, payload: ModuloPayload, like: ArrayLike, side: Any = None) -> Array:
        sent = payload.radius[:, None]
        codes = bits_.unpack(payload.words, bits=self.bits, size=like.shape[1]).astype(jnp.int32)
        guess = jnp.zeros(like.shape, jnp.float32)
        guess = side[0].astype(jnp.float32) if inner.has_guesses(side) else guess
        units = _deriver(self._steps)(jnp.abs(sent))
        whole, part = self._position(jnp.where(sent < 0, guess, 0), units)
        dither = noise.below(FRACTION, *noise.rows(key.own, key.first, like.shape))
        near = part if self.private else part + dither - _ONE // 2
        # Both are within a few periods of `whole`, so the difference fits fixed point.
        above = jnp.remainder(codes - whole, self.levels)
        far = (above << FRACTION) - near
        period = self.levels << FRACTION
        turns = (2 * far >= period).astype(jnp.int32) - (2 * far < -period).astype(jnp.int32)
        found = (whole + above - turns * self.levels).astype(jnp.float32)
        if not self.private:
            found = found + (_ONE - 1 - 2 * dither).astype(jnp.float32) * jnp.float32(0.5 / _ONE)
        values = (found * units.step) * units.up
        largest = addition.limit(like.dtype)
        values = jnp.where(jnp.abs(values) > largest, jnp.sign(values) * largest, values)
        return jnp.where(totals.is_finite(sent), values, jnp.nan).astype(like.dtype)

    def _position(
        self, x: Float32[Array, "n size"], units: "_Units"
    ) -> tuple[Int32[Array, "n size"], Int32[Array, "n size"]]:
        """Each element in steps: the whole steps, rounded down, and the rest in units of 2⁻²⁰."""
        # Not a product that could be fused with the difference below, which would round otherwise.
        steps = xla.block_fma((x * units.down) * units.factor)
        # A guess that is further off than any element gives a wrong value either way.
        steps = jnp.clip(jnp.where(jnp.isnan(steps), 0, steps), -4 * _FINEST, 4 * _FINEST)
        whole = jnp.floor(steps)
        part = ((steps - whole) * jnp.float32(_ONE)).astype(jnp.int32)
        return whole.astype(jnp.int32), part


class _Units(NamedTuple):
    """Factors of a bucket, all `float32[n, 1]`.

    Attributes:
        down: a power of two, applied first so that no product overflows.
        factor: the factor from elements to steps, after `down`.
        step: the step, times `down`.
        up: the inverse of `down`.
    """

    down: Array
    factor: Array
    step: Array
    up: Array


@functools.lru_cache(maxsize=256)
def _deriver(steps: float) -> Callable[[Array], _Units]:
    """The factors of buckets of these radii, each of so many steps."""

    def derive(radius: Array) -> _Units:
        usable = totals.is_finite(radius) & (radius >= _TINY)
        down = jnp.where(radius > 1, jnp.float32(2.0**-4), jnp.float32(1))
        scaled = jnp.where(usable, radius * down, 1)
        factor = jnp.where(usable, exact.reciprocal(scaled) * jnp.float32(steps), 0)
        step = jnp.where(usable, scaled * jnp.float32(1 / steps), 0)
        return _Units(*lax.optimization_barrier((down, factor, step, 1 / down)))

    # In a program of its own, or products with constants would be taken in another order.
    return xla.compile_separately(derive)

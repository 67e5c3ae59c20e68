"""The codec of predictive coding: for each bucket the best of several guesses and quantizers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Float32, Int32, UInt8, UInt32

from jaxcomp import checks
from jaxcomp.backend import xla
from jaxcomp.base import Codec, Facts
from jaxcomp.codecs import inner
from jaxcomp.codecs.payload import AgreedScale, QuantizedPayload
from jaxcomp.codecs.quantizer import Quantizer
from jaxcomp.numerics import addition, exact
from jaxcomp.quantize import bounds, totals
from jaxcomp.quantize.levels import TRIT, Uniform
from jaxcomp.quantize.rounding import Stochastic
from jaxcomp.quantize.scales import L2, Scale, WideMax
from jaxcomp.quantize.steps import Exact
from jaxcomp.types import Array, ArrayLike, Key

_MODES = 256


class BestOfPayload(NamedTuple):
    """Ternary codes and the step of each bucket, and its mode: guess times scales, plus scale."""

    words: UInt32[Array, "n words"]
    step: Float32[Array, " n"]
    mode: UInt8[Array, " n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BestOf(Codec, public=("bits", "costs")):
    """The residual of the best of several guesses, by the best of several ternary quantizers.

    For each bucket and each guess `g` and scale `s`, `r = x − g` becomes `s · sign(r)` with
    probability `|r|/s`, else 0. The encoder takes the pair of the smallest cost

        √(mean of E(r̂ − r)²) + rate · H,

    where `H` is the entropy, in bits, of the expected frequencies of the three values. The payload
    has fixed width; `to_bytes` codes the values by their entropy.

    The state is the guesses, `[alternatives, buckets, size]`, as `jaxcomp.federated.Uplink` gives
    them from a `Side`; without them there is one guess, zero.

    Args:
        scales: the scales of the quantizers, which are never below the largest element.
        rate: `λ`, the error that a bit per element is worth, in the units of the input.
        bucket_size: elements that share a guess, a scale and a mode; None for one bucket per leaf.

    Raises:
        ValueError: for no scale, one that elements may exceed, or a rate that is negative; on use,
            for more than 256 modes.

    Example:
        >>> import jaxcomp
        >>> up = jaxcomp.federated.Uplink(BestOf(), jaxcomp.federated.Predictors())

    References:
        Yue, Jin, Wong and Dai, `Communication-efficient federated learning via predictive coding
        <https://arxiv.org/abs/2108.00918>`_, 2022.

    Note:
        The paper draws the quantized residual for every quantizer and compares errors and entropies
        of the draws, which depends on the noise, and so is biased. Expectations depend on `x` and
        the guesses alone, so this codec is unbiased, and no alternative has to be quantized. In the
        authors' code the guess of the smallest residual is chosen before the quantizer; here both
        are chosen together, as in the paper.
    """

    scales: tuple[Scale, ...] = (WideMax(90), L2())
    rate: float = 0.1
    bucket_size: int | None = None
    unbiased = True
    facts = Facts(homogeneous=False, sided=True, guided=True)

    def __post_init__(self):
        checks.bucket_size(self.bucket_size)
        checks.number("rate", self.rate, 0.0)
        if not isinstance(self.scales, tuple) or not self.scales:
            raise ValueError(
                "`scales` must be a tuple of scales, such as (jaxcomp.codecs.L2(),), got "
                f"{self.scales!r}"
            )
        for scale in self.scales:
            checks.part("scales", scale, Scale)
            if not scale.covers:
                raise ValueError(
                    "`scales` must have scales that no element exceeds, such as L2() and MaxAbs(), "
                    f"got {scale!r}"
                )

    @property
    def bits(self) -> float:
        """Width of a code."""
        return TRIT

    @property
    def _quantizer(self) -> Quantizer:
        return Quantizer(
            levels=Uniform(1),
            scale=self.scales[0],
            rounding=Stochastic(),
            bucket_size=self.bucket_size,
        )

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The largest bound of the quantizers, which holds for a guess of zero."""
        del peak
        found = []
        for scale in self.scales:
            if isinstance(scale, WideMax):  # E(r̂ − r)² ≤ s·Σ|r| with s = times · max|r|.
                found.append(scale.times * size**0.5)
            else:
                found.append(bounds.variance(Uniform(1), scale, Stochastic(), Exact(), size))
        return None if None in found else max(found)

    def side(self, agreed: Any) -> Any:
        """The guesses, if there are some."""
        return agreed if inner.has_guesses(agreed) else None

    def encode(self, key: Key, x: Array, count: Array, state: Any) -> tuple[BestOfPayload, Any]:
        rest = self._residuals(x, state)
        alternatives, n, _ = rest.shape
        number = len(self.scales)
        if alternatives * number > _MODES:
            raise ValueError(
                f"`scales` times guesses must be at most {_MODES}, got {number} scales and "
                f"{alternatives} guesses"
            )
        cost = self._costs(rest, count)
        mode = jnp.argmin(cost.reshape(alternatives * number, n), axis=0).astype(jnp.int32)
        guess = (mode // number)[None, :, None]
        chosen = jnp.take_along_axis(rest, guess, axis=0)[0]
        sizes = [scale(chosen, count[:, None])[:, 0] for scale in self.scales]
        scale = jnp.take_along_axis(jnp.stack(sizes), (mode % number)[None], axis=0)[0]
        sent, _ = self._quantizer.encode(key, chosen, count, AgreedScale(scale))
        return BestOfPayload(sent.words, sent.steps[0], mode.astype(jnp.uint8)), state

    def decode(self, key: Key, payload: BestOfPayload, like: ArrayLike, side: Any = None) -> Array:
        wide = addition.accumulator(like)
        sent = QuantizedPayload(payload.words, (payload.step,))
        values = self._quantizer.decode(key, sent, wide)
        if inner.has_guesses(side):
            guess = (payload.mode.astype(jnp.int32) // len(self.scales))[None, :, None]
            guess = jnp.minimum(guess, side.shape[0] - 1)  # A message may say anything.
            values = values + jnp.take_along_axis(side, guess, axis=0)[0].astype(wide.dtype)
        return addition.saturate(values, like.dtype)

    def costs(self, x: Array, count: Array, state: Any) -> Float32[Array, "alternatives scales n"]:
        """The cost of every guess and scale, of which the encoder takes the smallest."""
        return self._costs(self._residuals(x, state), count)

    def _residuals(self, x: Array, state: Any) -> Float32[Array, "alternatives n size"]:
        wide = x.astype(jnp.float32)
        return wide[None] - state.astype(jnp.float32) if inner.has_guesses(state) else wide[None]

    def _costs(self, rest: Array, count: Array) -> Array:
        """`[alternatives, scales, n]`; infinite where a guess is not finite."""
        alternatives, n, size = rest.shape
        rows, counts = rest.reshape(-1, size), jnp.tile(count, alternatives)[:, None]
        top = totals.max_abs(rows)
        part = totals.unit(rows, top)
        above, below = (totals.total(jnp.maximum(terms, 0)) for terms in (part, -part))
        energy = totals.total(part * part)
        # In units of the largest element, so that nothing overflows.
        sizes = jnp.stack([scale(part, counts) for scale in self.scales])
        cost = _make_price(self.rate)(top, above, below, energy, sizes, counts)[..., 0]
        return jnp.swapaxes(cost.reshape(-1, alternatives, n), 0, 1)


@functools.lru_cache(maxsize=64)
def _make_price(rate: float) -> Callable[..., Array]:
    """`√(error) + rate · entropy` from the sums of a bucket."""

    def price(
        top: Float32[Array, "n 1"],
        above: Float32[Array, "n 1"],
        below: Float32[Array, "n 1"],
        energy: Float32[Array, "n 1"],
        sizes: Float32[Array, "scales n 1"],
        count: Int32[Array, "n 1"],
    ) -> Array:
        top, above, below, energy, count = (x[None] for x in (top, above, below, energy, count))
        share = exact.reciprocal(jnp.maximum(count, 1).astype(jnp.float32))
        expected = xla.block_fma((above + below) * sizes) - energy
        error = top * exact.sqrt(jnp.maximum(expected, 0) * share)
        inverse = share * exact.reciprocal(jnp.maximum(sizes, 1))
        up, down = (xla.block_fma(each * inverse) for each in (above, below))
        none = jnp.maximum(1 - up - down, 0)
        entropy = jnp.zeros_like(up)
        for p in (up, down, none):
            entropy = entropy + xla.block_fma(-p * jnp.log2(jnp.where(p > 0, p, 1)))
        cost = error + xla.block_fma(jnp.float32(rate) * entropy)
        return jnp.where(jnp.isnan(cost), jnp.inf, cost)

    return xla.compile_separately(price)

"""Codecs made of codecs: scaled, clipped, one after another."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.base import Codec, Facts, WrappedCodec, changed, decode_sum
from jaxcomp.codecs import inner
from jaxcomp.numerics import addition, noise
from jaxcomp.quantize.scales import ClippedMax
from jaxcomp.types import Array, ArrayLike, AxisName, Key, Weights


def times(codec: Codec, key: Key, payload: Any, like: ArrayLike, factor: float) -> Array:
    """`factor · decode(payload)`, with the rounding of the codec's weighted sum."""
    weight = jnp.full(1, factor, jnp.float32)
    payloads = jax.tree.map(lambda leaf: leaf[None], payload)
    keys = key._replace(own=key.own[None])
    return decode_sum.decode_sum(codec, keys, payloads, like, weight).astype(like.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contractive(WrappedCodec):
    """An unbiased codec, scaled down to be contractive, for use with error feedback.

    It decodes to `C(x) / (1 + ω)`. With `E‖C(x) − x‖² ≤ ω‖x‖²`, its error is at most
    `ω/(1 + ω) · ‖x‖²` in expectation: a contraction with `δ = 1/(1 + ω)`, for every `ω`.

    Args:
        codec: an unbiased codec.
        omega: its relative variance; None for the codec's own bound for the bucket size.

    Raises:
        ValueError: if the codec is biased, if it has no bound and `omega` is None, or if decoding
            needs more than the payload, as with adaptive levels.

    References:
        Horváth and Richtárik, `A better alternative to error feedback for communication-efficient
        distributed learning <https://arxiv.org/abs/2006.11077>`_, 2021.
    """

    codec: Codec
    omega: float | None = None
    unbiased = False
    contractive = True
    facts = changed()

    def __post_init__(self):
        inner.check("codec", self.codec)
        if not self.codec.unbiased:
            raise ValueError(
                f"`codec` must be unbiased, such as jaxcomp.qsgd(), got {self.codec!r}"
            )
        if self.omega is not None:
            checks.number("omega", self.omega, 0.0)
        else:
            self._omega(self.codec.bucket_size or 512)

    def _omega(self, size: int) -> float:
        bound = self.codec.variance_bound(size)
        omega = bound if self.omega is None else self.omega
        if omega is None:
            raise ValueError(
                f"`omega` must be the largest relative variance of a bucket for {self.codec!r}, "
                "whose bound is not known, got None"
            )
        return omega

    def decode(self, key: Key, payload: Any, like: ArrayLike, side: Any = None) -> Array:
        del side
        return times(self.codec, key, payload, like, 1 / (1 + self._omega(like.shape[1])))

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Weights = None, side: Any = None
    ) -> Array:
        del side
        factor = jnp.float32(1 / (1 + self._omega(like.shape[1])))
        weights = jnp.ones(keys.own.shape[0], jnp.float32) if weights is None else weights
        return decode_sum.decode_sum(self.codec, keys, payloads, like, weights * factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipped(WrappedCodec):
    """Clips outliers of each bucket before encoding.

    Args:
        codec: the codec of the clipped elements.
        sigmas: the largest distance from the bucket's mean, in standard deviations.

    Raises:
        ValueError: if `sigmas` is not positive, or if decoding needs more than the payload, as with
            adaptive levels.
    """

    codec: Codec
    sigmas: float = 2.5
    unbiased = False
    facts = changed(clips=True)

    def __post_init__(self):
        inner.check("codec", self.codec)
        checks.positive("sigmas", self.sigmas)

    def clipped(self, key: Key, x: Array, count: Array) -> Array:
        beyond = jnp.sum(self.transform(key, x, count)[0] != x, axis=1, dtype=jnp.int32)
        return jnp.stack([beyond, count], axis=1)

    def transform(self, key: Key, x: Array, count: Array) -> tuple[Array, Array]:
        """Clips elements beyond `sigmas` standard deviations."""
        del key
        end = ClippedMax(sigmas=self.sigmas)(x, count[:, None])
        # The limit is raised a little, so that its rounding to the dtype of x never lowers it.
        end = jnp.minimum(end * jnp.float32(1 + 2.0**-7), jnp.finfo(x.dtype).max.astype(end.dtype))
        clipped = jnp.clip(x, -end.astype(x.dtype), end.astype(x.dtype))
        return jnp.where(jnp.isfinite(x), clipped, x), count

    def decode_sum(
        self, keys: Key, payloads: Any, like: ArrayLike, weights: Weights = None, side: Any = None
    ) -> Array:
        return self.codec.decode_sum(keys, payloads, like, weights, side)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chained(Codec):
    """A chain of codecs, in which each encodes the error of those before it.

    `x̂ = Σᵣ x̂ᵣ` with `x̂ᵣ = Cᵣ(x − x̂₁ − … − x̂ᵣ₋₁)`. With `R` contractive codecs of parameter
    `δ`, the error is at most `(1 − δ)^R · ‖x‖²`. The chain is unbiased if its last codec is.

    Args:
        codecs: at least one codec, all with the same bucket size.

    Raises:
        ValueError: if there is no codec, bucket sizes differ, decoding needs more than the payload,
            or a codec after the first needs agreement between workers (a shared scale).

    References:
        Huang et al., `Lower bounds and nearly optimal algorithms in distributed learning with
        communication compression <https://arxiv.org/abs/2206.03665>`_, 2022 (multi-stage
        compression, one codec again and again).
    """

    codecs: tuple[Codec, ...]

    def __post_init__(self):
        checks.sequence("codecs", self.codecs)
        for number, codec in enumerate(self.codecs):
            inner.check("codecs", codec, agreement=number == 0)
        sizes = {codec.bucket_size for codec in self.codecs}
        if len(sizes) != 1:
            raise ValueError(
                "`codecs` must be at least one codec, all with the same bucket size, got "
                f"{self.codecs!r}"
            )

    @property
    def unbiased(self) -> bool:
        """Whether the last codec is unbiased; it corrects the bias of the others."""
        return self.codecs[-1].unbiased

    @property
    def contractive(self) -> bool:
        return not self.unbiased and all(codec.contractive for codec in self.codecs)

    @property
    def bucket_size(self) -> int | None:
        return self.codecs[0].bucket_size

    @functools.cached_property
    def facts(self) -> Facts:
        """The bits of all codecs; only the first agrees: it has the only known input."""
        each = [codec.facts for codec in self.codecs]
        bits = [facts.bits_per_element for facts in each]
        return Facts(
            bits_per_element=None if None in bits else float(sum(b for b in bits if b is not None)),
            homogeneous=all(facts.homogeneous for facts in each),
            mixed=max(facts.mixed for facts in each),
            agrees=each[0].agrees,
        )

    def init(self, like: ArrayLike) -> tuple:
        return tuple(codec.init(like) for codec in self.codecs)

    def agree(self, key: Key, x: Array, count: Array, state: tuple, axis_name: AxisName) -> tuple:
        first, *rest = state
        return (self.codecs[0].agree(_stage(key, 0), x, count, first, axis_name), *rest)

    def encode(self, key: Key, x: Array, count: Array, state: tuple) -> tuple[tuple, tuple]:
        payloads, states, rest = [], [], x
        for number, (codec, own) in enumerate(zip(self.codecs, state, strict=True)):
            payload, own = codec.encode(_stage(key, number), rest, count, own)
            payloads.append(payload)
            states.append(own)
            if number < len(self.codecs) - 1:
                rest = rest - codec.decode(_stage(key, number), payload, rest)
                # Padding may decode to anything, and would affect the next codec's scale.
                place = jnp.arange(x.shape[1], dtype=count.dtype)
                rest = jnp.where(place[None] < count[:, None], rest, 0)
        return tuple(payloads), tuple(states)

    def decode(self, key: Key, payload: tuple, like: ArrayLike, side: Any = None) -> Array:
        del side
        wide, total = addition.accumulator(like), None
        for number, (codec, part) in enumerate(zip(self.codecs, payload, strict=True)):
            decoded = codec.decode(_stage(key, number), part, wide)
            total = decoded if total is None else total + decoded
        assert total is not None  # There is at least one codec.
        return total.astype(like.dtype)


def _stage(key: Key, number: int) -> Key:
    """A separate key for each codec."""
    return key._replace(shared=noise.fold(key.shared, number), own=noise.fold(key.own, number))

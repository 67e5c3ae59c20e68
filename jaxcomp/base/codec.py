"""The interface of a codec: one batch of buckets ↔ the payload that crosses the wire."""

import abc
from typing import Any

import jax.numpy as jnp

from jaxcomp.base import interface
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import summing
from jaxcomp.numerics.segments import Segments
from jaxcomp.types import Array, ArrayLike, AxisName, Key, PyTree


class Codec(Interface, abstract=True):
    """One batch of buckets ↔ the payload that crosses the wire.

    A codec sees `x: [buckets, size]`, zero-padded; the first `count[b]` elements of bucket `b` are
    real. Every array of its payload has a leading `buckets` axis. A codec must define `encode` and
    `decode`; every other hook has a default.

    A codec that takes leaves whole (`bucket_size=None`) may also have a form for buckets of several
    leaves, its `segmented`: then leaves of different sizes are one program.

    Attributes:
        bucket_size: elements in a bucket, or None for one bucket a leaf.
        unbiased: whether `E[decode(encode(x))] = x`.
        linear: whether `decode(Σ payloads) = Σ decode(payloads)`, so that payloads may be summed.
        bits_per_element: the codec's claim of its bits an element in a full bucket (the contract
            suite checks it against the payload); None for no claim.
        reorders: whether `decode_sum` adds in a transformed domain, so that it equals the sum of
            `decode` only up to rounding.
        homogeneous: whether an input `2^k` times as large decodes to an output `2^k` times as
            large; a fixed threshold is not.
        mixed: elements that one fitted step, or one part, stands for, so that they must be rotated
            together at random; `math.inf` for a whole leaf.
        span: how many times smaller than the largest an element may be and still decode to a value
            close to it; 0.0 where small elements do not.
        keeps_zeros: whether zeros always decode to zeros.
        joined_leaf: elements of the longest leaf that shares a bucket with others, where
            `segmented` allows it. A longer one is encoded in place, by a program for its size.
        alone: the share of all elements from which on a leaf that is cut into buckets is encoded in
            place, by a program of its own; larger for a codec whose program takes long to compile.
        decodes_in_passes: whether decoding goes through memory several times, as a rotation does,
            so that a decoded sum is a loop over the workers and not one fused pass.
        unit: elements of the buckets into which a leaf shorter than `bucket_size` is cut, for a
            codec whose program takes long to compile; None for one bucket of the leaf's own size.
        segments: the segments of each bucket, where it has several leaves: `count` then is
            `int32[buckets, segments]`; None for one stretch of elements a bucket.
        clips: whether `clipped` counts elements; False for a codec whose range covers every
            element, or that has no range.
        guided: whether encoder and decoder may be given guesses of the batch: the state, and what
            `side` makes of it, then are `[alternatives, buckets, size]`, and `()` or None without
            guesses, which counts as zeros.
    """

    bucket_size: int | None
    unbiased: bool
    linear = False
    bits_per_element = None
    reorders = False
    homogeneous = True
    mixed = 0
    span = 0.0
    keeps_zeros = False
    joined_leaf: int = 2**18
    alone: float = 1 / 12
    decodes_in_passes: bool = False
    unit: int | None = None
    segments: Segments | None = None
    clips: bool = False
    guided = False

    @interface.derived
    def contractive(self) -> bool:
        """Whether `E‖decode(encode(x)) − x‖² ≤ (1 − δ)‖x‖²` for some `δ > 0` and every `x`.

        By default True for every biased codec.
        """
        return not self.unbiased

    def variance_bound(self, size: int) -> float | None:
        """The relative variance of an unbiased codec in the worst case, for buckets of `size`.

        `ω` with `E‖decode(encode(x)) − x‖² ≤ ω‖x‖²`; None if no bound is known.
        """
        del size
        return None

    def peaked_bound(self, size: int, peak: float) -> float | None:
        """`variance_bound` if the largest element has a fraction `peak` of its bucket's energy."""
        del size, peak
        return None

    def init(self, like: ArrayLike) -> PyTree:
        """The codec's state for a batch like this; `()` for a codec without state."""
        del like
        return ()

    @abc.abstractmethod
    def encode(self, key: Key, x: Array, count: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the payload of a batch, and the state for the next step."""

    def clipped(self, key: Key, x: Array, count: Array) -> Array:
        """The elements of each bucket beyond its outermost levels, and all, `int32[buckets, 2]`.

        It is for statistics: a codec that rounds such elements to an outermost level, with an error
        of more than half a step, overrides it and sets `clips`. All are those that are rounded, so
        a rotation may have added some.
        """
        del key, x
        return jnp.stack([jnp.zeros_like(count), count], axis=1)

    @abc.abstractmethod
    def decode(self, key: Key, payload: PyTree, like: ArrayLike, side: Any = None) -> Array:
        """Decodes a payload to a batch of the shape and dtype of `like`."""

    def decode_sum(
        self,
        keys: Key,
        payloads: PyTree,
        like: ArrayLike,
        weights: Array | None = None,
        side: Any = None,
    ) -> Array:
        """`Σ wᵢ · decode(payloadᵢ)` in worker order, in the dtype of `summing.accumulator(like)`.

        Args:
            keys: each worker's key; `own` has a leading workers axis.
            payloads: the payload tree with a leading workers axis.
            like: shape and dtype of one decoded batch.
            weights: `[workers]`, or None for all ones. A worker of weight zero adds exactly
                nothing, even if its payload is not finite.
            side: the decoder's side information, as `side` returns it.
        """

        def decode(key: Key, payload: PyTree, wide: ArrayLike) -> Array:
            return self.decode(key, payload, wide, side)

        return summing.one_by_one(
            decode, keys, payloads, like, weights, looped=self.decodes_in_passes
        )

    @interface.derived
    def agrees(self) -> bool:
        """Whether the workers agree on something before they encode."""
        return type(self).agree is not Codec.agree

    def agree(self, key: Key, x: Array, count: Array, state: PyTree, axis_name: AxisName) -> PyTree:
        """The state after the workers have agreed on shared values, such as scales or levels."""
        del key, x, count, axis_name
        return state

    @interface.derived
    def sided(self) -> bool:
        """Whether decoders need what `side` returns."""
        return type(self).side is not Codec.side

    def side(self, agreed: PyTree) -> Any:
        """The part of the agreed state that decoders need beside the payload."""
        del agreed
        return None

    def side_times(self, side: Any, factor: float) -> Any:
        """Side information with which a sum of integers decodes to `factor` times its value.

        `factor` is a power of two. Only codecs with `scales_sums` define it.
        """
        raise NotImplementedError(f"{self!r} has no side information that can be scaled")

    @interface.derived
    def scales_sums(self) -> bool:
        """Whether `side_times` can scale a decoded sum."""
        return type(self).side_times is not Codec.side_times

    @interface.derived
    def names_senders(self) -> bool:
        """Whether payloads say which elements were sent, so that senders can be averaged."""
        return type(self).mean_of_senders is not Codec.mean_of_senders

    def mean_of_senders(
        self, keys: Key, payloads: PyTree, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        """The mean of each element over the workers that sent it, zero where none did."""
        raise NotImplementedError(f"{self!r} does not say which elements were sent")

    def for_leaf(self, shape: tuple[int, ...], dtype: Any) -> "tuple[Codec | None, str | None]":
        """The codec for a leaf of this shape, or None and the reason to leave it dense."""
        del shape, dtype
        return self, None

    def stacked(self, axes: int) -> "Codec":
        """The codec for leaves whose first `axes` axes index layers, for `for_leaf` to see."""
        del axes
        return self

    @interface.derived
    def shaped(self) -> bool:
        """Whether the codec depends on the shape of a leaf, so that `for_leaf` must be asked."""
        return type(self).for_leaf is not Codec.for_leaf

    def segmented(self, segments: Segments) -> "Codec | None":
        """The codec for buckets of several leaves, each of which it encodes as it would alone.

        None, the default, if there is none: then leaves of different sizes are encoded apart, each
        size by a program of its own.
        """
        del segments
        return None

    @interface.derived
    def may_sum(self) -> bool:
        """Whether `summable` may succeed."""
        return self.linear or type(self).summable is not Codec.summable

    def summable(self, workers: int) -> "Codec":
        """The linear codec, with equal buckets and state, for sums of `workers` payloads.

        Raises:
            ValueError: if the payloads cannot be summed.
        """
        del workers
        if self.linear:
            return self
        raise not_summable(self, "its payloads do not add up to one")


class WrappedCodec(Codec, abstract=True):
    """A codec around another one, `codec`.

    Properties of `codec`, and the agreement between workers, are forwarded. Hooks that the wrapper
    may invalidate are not: `linear`, `variance_bound`, `decode_sum`, `summable`, `mean_of_senders`
    and others keep the safe default of every codec unless the wrapper overrides them.

    A wrapper that changes the elements overrides `transform`, `restore` and `inner_like`; `init`,
    `agree`, `encode` and `decode` follow from them.

    Attributes:
        codec: the wrapped codec.
    """

    codec: Codec

    def transform(self, key: Key, x: Array, count: Array) -> tuple[Array, Array]:
        """The elements that `codec` encodes, and the number of real elements in each bucket."""
        del key
        return x, count

    def restore(self, key: Key, z: Array, like: ArrayLike) -> Array:
        """The inverse of `transform`, in the shape and dtype of `like`."""
        del key, like
        return z

    def inner_like(self, like: ArrayLike) -> ArrayLike:
        """Shape and dtype of `transform`'s output for a batch like this."""
        return like

    def init(self, like: ArrayLike) -> PyTree:
        return self.codec.init(self.inner_like(like))

    def agree(self, key: Key, x: Array, count: Array, state: PyTree, axis_name: AxisName) -> PyTree:
        if not self.codec.agrees:
            return state
        return self.codec.agree(key, *self.transform(key, x, count), state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.codec.encode(key, *self.transform(key, x, count), state)

    def clipped(self, key: Key, x: Array, count: Array) -> Array:
        return self.codec.clipped(key, *self.transform(key, x, count))

    def decode(self, key: Key, payload: PyTree, like: ArrayLike, side: Any = None) -> Array:
        z = self.codec.decode(key, payload, self.inner_like(like), side)
        return self.restore(key, z, like)


_FACTS = ("bucket_size", "bits_per_element", "contractive", "clips", "guided")
_NUMERICS = ("reorders", "homogeneous", "mixed", "span")
_AGREED = ("agrees", "sided", "side")
interface.forward(WrappedCodec, "codec", _FACTS + _NUMERICS + _AGREED)


def not_summable(codec: Codec, why: str) -> ValueError:
    """The error for a codec whose payloads cannot be added, with the reason."""
    return ValueError(
        f"`codec` must have payloads that can be added, got {codec!r}: {why}. "
        "Take jaxcomp.Gather or jaxcomp.TwoShot, or a codec such as jaxcomp.random_k(), "
        "jaxcomp.int_sgd(), jaxcomp.thc() or jaxcomp.terngrad(shared=True)"
    )

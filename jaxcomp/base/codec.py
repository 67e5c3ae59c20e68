"""The interface of a codec: one batch of buckets ↔ the payload that crosses the wire."""

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxcomp.base import interface
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import addition
from jaxcomp.numerics.segments import Segments
from jaxcomp.types import Array, ArrayLike, AxisName, Key, PyTree


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that a codec declares about its numbers, and about the hooks that it has.

    Attributes:
        bits_per_element: the codec's claim of its bits an element in a full bucket (the contract
            suite checks it against the payload); None for no claim.
        homogeneous: whether an input `2^k` times as large decodes to an output `2^k` times as
            large; a fixed threshold is not.
        reorders: whether `decode_sum` adds in a transformed domain, so that it equals the sum of
            `decode` only up to rounding.
        keeps_zeros: whether the codec promises that zeros beside other elements decode to zeros,
            so that nobody sets padding to zero again. Others may keep them, too, and all keep
            buckets of zeros.
        mixed: elements that one fitted step, or one part, stands for, so that they must be rotated
            together at random; `math.inf` for a whole leaf.
        span: how many times smaller than the largest an element may be and still decode to a value
            close to it; 0.0 where small elements do not.
        agrees: whether the workers `agree` on something before they encode.
        sided: whether decoders need what `side` returns.
        scales_sums: whether a sum of integers decodes to `2^k` times its value if the arrays of
            `side` are `2^k` times as large.
        guided: whether encoder and decoder may be given guesses of the batch: the state, and what
            `side` makes of it, then are `[alternatives, buckets, size]`, and `()` or None without
            guesses, which counts as zeros. If the codec is not `sided`, the encoder alone is given
            them, and they are the parameters that the batch is subtracted from.
        clips: whether `clipped` counts elements; False for a codec whose range covers every
            element, or that has no range.
        names_senders: whether payloads say which elements were sent, so that there is a
            `mean_of_senders`.
        shaped: whether the codec depends on the shape of a leaf, so that `for_leaf` must be asked.
        worst: the largest error of an element, as a fraction of the largest element of its bucket;
            None for no such bound. Below one, a residual stays bounded in every element, even if
            its relative variance is large.
    """

    bits_per_element: float | None = None
    homogeneous: bool = True
    reorders: bool = False
    keeps_zeros: bool = False
    mixed: int | float = 0
    span: float = 0.0
    agrees: bool = False
    sided: bool = False
    scales_sums: bool = False
    guided: bool = False
    clips: bool = False
    names_senders: bool = False
    shaped: bool = False
    worst: float | None = None

    def __post_init__(self):
        if self.scales_sums and not self.sided:
            raise ValueError("`scales_sums` must be False without `sided`, got True")


@dataclasses.dataclass(frozen=True)
class Hints:
    """Advice of a codec to the layout and the compiler; results are right with any of them.

    Attributes:
        joined_leaf: elements of the longest leaf that shares a bucket with others, where
            `segmented` allows it. A longer one is encoded in place, by a program for its size.
        alone: the share of all elements from which on a leaf that is cut into buckets is encoded in
            place, by a program of its own; larger for a codec whose program takes long to compile.
        unit: elements of the buckets into which a leaf shorter than `bucket_size` is cut, for a
            codec whose program takes long to compile; None for one bucket of the leaf's own size.
        decodes_in_passes: whether decoding goes through memory several times, as a rotation does,
            so that a decoded sum is a loop over the workers and not one fused pass.
    """

    joined_leaf: int = 2**18
    alone: float = 1 / 12
    unit: int | None = None
    decodes_in_passes: bool = False


HOOKS = {
    "agrees": "agree",
    "sided": "side",
    "clips": "clipped",
    "names_senders": "mean_of_senders",
    "shaped": "for_leaf",
}
"""Facts that say whether a codec has a hook."""


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
        facts: what else the codec declares, as `Facts`: one for the class, or a
            `functools.cached_property` where it depends on the settings. A class that defines
            `agree`, `side`, `clipped`, `mean_of_senders` or `for_leaf` says so there.
        hints: its advice to the layout and the compiler, as `Hints`.
        segments: the segments of each bucket, where it has several leaves: `count` then is
            `int32[buckets, segments]`; None for one stretch of elements a bucket.

    Raises:
        TypeError: as `Interface`; and if the facts of a class contradict the hooks that it has.
    """

    bucket_size: int | None
    unbiased: bool
    linear = False
    facts = Facts()
    hints = Hints()
    segments: Segments | None = None

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if not cls._abstract:
            _check_declared(cls)

    @interface.derived
    def contractive(self) -> bool:
        """Whether `E‖decode(encode(x)) − x‖² ≤ (1 − δ)‖x‖²` for some `δ > 0` and every `x`.

        By default True for every biased codec.
        """
        return not self.unbiased

    def variance_bound(self, size: int, peak: float | None = None) -> float | None:
        """The relative variance of an unbiased codec in the worst case, for buckets of `size`.

        `ω` with `E‖decode(encode(x)) − x‖² ≤ ω‖x‖²`; None if no bound is known. A `peak` promises
        that the largest element has on average at most this fraction of its bucket's energy, as
        after a random rotation; a codec may ignore it.
        """
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
        of more than half a step, overrides it and declares `clips`. All are those that are rounded,
        so a rotation may have added some.
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
        """`Σ wᵢ · decode(payloadᵢ)` in worker order, in the dtype of `addition.accumulator(like)`.

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

        return addition.one_by_one(
            decode, keys, payloads, like, weights, looped=self.hints.decodes_in_passes
        )

    def agree(self, key: Key, x: Array, count: Array, state: PyTree, axis_name: AxisName) -> PyTree:
        """The state after the workers have agreed on shared values, such as scales or levels."""
        del key, x, count, axis_name
        return state

    def side(self, agreed: PyTree) -> Any:
        """The part of the agreed state that decoders need beside the payload."""
        del agreed
        return None

    def mean_of_senders(
        self, keys: Key, payloads: PyTree, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        """The mean of each element over the workers that sent it, zero where none did."""
        raise NotImplementedError(f"{self!r} does not say which elements were sent")

    def for_leaf(
        self, shape: tuple[int, ...], dtype: Any, stacked: int = 0
    ) -> "tuple[Codec | None, str | None]":
        """The codec for a leaf of this shape, or None and the reason to leave it dense.

        The first `stacked` axes of the leaf index layers.
        """
        del shape, dtype, stacked
        return self, None

    def segmented(self, segments: Segments) -> "Codec | None":
        """The codec for buckets of several leaves, each of which it encodes as it would alone.

        None, the default, if there is none: then leaves of different sizes are encoded apart, each
        size by a program of its own.
        """
        del segments
        return None

    def leafwise(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """`encode` and `decode` for one bucket of several leaves, which are not joined but a list
        of flat arrays; None, the default, to join them.
        """
        return None

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

    Facts of `codec`, and the agreement between workers, are forwarded. Hooks that the wrapper may
    invalidate are not: `linear`, `variance_bound`, `decode_sum`, `summable`, `mean_of_senders`,
    `hints` and others keep the safe default of every codec unless the wrapper overrides them. A
    wrapper that changes facts has `facts = changed(homogeneous=False)`, or a property that returns
    `dataclasses.replace(super().facts, ...)`.

    A wrapper that changes the elements overrides `transform`, `restore` and `inner_like`; `init`,
    `agree`, `encode` and `decode` follow from them.

    Attributes:
        codec: the wrapped codec.
    """

    codec: Codec

    @property
    def facts(self) -> Facts:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The facts of `codec`, without those about hooks that a wrapper does not forward."""
        return dataclasses.replace(self.codec.facts, **_LOST)

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
        if not self.codec.facts.agrees:
            return state
        return self.codec.agree(key, *self.transform(key, x, count), state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.codec.encode(key, *self.transform(key, x, count), state)

    def clipped(self, key: Key, x: Array, count: Array) -> Array:
        return self.codec.clipped(key, *self.transform(key, x, count))

    def decode(self, key: Key, payload: PyTree, like: ArrayLike, side: Any = None) -> Array:
        z = self.codec.decode(key, payload, self.inner_like(like), side)
        return self.restore(key, z, like)


interface.forward(WrappedCodec, "codec", ("bucket_size", "contractive", "side"))

_LOST = {
    "keeps_zeros": False,
    "worst": None,
    "scales_sums": False,
    "names_senders": False,
    "shaped": False,
}
"""Facts that a wrapper may break, so that it must declare them anew."""


def changed(**changes: Any) -> Any:
    """The `facts` of a wrapper: those of the wrapped codec, some of them changed.

    Example:
        >>> import dataclasses, jaxcomp
        >>> @dataclasses.dataclass(frozen=True)
        ... class Fixed(WrappedCodec):
        ...     codec: Codec
        ...     unbiased = False
        ...     facts = changed(homogeneous=False)
        >>> Fixed(jaxcomp.qsgd(bits=4)).facts.homogeneous
        False

    Raises:
        TypeError: for a name that is no fact.
    """
    dataclasses.replace(Facts(sided=True), **changes)
    merged = {**_LOST, **changes}
    return functools.cached_property(lambda self: dataclasses.replace(self.codec.facts, **merged))


def _check_declared(cls: type[Codec]) -> None:
    """Checks where a class declares facts and hints, and that it has the hooks of its facts."""
    for name, kind in (("facts", Facts), ("hints", Hints)):
        given = inspect.getattr_static(cls, name)
        if not isinstance(given, kind | property | functools.cached_property):
            raise TypeError(
                f"{cls.__name__}.{name} must be jaxcomp.base.{kind.__name__}(...), or a property "
                f"that returns one, got {given!r}"
            )
        for field in dataclasses.fields(kind):
            if field.name in inspect.get_annotations(cls):
                raise TypeError(
                    f"{cls.__name__}.{field.name} must not be a field: it is declared by {name} = "
                    f"jaxcomp.base.{kind.__name__}({field.name}=...)"
                )
    facts = inspect.getattr_static(cls, "facts")
    if isinstance(facts, Facts) and issubclass(cls, WrappedCodec):
        raise TypeError(
            f"{cls.__name__}.facts must keep those of the wrapped codec, as in facts = "
            "jaxcomp.base.changed(homogeneous=False)"
        )
    for fact, hook in HOOKS.items() if isinstance(facts, Facts) else ():
        own = getattr(cls, hook) is not getattr(Codec, hook)
        if getattr(facts, fact) and not own:
            raise TypeError(f"{cls.__name__} must define {hook}, since its facts have {fact}=True")
        if own and not getattr(facts, fact):
            raise TypeError(
                f"{cls.__name__}.facts must have {fact}=True, since the class defines {hook}: "
                f"facts = jaxcomp.base.Facts({fact}=True)"
            )


def not_summable(codec: Codec, why: str) -> ValueError:
    """The error for a codec whose payloads cannot be added, with the reason."""
    return ValueError(
        f"`codec` must have payloads that can be added, got {codec!r}: {why}. "
        "Take jaxcomp.Gather or jaxcomp.TwoShot, or a codec such as jaxcomp.random_k(), "
        "jaxcomp.int_sgd(), jaxcomp.thc() or jaxcomp.terngrad(shared=True)"
    )

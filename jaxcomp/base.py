"""The nouns of the library as abstract classes, with a default for every hook.

Settings are frozen dataclasses that are hashable by value; everything traced is a `NamedTuple` of
arrays. A caller calls a hook and never asks whether a part has it.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxcomp import interface, summing
from jaxcomp.interface import Interface
from jaxcomp.types import Array, ArrayLike, AxisName, Batches, Key, PyTree, Stacks


class Codec(Interface, abstract=True):
    """One batch of buckets ↔ the payload that crosses the wire.

    A codec sees `x: [buckets, size]`, zero-padded, of which `count[b]` elements of bucket `b`
    are real. Every array of its payload has a leading `buckets` axis. `encode` and `decode` must be
    given; every other hook has a default.

    Attributes:
        bucket_size: elements in a bucket, or None for one bucket a leaf.
        unbiased: whether `E[decode(encode(x))] = x`.
        linear: whether `decode(Σ payloads) = Σ decode(payloads)`, so that payloads may be summed.
        bits_per_element: bits an element of a full bucket, as the codec claims them (the contract
            suite holds them against the payload); None for no claim.
        reorders: whether `decode_sum` adds in a domain of its own, and so equals the sum of
            `decode` only up to rounding.
        homogeneous: whether an input `2^k` times as large decodes to an output `2^k` times as
            large; a fixed threshold is not.
        mixed: elements that one fitted step, or one part, stands for, so that they must be rotated
            together at random; `math.inf` for a whole leaf.
    """

    bucket_size: int | None
    unbiased: bool
    linear = False
    bits_per_element = None
    reorders = False
    homogeneous = True
    mixed = 0

    @interface.derived
    def contractive(self) -> bool:
        """Whether `E‖decode(encode(x)) − x‖² ≤ (1 − δ)‖x‖²` for some `δ > 0` and every `x`.

        By default every biased codec is.
        """
        return not self.unbiased

    def variance_bound(self, size: int) -> float | None:
        """The relative variance of an unbiased codec in the worst case, for buckets of `size`.

        `ω` with `E‖decode(encode(x)) − x‖² ≤ ω‖x‖²`; None where no bound is known.
        """
        del size
        return None

    def peaked_bound(self, size: int, peak: float) -> float | None:
        """As `variance_bound`, if the largest element has this share of its bucket's energy."""
        del size, peak
        return None

    def init(self, like: ArrayLike) -> PyTree:
        """State of the codec for a batch like this; `()` for the many that have none."""
        del like
        return ()

    @abc.abstractmethod
    def encode(self, key: Key, x: Array, count: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """The payload of a batch, and the state for the next step."""

    @abc.abstractmethod
    def decode(self, key: Key, payload: PyTree, like: ArrayLike, side: Any = None) -> Array:
        """The batch that a payload stands for, in the shape and dtype of `like`."""

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
            side: what the decoder knows beside the payload.
        """

        def decode(key: Key, payload: PyTree, wide: ArrayLike) -> Array:
            return self.decode(key, payload, wide, side)

        return summing.one_by_one(decode, keys, payloads, like, weights)

    @interface.derived
    def agrees(self) -> bool:
        """Whether the workers agree on something before they encode."""
        return type(self).agree is not Codec.agree

    def agree(self, key: Key, x: Array, count: Array, state: PyTree, axis_name: AxisName) -> PyTree:
        """The state after the workers have agreed on what all must know before they encode."""
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
        """The side by which a sum of integers decodes to `factor` times as much.

        `factor` is a power of two. Only codecs with `scales_sums` have it.
        """
        raise NotImplementedError(f"{self!r} has no side that can be scaled")

    @interface.derived
    def scales_sums(self) -> bool:
        """Whether `side_times` scales what a sum decodes to."""
        return type(self).side_times is not Codec.side_times

    @interface.derived
    def names_senders(self) -> bool:
        """Whether payloads say which elements were sent, so that a mean may be over senders."""
        return type(self).mean_of_senders is not Codec.mean_of_senders

    def mean_of_senders(
        self, keys: Key, payloads: PyTree, like: ArrayLike, weights: Array | None = None
    ) -> Array:
        """The mean of each element over the workers that sent it, zero where none did."""
        raise NotImplementedError(f"{self!r} does not say which elements were sent")

    def for_leaf(self, shape: tuple[int, ...], dtype: Any) -> "tuple[Codec | None, str | None]":
        """The codec for a leaf of this shape, or None to leave it dense, and why."""
        del shape, dtype
        return self, None

    @interface.derived
    def shaped(self) -> bool:
        """Whether the codec depends on the shape of a leaf, so that `for_leaf` must be asked."""
        return type(self).for_leaf is not Codec.for_leaf

    @interface.derived
    def may_sum(self) -> bool:
        """Whether `summable` may succeed."""
        return self.linear or type(self).summable is not Codec.summable

    def summable(self, workers: int) -> "Codec":
        """The linear codec, of equal buckets and state, for sums of this many workers' payloads.

        Raises:
            ValueError: if there is none.
        """
        del workers
        if self.linear:
            return self
        raise not_summable(self, "its payloads do not add up to one")


class WrappedCodec(Codec, abstract=True):
    """A codec around another one, `codec`.

    What `codec` says of itself and what workers agree on is forwarded. Claims that the wrapper may
    break have the safe default of every codec, and the wrapper makes them anew: `linear`,
    `variance_bound`, `decode_sum`, `summable`, `mean_of_senders`, ….

    A wrapper that changes the elements overrides `transform`, `restore` and `inner_like`; `init`,
    `agree`, `encode` and `decode` follow from them.

    Attributes:
        codec: what is wrapped.
    """

    codec: Codec

    def transform(self, key: Key, x: Array, count: Array) -> tuple[Array, Array]:
        """The elements that `codec` encodes, and how many of each bucket are real."""
        del key
        return x, count

    def restore(self, key: Key, z: Array, like: ArrayLike) -> Array:
        """The inverse of `transform`, in the shape and dtype of `like`."""
        del key, like
        return z

    def inner_like(self, like: ArrayLike) -> ArrayLike:
        """Shape and dtype of what `transform` makes of a batch like this."""
        return like

    def init(self, like: ArrayLike) -> PyTree:
        return self.codec.init(self.inner_like(like))

    def agree(self, key: Key, x: Array, count: Array, state: PyTree, axis_name: AxisName) -> PyTree:
        if not self.codec.agrees:
            return state
        return self.codec.agree(key, *self.transform(key, x, count), state, axis_name)

    def encode(self, key: Key, x: Array, count: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.codec.encode(key, *self.transform(key, x, count), state)

    def decode(self, key: Key, payload: PyTree, like: ArrayLike, side: Any = None) -> Array:
        z = self.codec.decode(key, payload, self.inner_like(like), side)
        return self.restore(key, z, like)


_FACTS = ("bucket_size", "bits_per_element", "reorders", "homogeneous", "mixed", "contractive")
_AGREED = ("agrees", "sided", "side")
interface.forward(WrappedCodec, "codec", _FACTS + _AGREED)


def not_summable(codec: Codec, why: str) -> ValueError:
    """The error for a codec whose payloads cannot be added, for this reason."""
    return ValueError(
        f"`codec` must have payloads that can be added on the way, and not be {codec!r}: {why}. "
        "Take jaxcomp.Gather or jaxcomp.TwoShot, or a codec such as jaxcomp.random_k(), "
        "jaxcomp.int_sgd(), jaxcomp.thc() or jaxcomp.terngrad(shared=True)"
    )


class Feedback(Interface, abstract=True):
    """A sender's memory: the message to send, and the estimate made of what came back.

    It sees the compressed leaves as one `[buckets, size]` array for each batch, but any tree of
    arrays will do: it must treat every element alike. The state of a feedback whose receivers
    remember something too is a `Mirrored`.

    Attributes:
        kind: what the memory is ("residual", "momentum", "shift", …); `resize_workers` moves it
            by this.
        mirrors: whether its state is a `Mirrored`.
        bounded: whether its memory stays finite wherever the mean of the messages is; if not,
            workers tell each other of a memory that does not.
        absent: what a worker that does not take part does with its message: "remembered" in the
            memory, or "left out" of it.
        step: the step `a` of a shift towards what was sent.
        decay: the share of a residual that is kept.
    """

    kind: str
    mirrors = False
    bounded = False
    absent = "remembered"
    step: float | None = None
    decay = 1.0

    def check(self, codec: Codec, size: int | None) -> None:
        """Raises a `ValueError` for a codec of such buckets that this feedback does not go with."""
        del codec, size

    @abc.abstractmethod
    def init(self, like: PyTree, part_like: PyTree) -> PyTree:
        """Memory for messages like `like`, on a device that holds `part_like` of their mean."""

    @abc.abstractmethod
    def compensate(self, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The message to send in place of `x`."""

    @abc.abstractmethod
    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """This device's part of the estimate, and the memory for the next step."""

    def unsent(self, state: PyTree) -> PyTree:
        """The part of past messages that has not arrived yet and will be sent later."""
        del state
        return ()

    @interface.derived
    def keeps_unsent(self) -> bool:
        """Whether `unsent` has anything."""
        return type(self).unsent is not Feedback.unsent


class WrappedFeedback(Feedback, abstract=True):
    """A feedback around another one, `feedback`, whose hooks it has but for those it changes."""

    feedback: Feedback

    def init(self, like: PyTree, part_like: PyTree) -> PyTree:
        return self.feedback.init(like, part_like)

    def compensate(self, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        return self.feedback.compensate(x, state)

    def update(
        self,
        message: PyTree,
        sent: PyTree,
        part: PyTree,
        share: Array | float,
        weight: Array | None,
        state: PyTree,
    ) -> tuple[PyTree, PyTree]:
        return self.feedback.update(message, sent, part, share, weight, state)


interface.forward(WrappedFeedback, "feedback", interface.hooks(Feedback))


class Mirrored(NamedTuple):
    """The memory of a feedback that the receivers follow.

    Attributes:
        own: what this sender remembers.
        mirror: what a receiver remembers of all senders together, in the shape of the part of the
            mean that it holds: the same on every device that holds the same part.
    """

    own: PyTree
    mirror: PyTree


class Collected(NamedTuple):
    """What the first half of a reduction brought to this device.

    Attributes:
        part: this device's part of `Σ wᵢ·cᵢ / n` over the decoded messages `cᵢ`.
        sent: this worker's own message as the others decoded it.
        share: `Σ wᵢ / n`.
        state: the reducer's state for the next step.
    """

    part: Stacks
    sent: Stacks
    share: Array | float
    state: PyTree


class Opened(NamedTuple):
    """What a gate says of a step.

    Attributes:
        go: bool scalar, whether anyone sends; the same on all workers, so that it may guard
            collectives.
        weight: this worker's mask, float32: 1.0 if it takes part, else 0.0. None if all do.
        state: the gate's state for the next step.
    """

    go: Array
    weight: Array | None
    state: PyTree


class Gate(Interface, abstract=True):
    """When, and which workers, communicate. Its state is the same on all workers.

    Attributes:
        closes: whether there are steps in which nobody sends.
        idles: whether it closes only where nobody takes part, so that a round may as well be
            opened there.
        measures: whether `open` looks at the messages.
    """

    closes: bool
    idles = False
    measures = False

    def check(self, feedback: Feedback) -> None:
        """Raises a `ValueError`, or warns, for a feedback that this gate does not go with."""
        del feedback

    def factor(self, workers: int) -> float:
        """What the sum of all messages that are sent is multiplied by to stand for all of them."""
        del workers
        return 1.0

    def init(self, like: PyTree) -> PyTree:
        """State for parameters like these; `()` for the many that have none."""
        del like
        return ()

    @abc.abstractmethod
    def open(
        self,
        key: Array,
        tree: PyTree,
        state: PyTree,
        axis_name: AxisName,
        params: PyTree | None = None,
    ) -> Opened:
        """Who sends in this step, from its key, this worker's messages and the parameters."""


class Reducer(Interface, abstract=True):
    """How the links of all workers become one mean, in two halves.

    `collect` brings this device its part of the mean, `spread` brings every part to every device.
    Both see the compressed leaves only, as one `[buckets, size]` array for each batch of
    `trees.layout`; leaves that the policy leaves dense pass through `dense`.

    Attributes:
        uplink: the `Link` from the workers, or None where every leaf travels as it is.
        downlink: the `Link` back to them, or None where there is nothing to send.
        splits: whether the part of the mean that `collect` brings to a device is a share of it.
        hierarchical: whether it reduces over two levels of axes, so that `workers` is a tuple.
        scheduled: whether it changes with time: then `schedule` has more than itself.
        collectives: into how many collectives the payload is split each way, at most; None for a
            number that depends on the size.
        over: "workers" for the mean over all of them, "senders" for that over those who sent an
            element.
        dtype: dtype that dense leaves are sent in; None for their own.
        for_small_leaves: advice on how to have small leaves compressed too.
    """

    uplink: Any
    downlink = None
    splits = False
    hierarchical = False
    scheduled = False
    collectives: int | None = 1
    over = "workers"
    dtype: str | None = None
    for_small_leaves = "jaxcomp.Policy(codec, min_size=0, min_ndim=0) compresses everything"

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> "Reducer":
        """The reducer that reduces these batches over axes of these sizes: itself, for most."""
        del batches, workers
        return self

    def resolved_state(self, resolved: "Reducer", state: PyTree) -> PyTree:
        """The state of the `resolved` reducer, of this one's."""
        del resolved
        return state

    def unresolved_state(self, resolved: "Reducer", after: PyTree, state: PyTree) -> PyTree:
        """This reducer's state, of the `resolved` one's after a step from `state`."""
        del resolved, state
        return after

    def shares(self, workers: tuple[int, ...]) -> int:
        """Into how many buckets to cut a leaf whose codec takes it whole."""
        del workers
        return 1

    def link_axis(self, axis_name: AxisName) -> AxisName:
        """The axes that the links cross."""
        return axis_name

    def within(self, batches: Batches, axis_name: AxisName) -> Batches:
        """The batches that the links see, between `enter` and `leave`."""
        del axis_name
        return batches

    def enter(self, batches: Batches, message: Stacks, axis_name: AxisName) -> Stacks:
        """The exchange before the feedback: none for most reducers."""
        del batches, axis_name
        return message

    def leave(self, batches: Batches, mean: Stacks, axis_name: AxisName) -> Stacks:
        """The exchange after `spread`: none for most reducers."""
        del batches, axis_name
        return mean

    @abc.abstractmethod
    def init(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """State for batches like these."""

    def fitted(self, batches: Batches, state: PyTree, axis_name: AxisName) -> PyTree:
        """The state for the workers here, from one that may have been made for one worker."""
        del batches, axis_name
        return state

    @abc.abstractmethod
    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """Shape and dtype of this device's part of the mean of each batch."""

    @abc.abstractmethod
    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: PyTree,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        """This device's part of the mean of all messages."""

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> tuple[Stacks, PyTree]:
        """The whole mean, the same on every device."""
        del key, batches, axis_name
        return part, state

    def unchanged(
        self, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> Stacks:
        """The mean that every device knows when nothing is sent, from its part of a mirror."""
        del batches, state, axis_name
        return part

    @abc.abstractmethod
    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        """The mean of leaves that travel as they are."""

    @abc.abstractmethod
    def link_bytes(self, like: PyTree, workers: Any) -> int:
        """Bytes that one device sends for the whole reduction over `workers` workers: a number, or
        one for each axis.
        """

    def batches_link_bytes(self, batches: Batches, workers: Any) -> Any:
        """The part of `link_bytes` that the compressed leaves account for."""
        raise NotImplementedError(f"{self!r} cannot be part of another reducer")

    @interface.derived
    def composes(self) -> bool:
        """Whether it may be part of another reducer."""
        return type(self).batches_link_bytes is not Reducer.batches_link_bytes

    def payload_bytes(self, batches: Batches) -> tuple[float, ...] | None:
        """Payload bytes of each batch, where other arrays are sent than the codecs' payloads."""
        del batches
        return None

    def efforts(self, batches: Batches, workers: Any) -> tuple[tuple[Any, Any], ...] | None:
        """Pairs of a link, or a reducer, and the `theory.cost.Effort` that is made for it.

        `plan` forecasts times from them; None where they are not known.
        """
        del batches, workers
        return None

    @interface.derived
    def schedule(self) -> "tuple[tuple[int, Reducer], ...]":
        """Pairs of a first step and the reducer from there on."""
        return ((0, self),)

    def phase(self, state: PyTree) -> Any:
        """The number of the phase that the next step is in."""
        del state
        return 0


class WrappedReducer(Reducer, abstract=True):
    """A reducer around another one, `reducer`, whose hooks it has but for those it changes."""

    reducer: Reducer

    def init(self, batches: Batches, axis_name: AxisName) -> PyTree:
        return self.reducer.init(batches, axis_name)

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        return self.reducer.part_like(batches, axis_name)

    def collect(
        self,
        key: Array,
        batches: Batches,
        message: Stacks,
        state: PyTree,
        axis_name: AxisName,
        weight: Array | None = None,
    ) -> Collected:
        return self.reducer.collect(key, batches, message, state, axis_name, weight)

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        return self.reducer.dense(leaves, axis_name, weight)

    def link_bytes(self, like: PyTree, workers: Any) -> int:
        return self.reducer.link_bytes(like, workers)


interface.forward(WrappedReducer, "reducer", interface.hooks(Reducer))

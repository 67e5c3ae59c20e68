"""The nouns of the library as interfaces: what a part must offer to take its place.

Everything traced is a `NamedTuple` of arrays, everything else is a frozen dataclass that is
hashable by value. Nothing here computes anything.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

Array = jax.Array
PyTree = Any
Batches = Sequence[Any]
"""The static plan of a tree's compressed leaves: a `trees.Batch` for each array of a `Stacks`."""
Stacks = Sequence[Array]
"""The compressed leaves of a tree: one `[buckets, size]` array for each batch."""
AxisName = Hashable | tuple[Hashable, ...]


@runtime_checkable
class ArrayLike(Protocol):
    """Anything with a shape and a dtype: an array or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class Key(NamedTuple):
    """What a codec may draw noise from; every receiver can rebuild it, so it never travels.

    Attributes:
        shared: `uint32[2]`, the same on all workers: random coordinates, common rotations.
        own: `uint32[2]`, this worker's: private dither.
        first: `uint32` scalar, the number of bucket 0 of the array at hand, so that a part of a
            batch draws the noise that the whole batch would have drawn there.
    """

    shared: Array
    own: Array
    first: Array


@runtime_checkable
class Codec(Protocol):
    """One batch of buckets ↔ the payload that crosses the wire.

    A codec sees `x: [buckets, size]`, zero-padded, of which `count[b]` elements of bucket `b`
    are real. Every array of its payload has a leading `buckets` axis. More methods are optional:
    `agree(key, x, count, state, axis_name) -> state` for what all workers must agree on before they
    encode; `side(agreed)` for what of it the decoder needs, which `decode` and `decode_sum` are
    then given; `decode_sum(keys, payloads, like, weights=None)` where summing `n` payloads can be
    done better than one after another, added in float32 or wider whatever `like` is;
    `mean_of_senders(keys, payloads, like, weights=None)` of one that does not send every element,
    the mean over those who did; `side_times(side, factor)`, the side by which a sum of integers
    decodes to `factor` times as much, for a power of two; `variance_bound(size)`, the
    relative variance of an unbiased codec in the worst case; `for_leaf(shape, dtype) ->
    (codec | None, why)` for a codec that depends on the shape of the leaf, or would rather leave
    some dense; `summable(workers) -> codec` for the linear codec, of equal buckets and state, that
    takes its place where the payloads of so many workers are added on the way, or a `ValueError`.

    Attributes:
        bucket_size: elements in a bucket, or None for one bucket a leaf.
        unbiased: whether `E[decode(encode(x))] = x`.
        linear: whether `decode(Σ payloads) = Σ decode(payloads)`, so that payloads may be summed.
        contractive (optional, by default `not unbiased`): whether
            `E‖decode(encode(x)) − x‖² ≤ (1 − δ)‖x‖²` for some `δ > 0` and every `x`.
        agrees (optional, by default whether there is an `agree`): whether to call it.
        sided (optional, by default whether there is a `side`): whether decoders need it.
        names_senders (optional, by default whether there is a `mean_of_senders`): whether to call
            it.
        reorders (optional, by default False): whether `decode_sum` adds in a domain of its own, and
            so equals the sum of `decode` only up to rounding.
        homogeneous (optional, by default True): whether an input `2^k` times as large decodes to an
            output `2^k` times as large; a fixed threshold is not.
        mixed (optional, by default 0): elements that one fitted step or one part stands for, so
            that they must be rotated together at random; `math.inf` for a whole leaf.
        bits_per_element (optional): what a full bucket costs an element, as the codec claims;
            `testing.assert_wire_bytes` holds it against the payload.
    """

    @property
    def bucket_size(self) -> int | None: ...

    @property
    def unbiased(self) -> bool: ...

    @property
    def linear(self) -> bool: ...

    def init(self, like: ArrayLike) -> PyTree:
        """State of the codec for a batch like this; `()` for the many that have none."""
        ...

    def encode(self, key: Key, x: Array, count: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """The payload of a batch, and the state for the next step."""
        ...

    def decode(self, key: Key, payload: PyTree, like: ArrayLike, side: Any = None) -> Array:
        """The batch that a payload stands for, in the shape and dtype of `like`."""
        ...


@runtime_checkable
class Feedback(Protocol):
    """A sender's memory: what to send, and what to make of what came back.

    It sees the compressed leaves as one `[buckets, size]` array for each batch, but any tree of
    arrays will do: it must treat every element alike. The state of one whose receivers remember
    something too is a `Mirrored`. Two methods more are optional: `unsent(state)`, what of past
    messages has not arrived yet and will be sent later; `check(codec, size)`, which raises a
    `ValueError` for a codec of such buckets that it does not go with.

    Attributes:
        kind: what the memory is ("residual", "momentum", "shift", …); `resize_workers` moves it
            by this.
        mirrors (optional, by default False): whether its state is a `Mirrored`.
        bounded (optional, by default False): whether its memory stays finite wherever the mean of
            the messages is; if not, workers tell each other of a memory that does not.
    """

    @property
    def kind(self) -> str: ...

    def init(self, like: PyTree, part_like: PyTree) -> PyTree:
        """Memory for messages like `like`, on a device that holds `part_like` of their mean."""
        ...

    def compensate(self, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The message to send in place of `x`."""
        ...

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
        ...


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


@runtime_checkable
class Gate(Protocol):
    """When, and who, communicates.

    Its state is the same on all workers. More is optional: `check(feedback)`, which raises a
    `ValueError`, or warns, for a feedback that it does not go with; and `measures`, True if `open`
    looks at the messages.

    Attributes:
        closes: whether there are steps in which nobody sends.
        idles (optional, by default False): whether it closes only where nobody takes part, so that
            a round may as well be opened there.
    """

    @property
    def closes(self) -> bool: ...

    def factor(self, workers: int) -> float:
        """What the sum of all messages that are sent is multiplied by to stand for all of them."""
        ...

    def init(self, like: PyTree) -> PyTree:
        """State for parameters like these; `()` for the many that have none."""
        ...

    def open(
        self,
        key: Array,
        tree: PyTree,
        state: PyTree,
        axis_name: AxisName,
        params: PyTree | None = None,
    ) -> Opened:
        """Who sends in this step, from its key, this worker's messages and the parameters."""
        ...


@runtime_checkable
class Reducer(Protocol):
    """How the links of all workers become one mean, in two halves.

    `collect` brings this device its part of the mean, `spread` brings every part to every device.
    Both see the compressed leaves only, as one `[buckets, size]` array for each batch of
    `trees.layout`; leaves that the policy leaves dense pass through `dense`. More is optional:

    * `batches_link_bytes(batches, workers)`: what of `link_bytes` the compressed leaves make up,
      so that it may be part of another reducer;
    * `efforts(batches, workers)`: pairs of a link, or a reducer, and the `theory.cost.Effort` that
      is made for it, by which `plan` knows how long a mean takes;
    * `fitted(batches, state, axis_name)`: the state for these workers, of one that may have been
      made outside of the mapped function;
    * `splits`: True if the part of the mean that `collect` brings to a device is a share of it;
    * `shares(workers)`: into how many buckets to cut a leaf whose codec takes it whole;
    * `enter(batches, message, axis_name)` and `leave(batches, mean, axis_name)`: what comes before
      the feedback and after `spread`; the batches between are `within(batches, axis_name)`;
    * `phases`, pairs of a start and a reducer, and `phase(state)`, the number of the one that the
      next step is in, of a reducer that changes with time;
    * `unchanged(batches, part, state, axis_name)`: of one with a way down, the mean that every
      device knows when nothing is sent, where `part` is this device's, from the uplink's mirror;
    * `payload_bytes(batches)`, what each batch accounts for, where other things are sent than the
      codecs' payloads;
    * `for_small_leaves`, what to write to have small leaves compressed, where that is not a policy.
    """

    @property
    def uplink(self) -> Any:
        """The `Link` from the workers, or None where every leaf travels as it is."""
        ...

    def init(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """State for batches like these."""
        ...

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """Shape and dtype of this device's part of the mean of each batch."""
        ...

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
        ...

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> tuple[Stacks, PyTree]:
        """The whole mean, the same on every device."""
        ...

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        """The mean of leaves that travel as they are."""
        ...

    def link_bytes(self, like: PyTree, workers: Any) -> int:
        """Bytes that one device sends for the whole reduction over `workers` workers: a number, or
        one for each axis.
        """
        ...

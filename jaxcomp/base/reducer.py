"""The interface of a reducer, which computes the mean over all workers' links."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from jaxcomp.base import interface
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks


class Collected(NamedTuple):
    """The result of the first half of a reduction on this device.

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


class Reducer(Interface, abstract=True):
    """Computes the mean over all workers' links, in two halves.

    `collect` computes this device's part of the mean; `spread` sends every part to every device.
    Both see only the compressed leaves, as one `[buckets, size]` array for each batch of
    `trees.layout`; dense leaves go through `dense`.

    Attributes:
        uplink: the `Link` from the workers, or None if every leaf is sent dense.
        downlink: the `Link` back to the workers, or None if there is nothing to send back.
        splits: whether `collect` gives a device only a slice of the mean, not all of it.
        hierarchical: whether it reduces over two levels of axes, so that `workers` is a tuple.
        scheduled: whether it changes with time; then `schedule` has several entries.
        collectives: the maximum number of collectives that the payload is split into each way; None
            for a number that depends on the size.
        over: "workers" for the mean over all workers, "senders" for the mean over the workers that
            sent an element.
        excludes: whether non-finite messages are left out of the mean, so that a worker with one
            must keep its own memory as it was.
        alike: whether every worker gets the same result. If not, the result and a receiver's mirror
            are this worker's own, and `compressed_mean`, which moves replicated parameters, refuses
            the reducer.
        dtype: the dtype in which dense leaves are sent; None for their own.
        for_small_leaves: advice on compressing small leaves too, for messages.
    """

    uplink: Any
    downlink = None
    splits = False
    hierarchical = False
    scheduled = False
    collectives: int | None = 1
    over = "workers"
    excludes = False
    alike = True
    dtype: str | None = None
    for_small_leaves = "jaxcomp.Policy(codec, min_size=0, min_ndim=0) compresses everything"

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> "Reducer":
        """The reducer to use for these batches and axes of these sizes; by default itself."""
        del batches, workers
        return self

    def resolved_state(self, resolved: "Reducer", state: PyTree) -> PyTree:
        """Converts this reducer's state to that of the `resolved` reducer."""
        del resolved
        return state

    def unresolved_state(self, resolved: "Reducer", after: PyTree, state: PyTree) -> PyTree:
        """Converts the `resolved` reducer's state `after` a step back to this reducer's state."""
        del resolved, state
        return after

    def shares(self, workers: tuple[int, ...]) -> int:
        """The number of buckets into which to cut a leaf whose codec has no bucket size."""
        del workers
        return 1

    def link_axis(self, axis_name: AxisName) -> AxisName:
        """The axes that the links cross."""
        return axis_name

    def within(self, batches: Batches, axis_name: AxisName) -> Batches:
        """The batches that the links see, between `pre_reduce` and `post_reduce`."""
        del axis_name
        return batches

    def pre_reduce(self, batches: Batches, message: Stacks, axis_name: AxisName) -> Stacks:
        """Communicates before the feedback; by default not at all."""
        del batches, axis_name
        return message

    def post_reduce(self, batches: Batches, mean: Stacks, axis_name: AxisName) -> Stacks:
        """Communicates after `spread`; by default not at all."""
        del batches, axis_name
        return mean

    def init(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """The state for batches like these; `()` for none."""
        del batches, axis_name
        return ()

    def fitted(self, batches: Batches, state: PyTree, axis_name: AxisName) -> PyTree:
        """Adapts state initialised outside the mapped function to the current workers."""
        del batches, axis_name
        return state

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """Shape and dtype of this device's part of each batch's mean; by default all of it."""
        del axis_name
        return tuple(batch.like for batch in batches)

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
        """Computes this device's part of the mean of all messages."""

    def spread(
        self, key: Array, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> tuple[Stacks, PyTree]:
        """Computes the whole mean, the same on every device."""
        del key, batches, axis_name
        return part, state

    def unchanged(
        self, batches: Batches, part: Stacks, state: PyTree, axis_name: AxisName
    ) -> Stacks:
        """The mean in a closed round, from each device's part of a mirror."""
        del batches, state, axis_name
        return part

    @abc.abstractmethod
    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array]:
        """The mean of the dense leaves."""

    @abc.abstractmethod
    def link_bytes(self, like: PyTree, workers: Any) -> int:
        """Bytes that one device sends for the whole reduction over `workers` workers.

        It is one number, or one for each axis.
        """

    def batches_link_bytes(self, batches: Batches, workers: Any) -> Any:
        """The part of `link_bytes` for the compressed leaves."""
        raise NotImplementedError(f"{self!r} cannot be part of another reducer")

    @interface.derived
    def composes(self) -> bool:
        """Whether it may be part of another reducer."""
        return type(self).batches_link_bytes is not Reducer.batches_link_bytes

    def payload_bytes(self, batches: Batches) -> tuple[float, ...] | None:
        """Payload bytes of each batch; None if the codecs' payloads are what is sent."""
        del batches
        return None

    def efforts(self, batches: Batches, workers: Any) -> tuple[tuple[Any, Any], ...] | None:
        """Pairs of a link or reducer and its `theory.cost.Effort`.

        `plan` forecasts times from them; None if they are not known.
        """
        del batches, workers
        return None

    @interface.derived
    def schedule(self) -> "tuple[tuple[int, Reducer], ...]":
        """Pairs of a first step and the reducer used from that step on."""
        return ((0, self),)

    def phase(self, state: PyTree) -> Any:
        """The index of the next step's phase."""
        del state
        return 0


class WrappedReducer(Reducer, abstract=True):
    """A reducer around another one, `reducer`; it forwards every hook that it does not define."""

    reducer: Reducer

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> Reducer:
        """This wrapper around the resolved reducer."""
        inner: Any = self.reducer.resolve(batches, workers)
        if inner == self.reducer:
            return self
        settings: Any = {"reducer": inner}
        return dataclasses.replace(cast(Any, self), **settings)

    def resolved_state(self, resolved: Reducer, state: PyTree) -> PyTree:
        return self.reducer.resolved_state(cast(WrappedReducer, resolved).reducer, state)

    def unresolved_state(self, resolved: Reducer, after: PyTree, state: PyTree) -> PyTree:
        inner = cast(WrappedReducer, resolved).reducer
        return self.reducer.unresolved_state(inner, after, state)

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


_OF_TIME = {"scheduled", "schedule", "phase"}
"""A wrapper is one reducer for all times, whatever is in it."""
interface.forward(
    WrappedReducer, "reducer", tuple(n for n in interface.hooks(Reducer) if n not in _OF_TIME)
)

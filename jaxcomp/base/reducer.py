"""A reducer: how the links of all workers become one mean."""

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

    def pre_reduce(self, batches: Batches, message: Stacks, axis_name: AxisName) -> Stacks:
        """The exchange before the feedback: none for most reducers."""
        del batches, axis_name
        return message

    def post_reduce(self, batches: Batches, mean: Stacks, axis_name: AxisName) -> Stacks:
        """The exchange after `spread`: none for most reducers."""
        del batches, axis_name
        return mean

    def init(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """State for batches like these; `()` for none."""
        del batches, axis_name
        return ()

    def fitted(self, batches: Batches, state: PyTree, axis_name: AxisName) -> PyTree:
        """The state for the workers here, from one that may have been made for one worker."""
        del batches, axis_name
        return state

    def part_like(self, batches: Batches, axis_name: AxisName) -> PyTree:
        """Shape and dtype of this device's part of the mean of each batch: all of it, for most."""
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

    def resolve(self, batches: Batches, workers: tuple[int, ...]) -> Reducer:
        """This wrapper, around the resolved reducer."""
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

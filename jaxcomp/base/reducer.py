"""The interface of a reducer, which computes the mean over all workers' links."""

import abc
import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from jaxcomp.base import interface
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, AxisName, PyTree, Stacks


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


class Costs(NamedTuple):
    """The cost of the compressed leaves of a plan to one device.

    Attributes:
        link_bytes: the bytes that the device sends over its link, those of agreements included.
        efforts: pairs of a link or reducer and its `theory.cost.Effort`, from which `plan`
            forecasts times; None if they are not known.
        payload_bytes: the payload bytes of each batch; None for those of the codecs.
    """

    link_bytes: Fraction | int
    efforts: tuple[tuple[Any, Any], ...] | None = None
    payload_bytes: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ReducerFacts:
    """What a reducer declares about itself, for transforms, plans and gates.

    Attributes:
        splits: whether `collect` gives a device only a slice of the mean, not all of it.
        same_on_all: whether every worker gets the same result. If not, the result and a receiver's
            mirror are this worker's own, and `compressed_mean`, which moves replicated parameters,
            refuses the reducer.
        excludes: whether non-finite messages are left out of the mean, so that a worker with one
            must keep its own memory as it was.
        over: "workers" for the mean over all workers, "senders" for the mean over the workers that
            sent an element.
        composes: whether it may be the slow level of another reducer.
        collectives: the maximum number of collectives that the payload is split into each way; None
            for a number that depends on the size.
        dtype: the dtype in which dense leaves are sent; None for their own.
        levels: a dense reducer over the last axis and a reducer over the other axes, of which this
            one consists; None for a reducer of one level.
        phases: pairs of a first step and the reducer from that step on, if it changes with time;
            its state then has the field `phase_step`.
        for_small_leaves: advice on compressing small leaves too, for messages.
    """

    splits: bool = False
    same_on_all: bool = True
    excludes: bool = False
    over: str = "workers"
    composes: bool = True
    collectives: int | None = 1
    dtype: str | None = None
    levels: "tuple[Any, Any] | None" = None
    phases: "tuple[tuple[int, Any], ...]" = ()
    for_small_leaves: str = "jaxcomp.Policy(codec, min_size=0, min_ndim=0) compresses everything"


class Reducer(Interface, abstract=True):
    """Computes the mean over all workers' links, in two halves.

    `collect` computes this device's part of the mean; `spread` sends every part to every device.
    Both see only the compressed leaves, as one `[buckets, size]` array for each batch of the
    `exchange.plan.Plan`; dense leaves go through `dense`.

    Attributes:
        uplink: the `Link` from the workers, or None if every leaf is sent dense.
        downlink: the `Link` back to the workers, or None if there is nothing to send back.
        facts: what the reducer declares about itself.
    """

    uplink: Any
    downlink: Any = None
    facts = ReducerFacts()

    def init(self, plan: Any) -> PyTree:
        """The state before the first step; `()` for none."""
        del plan
        return ()

    @abc.abstractmethod
    def collect(
        self, plan: Any, key: Array, message: Stacks, state: PyTree, weight: Array | None = None
    ) -> Collected:
        """Computes this device's part of the mean of all messages."""

    def spread(self, plan: Any, key: Array, part: Stacks, state: PyTree) -> tuple[Stacks, PyTree]:
        """Computes the whole mean, the same on every device."""
        del plan, key
        return part, state

    def known(self, plan: Any, part: Stacks, state: PyTree) -> Stacks:
        """The mean in a closed round, from each device's part of a mirror."""
        del plan, state
        return part

    def dense(
        self, leaves: Sequence[Array], axis_name: AxisName, weight: Array | None = None
    ) -> Sequence[Array] | None:
        """The mean of the dense leaves; None, the default, for one all-reduce for each dtype."""
        del leaves, axis_name, weight
        return None

    @abc.abstractmethod
    def costs(self, plan: Any) -> Costs:
        """The bytes and efforts of the compressed leaves; the plan adds those of dense leaves.

        `plan.encoded_bytes` and `plan.agreed_bytes` are known here; what follows from the costs, as
        `plan.batch_bytes` and `plan.link_bytes` do, is not.
        """


class WrappedReducer(Reducer, abstract=True):
    """A reducer around another one, `reducer`; it forwards every hook that it does not define."""

    reducer: Reducer

    def collect(
        self, plan: Any, key: Array, message: Stacks, state: PyTree, weight: Array | None = None
    ) -> Collected:
        return self.reducer.collect(plan, key, message, state, weight)

    def costs(self, plan: Any) -> Costs:
        return self.reducer.costs(plan)


interface.forward(WrappedReducer, "reducer", interface.hooks(Reducer))

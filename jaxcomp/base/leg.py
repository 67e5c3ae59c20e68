"""The interfaces of a leg: how payloads move between workers, and what a device makes of them."""

import abc
import dataclasses
from fractions import Fraction
from typing import Any, NamedTuple

from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks


@dataclasses.dataclass(frozen=True)
class Leg:
    """A leg of a reducer's route: every worker encodes, sends, and combines what it receives.

    Args:
        move: how payloads move between the workers.
        link: the `Link` whose codec encodes them. The feedback of the first leg's link is that of
            the workers; on a later leg it is a memory of the part of the mean that a worker sends.
        combine: what a device makes of the payloads that it receives.
    """

    move: "Move"
    link: Any
    combine: "Combine"


class Heard(NamedTuple):
    """The payloads that a device received.

    Attributes:
        payloads: the payload of every batch, as the move gives it: with a leading axis of senders,
            or added up, or one tree for each neighbour.
        weights: the weight of each sender; None for all ones.
        share: `Σ wᵢ / n` over all workers.
    """

    payloads: Any
    weights: Any
    share: Array | float


class Outcome(NamedTuple):
    """The result of a leg on a device.

    Attributes:
        value: this device's rows of the result.
        sent: this worker's own message as the others decoded it.
        share: `Σ wᵢ / n` over the workers whose messages are in the result.
        state: the combination's state for the next step.
    """

    value: Stacks
    sent: Stacks
    share: Array | float
    state: PyTree = ()


class Move(Interface, abstract=True):
    """Moves payloads between the workers.

    Attributes:
        splits: whether a device receives only its slice of the rows of each worker.
        same_on_all: whether every worker receives the same, or a slice of the same.
        collectives: the maximum number of collectives that the payload is split into; None for a
            number that depends on the size.
        delay: seconds that a message takes one way, by which messages are sent at once or one after
            another; None for what is assumed.
        gives: the form of the received payloads: "senders" for those of all workers, with a leading
            axis; "sum" for one; "neighbours" for a list.
    """

    splits = False
    gives = "senders"
    same_on_all = True
    collectives: int | None = 1
    delay: float | None = None

    def encodes(self, batches: Batches, workers: int) -> Batches:
        """The batches as a worker encodes them, such as with codecs whose payloads add up."""
        del workers
        return batches

    def arrives(self, batches: Batches, workers: int, axis_name: AxisName) -> Batches:
        """The rows of one sender that a device receives, of the encoded batches."""
        del workers, axis_name
        return batches

    def init(self) -> PyTree:
        """The state before the first step, the same on all workers; `()` for none."""
        return ()

    @abc.abstractmethod
    def run(
        self, stage: Any, key: Array, sent: Any, weight: Array | None, state: PyTree
    ) -> tuple[Heard, PyTree]:
        """Moves the payloads of `sent`, an `exchange.send.Sent`, along a stage of the plan."""

    @abc.abstractmethod
    def link_bytes(self, stage: Any) -> Fraction | int:
        """The bytes that one device sends for the payloads of a stage."""

    @abc.abstractmethod
    def messages(self, stage: Any) -> float:
        """The number of sequential messages."""


class Combine(Interface, abstract=True):
    """Makes a device's rows of the result of the payloads that it received.

    Attributes:
        excludes: whether non-finite messages are left out, so that a worker with one must keep its
            own memory as it was.
        over: "workers" for the mean over all workers, "senders" for the mean over the workers that
            sent an element, "one" and "each" for results that are no mean, for collectives.
        takes: the form of the payloads, `gives` of a move; "slices" on a further leg.
        slices: whether it works on slices of the rows.
    """

    excludes = False
    over = "workers"
    takes = "senders"
    slices = True

    def check(self, link: Any) -> None:
        """Raises a `ValueError` if messages of this link cannot be combined so."""
        del link

    def init(self, stage: Any) -> PyTree:
        """The state before the first step, the same on all workers; `()` for none."""
        del stage
        return ()

    @abc.abstractmethod
    def run(self, stage: Any, key: Array, heard: Heard, sent: Any, state: PyTree) -> Outcome:
        """Combines payloads along a stage of the plan; `sent` is this worker's own message."""

    def effort(self, stage: Any) -> tuple[float, float]:
        """How often each received element is decoded, and how many further payloads are added."""
        return 1.0, stage.workers - 1

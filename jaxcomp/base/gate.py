"""The interface of a gate, which decides when, and which workers, communicate."""

import abc
from typing import NamedTuple

from jaxcomp.base.feedback import Feedback
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, AxisName, PyTree


class Opened(NamedTuple):
    """A gate's answer for a step.

    Attributes:
        go: bool scalar, whether any worker sends; the same on all workers, so that it may guard
            collectives.
        weight: this worker's mask, float32: 1.0 if it participates, else 0.0. None if all do.
        state: the gate's state for the next step.
    """

    go: Array
    weight: Array | None
    state: PyTree


class Gate(Interface, abstract=True):
    """Decides when, and which workers, communicate. Its state is the same on all workers.

    Attributes:
        closes: whether there are steps in which no worker sends.
        idles: whether a round is closed only because no worker participates, so that opening it
            gives the same result.
        measures: whether `open` looks at the messages.
    """

    closes: bool
    idles = False
    measures = False

    def check(self, feedback: Feedback) -> None:
        """Raises a `ValueError`, or warns, if this gate cannot be used with `feedback`."""
        del feedback

    def factor(self, workers: int) -> float:
        """The factor that makes the sum of the sent messages an estimate of the sum of all."""
        del workers
        return 1.0

    def init(self, like: PyTree) -> PyTree:
        """The gate's state for parameters like these; `()` for a gate without state."""
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
        """Decides who sends in this step, from its key, this worker's messages and parameters."""

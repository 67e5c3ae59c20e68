"""A gate: when, and which workers, communicate."""

import abc
from typing import NamedTuple

from jaxcomp.base.feedback import Feedback
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, AxisName, PyTree


class Opened(NamedTuple):
    """A gate's answer for a step.

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
        """The factor by which the sum of the sent messages stands for the sum of all."""
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
        """Decides who sends in this step, by its key, this worker's messages and the parameters."""

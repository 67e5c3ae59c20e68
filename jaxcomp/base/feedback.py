"""The interface of a feedback: the memory of a sender."""

import abc
from typing import NamedTuple

from jaxcomp.base import interface
from jaxcomp.base.codec import Codec
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree


class Feedback(Interface, abstract=True):
    """A sender's memory: chooses the message to send, and computes the estimate of the mean.

    It sees the compressed leaves as one `[buckets, size]` array for each batch, but must work for
    any tree of arrays, element by element. If the receivers have memory too, its state is a
    `Mirrored`.

    Attributes:
        kind: the kind of memory ("residual", "momentum", "shift", …), which tells `resize_workers`
            how to move it.
        mirrors: whether its state is a `Mirrored`.
        bounded: whether its memory is finite whenever the mean of the messages is; if not, workers
            exchange a flag for non-finite memory.
        absent: the message of a non-participating worker is "remembered" in the memory, or
            "left out" of it.
        step: the step size `a` of a shift.
        decay: the fraction of a residual that is kept.
    """

    kind: str
    mirrors = False
    bounded = False
    absent = "remembered"
    step: float | None = None
    decay = 1.0

    def check(self, codec: Codec, size: int | None) -> None:
        """Raises a `ValueError` if this feedback cannot be used with `codec` and bucket `size`."""
        del codec, size

    @abc.abstractmethod
    def init(self, like: PyTree, part_like: PyTree) -> PyTree:
        """The memory for messages like `like` on a device whose part of the mean is `part_like`."""

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

    def known(self, sent: PyTree, state: PyTree) -> PyTree:
        """What the receivers know of this worker's input after a message.

        Args:
            sent: the message as they decoded it.
            state: the memory before the message.
        """
        del state
        return sent

    def unsent(self, state: PyTree) -> PyTree:
        """The unsent part of past messages, which will be sent later."""
        del state
        return ()

    @interface.derived
    def keeps_unsent(self) -> bool:
        """Whether `unsent` returns arrays."""
        return type(self).unsent is not Feedback.unsent


class WrappedFeedback(Feedback, abstract=True):
    """A feedback around another one, `feedback`; it forwards every hook that it does not define."""

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
    """The memory of a feedback whose receivers have memory too.

    Attributes:
        own: this sender's memory.
        mirror: a receiver's copy of the senders' mean memory, in the shape of its part of the mean;
            the same on every device that holds the same part.
    """

    own: PyTree
    mirror: PyTree

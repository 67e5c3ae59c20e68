"""A feedback: the memory of a sender."""

import abc
from typing import NamedTuple

from jaxcomp.base import interface
from jaxcomp.base.codec import Codec
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree


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

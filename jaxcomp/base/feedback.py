"""The interface of a feedback: the memory of a sender."""

import abc
import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from jaxcomp.base import interface
from jaxcomp.base.codec import Codec
from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class FeedbackFacts:
    """Facts that a feedback declares, for links, gates, reducers and clients.

    Attributes:
        memory: whether it has any memory.
        mirrors: whether its state is a `Mirrored`.
        bounded: whether its memory is finite whenever the mean of the messages is; if not, workers
            exchange a flag for non-finite memory.
        keeps_unsent: whether `unsent` returns arrays, which later messages send.
        conserves: whether the sent and the unsent parts add up to the sum of all inputs.
        accelerates: whether its messages contain momentum; dense leaves then need a momentum of
            their own.
        needs_mean: whether `update` needs the whole mean of all messages as its `part`.
        forgets_absent: whether the estimate leaves out the memories of non-participating workers.
    """

    memory: bool = True
    mirrors: bool = False
    bounded: bool = False
    keeps_unsent: bool = False
    conserves: bool = False
    accelerates: bool = False
    needs_mean: bool = False
    forgets_absent: bool = False


class Feedback(Interface, abstract=True):
    """A sender's memory: chooses the message to send, and computes the estimate of the mean.

    It sees the compressed leaves as one `[buckets, size]` array for each batch, but must work for
    any tree of arrays, element by element. If the receivers have memory too, its state is a
    `Mirrored`.

    Attributes:
        facts: what the feedback declares about itself.
    """

    facts = FeedbackFacts()

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
        """This worker's input as the receivers know it after a message.

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


_SENT_LATER: dict[type, str] = {}
_State = TypeVar("_State", bound=type)


def sent_later(field: str) -> Callable[[_State], _State]:
    """Declares which field of a feedback's state is sent later, whatever is added to it.

    `jaxcomp.resize_workers` adds to it what a downlink has not sent, if the new workers have no
    downlink. A decorator of the state's class.

    Example:
        >>> @sent_later("rest")
        ... class Kept(NamedTuple):
        ...     rest: PyTree
        >>> sent_later_of(Kept(rest=1))
        'rest'
    """

    def declared(cls: _State) -> _State:
        _SENT_LATER[cls] = field
        return cls

    return declared


def sent_later_of(state: PyTree) -> str | None:
    """The field of this state that is sent later; None if there is none."""
    return _SENT_LATER.get(type(state))


class Mirrored(NamedTuple):
    """The memory of a feedback whose receivers have memory too.

    Attributes:
        own: this sender's memory.
        mirror: a receiver's copy of the senders' mean memory, in the shape of its part of the mean;
            the same on every device that holds the same part.
    """

    own: PyTree
    mirror: PyTree

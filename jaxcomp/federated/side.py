"""Side information: what the receiver of a message knows beside it."""

import dataclasses

from jaxcomp.base.interface import Interface
from jaxcomp.types import PyTree


class Side(Interface, abstract=True):
    """Side information of the decoder of a client's message, for codecs that use it.

    Three kinds of memory: `shared` is the same on the server and all clients, and follows from the
    parameters that all know; `own` is a client's; `row` is the server's of one client. A guess has
    the structure of the message, with a leading axis of alternatives; as the codec's state it is
    `[alternatives, buckets, size]` for each batch.

    Attributes:
        decodes: whether the server decodes with guesses, too; else messages are decoded from
            themselves, and may be late.
        of_round: whether the server's guesses are those of one round, so that it cannot decode a
            message that comes later; else they follow from what the client has sent before.
    """

    decodes = True
    of_round = True

    def shared(self, params: PyTree) -> PyTree:
        """The knowledge of the server and all clients before the first round."""
        del params
        return ()

    def own(self, params: PyTree) -> PyTree:
        """A client's knowledge before its first message."""
        del params
        return ()

    def row(self, params: PyTree) -> PyTree:
        """The server's knowledge of a client before its first message."""
        del params
        return ()

    def at_client(self, shared: PyTree, own: PyTree, params: PyTree) -> PyTree | None:
        """The guesses with which a client encodes; None for none."""
        del shared, own, params
        return None

    def at_server(self, shared: PyTree, row: PyTree, params: PyTree) -> PyTree | None:
        """The guesses with which the server decodes; None for none."""
        del shared, row, params
        return None

    def sent(self, own: PyTree, message: PyTree) -> PyTree:
        """The client's knowledge once its message, as the server decodes it, is accepted."""
        del message
        return own

    def heard(self, row: PyTree, message: PyTree) -> PyTree:
        """The server's knowledge of a client whose decoded message it accepted."""
        del message
        return row

    def learn(self, shared: PyTree, before: PyTree, after: PyTree) -> PyTree:
        """The knowledge of all after the parameters went from `before` to `after`."""
        del before, after
        return shared


@dataclasses.dataclass(frozen=True)
class NoSide(Side):
    """No side information: a message is decoded from itself."""

    decodes = False

"""The interface of an aggregate: how the decoded messages of all workers become one."""

import jax

from jaxcomp.base import interface
from jaxcomp.base.interface import Interface
from jaxcomp.numerics import addition
from jaxcomp.types import Array, PyTree


class Aggregate(Interface, abstract=True):
    """Combines the decoded messages of all workers to one, which replaces their mean.

    A message is a tree of arrays; `messages` has the same tree with a leading axis of workers, and
    `weights` is `float32[workers]`. An absent worker has weight zero, and its message must not
    influence the result, even if it is not finite. At least one weight is positive, or the result
    is zero. No hook communicates, so that an aggregate works in a collective, where every worker
    has all messages and computes the same, and on a server.

    An aggregate defines `prepare`, and is a mean of prepared messages, or `combine`.

    Attributes:
        linear: whether the result is the weighted mean of the messages, so that their sum may be
            decoded at once, and a worker may send later what was lost in its message.
    """

    linear = False

    @interface.derived
    def streams(self) -> bool:
        """Whether the result is the weighted mean of the prepared messages.

        A server then adds up messages as they arrive, and need not hold all of them.
        """
        return type(self).combine is Aggregate.combine

    def init(self, like: PyTree, workers: int) -> PyTree:
        """The state before the first round; `()` for an aggregate without state.

        Every array of a state has a leading axis of workers, so that a server that samples clients
        can select their rows.

        Args:
            like: shapes and dtypes of one message.
            workers: the number of workers.
        """
        del like, workers
        return ()

    def prepare(self, message: PyTree) -> PyTree:
        """The message to add in place of one worker's `message`; by default itself."""
        return message

    def combine(self, messages: PyTree, weights: Array, state: PyTree) -> tuple[PyTree, PyTree]:
        """The combined message, and the state for the next round.

        By default `Σ wᵢ · prepare(messageᵢ) / Σ wᵢ`, added in the order of the workers.
        """
        prepared = jax.vmap(self.prepare)(messages)
        return jax.tree.map(lambda rows: addition.weighted_mean(rows, weights), prepared), state

"""The interface of a period: how many steps workers take alone before they exchange."""

import abc

from jaxcomp.base.interface import Interface
from jaxcomp.types import Array, PyTree


class Period(Interface, abstract=True):
    """Decides the number of local steps in each round. Its state is the same on all workers.

    Attributes:
        measures: whether `after` needs the variance of the workers' models, which costs one scalar
            in each exchange.
    """

    measures = False

    def init(self) -> PyTree:
        """The state before the first round; `()` for a period without state."""
        return ()

    @abc.abstractmethod
    def steps(self, state: PyTree, taken: Array) -> Array:
        """The number of steps of the current round, at least one.

        Args:
            state: the state.
            taken: int32 scalar, the number of steps before this round.
        """

    def after(self, state: PyTree, taken: Array, variance: Array | None) -> PyTree:
        """The state after an exchange.

        Args:
            state: the state.
            taken: int32 scalar, the number of steps, with those of the round that ends.
            variance: `(1/n) Σᵢ ‖θᵢ − θ̄‖²` of the models before the exchange, if `measures`.
        """
        del taken, variance
        return state

"""The interface of a graph: which workers hear each other in a round of gossip."""

import abc

import numpy as np

from jaxcomp.base.interface import Interface


class Graph(Interface, abstract=True):
    """The mixing matrices of gossip: `W[i, j]` is the weight of worker `j`'s message at worker `i`.

    Every matrix is doubly stochastic, so that rounds keep the mean of all workers. A static graph
    has one matrix, others have several.

    Attributes:
        drawn: whether each round draws one of the matrices with the step's key; else they take
            turns.
        silent: the workers without any neighbour; all others must agree in the end.
    """

    drawn = False
    silent: tuple[int, ...] = ()

    @abc.abstractmethod
    def matrices(self, workers: int) -> tuple[np.ndarray, ...]:
        """The mixing matrices of this many workers, `[workers, workers]` in float64.

        Raises:
            ValueError: if the graph is not one of this many workers.
        """

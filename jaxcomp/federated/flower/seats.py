"""Which of Flower's nodes is which client, and what the server knows of each client."""

from collections.abc import Iterable, Mapping

import numpy as np


class Seats:
    """Gives nodes the numbers of clients.

    A new node gets the lowest free number, nodes in ascending order of their ids. If no number is
    free, it gets that of a node that is gone.

    Args:
        clients: how many clients there are.
        numbers: the number of each node, for nodes with lasting ids; no other nodes take part.

    Attributes:
        has: for each client the round whose centre it has, as far as the server knows; -1 for none.
        accepted: the last round in which the server accepted its message; -1 for none.

    Example:
        >>> seats = Seats(2)
        >>> seats.seated([77, 55])
        {0: 55, 1: 77}
        >>> seats.seated([99, 77])
        {0: 99, 1: 77}
    """

    def __init__(self, clients: int, numbers: Mapping[int, int] | None = None):
        self.clients = clients
        self._fixed = None if numbers is None else dict(numbers)
        self._nodes: dict[int, int] = {}
        self.has = np.full(clients, -1)
        self.accepted = np.full(clients, -1)
        if self._fixed is not None:
            taken = sorted(self._fixed.values())
            if len(set(taken)) < len(taken) or not set(taken) <= set(range(clients)):
                raise ValueError(
                    f"`numbers` must give each node another number from 0 to {clients - 1}, "
                    f"got {taken[:20]}"
                )

    def seated(self, nodes: Iterable[int]) -> dict[int, int]:
        """The node of each client that is connected, in ascending order of clients."""
        present = set(nodes)
        if self._fixed is not None:
            found = ((number, node) for node, number in self._fixed.items() if node in present)
            return dict(sorted(found))
        for node in sorted(present - set(self._nodes.values())):
            free = (n for n in range(self.clients) if n not in self._nodes)
            gone = (n for n in range(self.clients) if self._nodes.get(n) not in present)
            number = next(free, next(gone, None))
            if number is None:
                break
            self._nodes[number] = node
            self.has[number] = -1
        return {n: self._nodes[n] for n in sorted(self._nodes) if self._nodes[n] in present}

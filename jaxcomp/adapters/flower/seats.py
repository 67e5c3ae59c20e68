"""Which of Flower's nodes is which client, and what the server knows of each client."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.adapters.flower.server_round import log

BEHIND = -2
"""In place of a round: a client that could not follow, and needs the parameters by message."""

_NOBODY = -1
"""The round in which a free seat was taken."""


class Seated(NamedTuple):
    """Everything that a checkpoint holds of the seats, an element for each client.

    Attributes:
        nodes: the node of each client, `uint64`.
        seen: the last call in which its node was connected; -1 for a free seat.
        accepted: the last round in which the server accepted its message; -1 for none.
    """

    nodes: np.ndarray
    seen: np.ndarray
    accepted: np.ndarray


class Seats:
    """Gives nodes the numbers of clients: its weight, its data and what the server knows of it.

    A new node gets the lowest free number, nodes in ascending order of their ids. A node keeps its
    number while it is away. If no number is free, a new node gets that of the node that has been
    away longest, and begins with a new memory; a node whose number is taken is new when it returns.

    Args:
        clients: how many clients there are.
        numbers: the number of each node, for nodes with lasting ids; no other nodes take part.
        lasting: whether a number is never given to another node. A `Shift` needs that: the server's
            mirror holds what only the first node knows.

    Attributes:
        has: for each client the round whose centre it has, as far as the server knows; -1 for
            none, or `BEHIND`.
        accepted: the last round in which the server accepted its message; -1 for none.

    Example:
        >>> seats = Seats(2)
        >>> seats.seat([77, 55])
        {0: 55, 1: 77}
        >>> seats.seat([99, 77])
        {0: 99, 1: 77}
        >>> seats.seat([55, 77])  # The other node's seat is taken while it is away.
        {0: 55, 1: 77}
    """

    def __init__(
        self, clients: int, numbers: Mapping[int, int] | None = None, lasting: bool = False
    ):
        self.clients, self._lasting = clients, lasting
        self._nodes: dict[int, int] = {}
        self._seen = np.full(clients, _NOBODY)
        self.has = np.full(clients, -1)
        self.accepted = np.full(clients, -1)
        self._fixed = numbers is not None
        if numbers is not None:
            taken = sorted(numbers.values())
            if len(set(taken)) < len(taken) or not set(taken) <= set(range(clients)):
                raise ValueError(
                    f"`numbers` must give each node another number from 0 to {clients - 1}, "
                    f"got {taken[:20]}"
                )
            self._nodes = {number: node for node, number in numbers.items()}

    def seat(self, nodes: Iterable[int]) -> dict[int, int]:
        """The node of each client that is connected, in ascending order of clients."""
        present = set(nodes)
        call = int(self._seen.max(initial=_NOBODY)) + 1
        if not self._fixed:
            for node in sorted(present - set(self._nodes.values())):
                number = self._place(present)
                if number is None:
                    break
                self._nodes[number], self.has[number], self._seen[number] = node, -1, call
        found = {n: self._nodes[n] for n in sorted(self._nodes) if self._nodes[n] in present}
        self._seen[list(found)] = call
        return found

    @property
    def nodes(self) -> dict[int, int]:
        """The node of each client that has one, connected or not."""
        return dict(self._nodes)

    @property
    def away(self) -> list[int]:
        """The clients whose nodes were not connected in the last call of `seat`."""
        call = self._seen.max(initial=_NOBODY)
        return [n for n in sorted(self._nodes) if self._seen[n] < max(call, 0)]

    def wait_for(self, grid: Any, least: int) -> dict[int, int]:
        """`seat` for the nodes of a grid, once so many of them are clients."""
        while len(found := self.seat(nodes := list(grid.get_node_ids()))) < least:
            log.info("configure_train: waits for %d clients, has %d", least, len(found))
            time.sleep(1)
        if len(found) < len(nodes):
            log.info("configure_train: %d nodes have no number", len(nodes) - len(found))
        return found

    def save(self) -> Seated:
        """The arrays for a checkpoint; their shapes never change."""
        nodes = np.array([self._nodes.get(n, 0) for n in range(self.clients)], np.uint64)
        seen = [self._seen[n] if n in self._nodes else _NOBODY for n in range(self.clients)]
        return Seated(nodes, np.array(seen, np.int64), self.accepted.astype(np.int64))

    def take(self, kept: Seated) -> None:
        """Goes on from what `kept` returned; what clients have is not known after a restart."""
        if not self._fixed:
            self._nodes = {
                number: int(node)
                for number, node in enumerate(kept.nodes)
                if kept.seen[number] != _NOBODY
            }
        self._seen, self.accepted = kept.seen.copy(), kept.accepted.copy()
        self.has = np.full(self.clients, -1)

    def _place(self, present: set[int]) -> int | None:
        """The number for a new node: a free one, or that of the node that is away longest."""
        free = next((n for n in range(self.clients) if n not in self._nodes), None)
        if free is not None or self._lasting:
            return free
        gone = [n for n, node in self._nodes.items() if node not in present]
        return min(gone, key=lambda n: (self._seen[n], n), default=None)

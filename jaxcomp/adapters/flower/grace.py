"""Whether a round that has its quorum waits for one more message: by idle seconds of sites."""

from typing import NamedTuple

_OVERDUE = 1.1
"""A node that takes so many times as long as its last message took is no longer waited for."""


class _Expected(NamedTuple):
    """A node that has not answered: when it was asked, and when its answer is likely to come."""

    asked: float
    due: float


class Grace:
    """When nodes answer, and what waiting for the next one costs.

    A node that is expected at `t` and for which the round waits makes those that have answered idle
    until then. If the round ends without it, it is idle itself, from `t` to the end of the next
    round, which takes about as long as this one has. Each of these seconds counts alike, so that a
    round waits for a node if `Σ (t − max(now, fᵢ)) ≤ grace · (L − (t − now))`, where `fᵢ` is when
    the i-th of those that have answered has nothing to do, and `L` is the length of the round so
    far. A node is expected to take as long as for its last message, and not waited for before it
    has sent one.

    Args:
        grace: how many seconds of those that have answered a second of the next one is worth.
    """

    def __init__(self, grace: float):
        self._grace = grace
        self._took: dict[int, float] = {}
        self._waiting: dict[int, float] = {}
        self._free: list[float] = []
        self._begin = 0.0

    def begin(self, now: float) -> None:
        """Begins a round, in which nobody has answered yet."""
        self._begin, self._free = now, []

    def ask(self, node: int, now: float) -> None:
        """Says that a node was asked."""
        self._waiting[node] = now

    def give_up(self, node: int) -> None:
        """Says that the answer of a node is no longer waited for."""
        self._waiting.pop(node, None)

    def came(self, node: int, now: float, *, sent: bool, works: float = 0.0) -> None:
        """Says that a node has answered.

        Args:
            node: the node.
            now: when.
            sent: whether with a message, and not with an error.
            works: seconds for which it has still something to do, as during a `delay`.
        """
        asked = self._waiting.pop(node, None)
        if not sent:
            return
        if asked is not None:
            self._took[node] = now - asked
        works = min(works, self._took.get(node, 0.0)) if works > 0 else 0.0  # It may say NaN.
        self._free.append(now + works)

    def pays(self, now: float) -> bool:
        """Whether waiting for the next message makes fewer seconds idle than not waiting."""
        expected = [
            _Expected(asked, asked + self._took[node])
            for node, asked in self._waiting.items()
            if node in self._took and now <= asked + _OVERDUE * self._took[node]
        ]
        if not expected or not self._grace:
            return False
        due = max(min(one.due for one in expected), now)
        idle = sum(max(due - max(now, free), 0.0) for free in self._free)
        return idle <= self._grace * max(now - self._begin - (due - now), 0.0)

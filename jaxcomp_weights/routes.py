"""The way from the version that a reader has to another one with the fewest bytes."""

import heapq
from collections.abc import Sequence

from jaxcomp_weights.documents import Entry, Id

Hop = tuple[Id | None, Id]
"""A version before, or None for a snapshot, and the version after it."""


def cheapest(
    entries: Sequence[Entry], have: Id | None, want: Id, avoid: frozenset[Hop] = frozenset()
) -> list[Hop] | None:
    """The hops of the way with the fewest bytes; None if there is none.

    Args:
        entries: the versions that are listed.
        have: the version to start from, if any.
        want: the version to reach.
        avoid: hops that cannot be used, such as those with a damaged file.

    Example:
        >>> one, two = Id(0, 1), Id(0, 2)
        >>> entries = [Entry(one, 0, 0.0, ((None, 90),)),
        ...            Entry(two, 0, 0.0, ((None, 80), (one, 5)))]
        >>> cheapest(entries, one, two) == [(one, two)]
        True
        >>> cheapest(entries, None, two) == [(None, two)]
        True
    """
    onward: dict[Id | None, list[tuple[Id, int]]] = {}
    for entry in entries:
        for base, size in entry.ways:
            if (base, entry.id) not in avoid:
                onward.setdefault(base, []).append((entry.id, size))
    best: dict[Id | None, int] = {None: 0}
    if have is not None:
        best[have] = 0
    before: dict[Id, Id | None] = {}
    # By bytes, then by the number of hops.
    queue: list[tuple[int, int, bool, Id]] = [(0, 0, one is None, one or want) for one in best]
    done: set[Id | None] = set()
    while queue:
        bytes_, hops, nothing, at = heapq.heappop(queue)
        node = None if nothing else at
        if node in done:
            continue
        done.add(node)
        if node == want:
            break
        for after, size in onward.get(node, ()):
            total = bytes_ + size
            if after not in done and total < best.get(after, total + 1):
                best[after], before[after] = total, node
                heapq.heappush(queue, (total, hops + 1, False, after))
    if want not in best:
        return None
    found: list[Hop] = []
    at_node: Id | None = want
    while at_node is not None and at_node != have:
        found.append((before[at_node], at_node))
        at_node = before[at_node]
    return found[::-1]


def size(entries: Sequence[Entry], hops: Sequence[Hop]) -> int:
    """The bytes of all files on a way."""
    known = {(base, entry.id): size for entry in entries for base, size in entry.ways}
    return sum(known[hop] for hop in hops)

"""One choice for each of several items, with the least error that a total price allows."""

import itertools
import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def total(rows: Rows, choice: Sequence[int]) -> float:
    """The sum over the items of what the choice has."""
    return math.fsum(row[c] for row, c in zip(rows, choice, strict=True))


def fill(prices: Rows, errors: Rows, room: float) -> list[int]:
    """Choices of small total error, whose total price is within the room.

    The first pass goes along the lower convex hull of each item's errors over its prices, the
    largest gain for a price first. Gains shrink along a hull, so no choices at the price that the
    pass reaches have a smaller error. The second pass spends the rest on the best changes that fit,
    so the error is at most one change of the first pass above the least one.

    Args:
        prices: the price of each choice, for each item.
        errors: the error of each choice, for each item.
        room: the largest total price; if even the cheapest choices exceed it, those are returned.

    Returns:
        The number of the choice of each item.

    Example:
        >>> fill([[1, 2, 4], [1, 2, 4]], [[8, 4, 2], [1, 0.5, 0.2]], room=6)
        [2, 1]
        >>> fill([[1, 2, 4], [1, 2, 4]], [[8, 4, 2], [1, 0.5, 0.2]], room=5)
        [2, 0]

    References:
        Shoham and Gersho, Efficient bit allocation for an arbitrary set of quantizers, 1988.
    """
    hulls = [_hull(p, e) for p, e in zip(prices, errors, strict=True)]
    choice = [hull[0] for hull in hulls]
    left = room - total(prices, choice)
    steps = [
        (_gain(prices[item], errors[item], before, after), item, after)
        for item, hull in enumerate(hulls)
        for before, after in itertools.pairwise(hull)
    ]
    for _, item, after in sorted(steps, key=lambda step: -step[0]):  # Stable: in a hull's order.
        more = prices[item][after] - prices[item][choice[item]]
        if more > left:
            break
        choice[item], left = after, left - more
    while fitting := [
        (item, after)
        for item, after in changes(prices, errors, choice)
        if prices[item][after] - prices[item][choice[item]] <= left
    ]:
        item, after = fitting[0]
        left -= prices[item][after] - prices[item][choice[item]]
        choice[item] = after
    return choice


def changes(prices: Rows, errors: Rows, choice: Sequence[int]) -> list[tuple[int, int]]:
    """An item and a choice of a smaller error for each, by falling gain for a unit of price."""
    found = [
        (_gain(prices[item], errors[item], now, after), item, after)
        for item, now in enumerate(choice)
        for after in range(len(prices[item]))
        if errors[item][after] < errors[item][now]
    ]
    return [(item, after) for _, item, after in sorted(found, reverse=True)]


def _gain(prices: Sequence[float], errors: Sequence[float], before: int, after: int) -> float:
    """The error saved for a unit of price; infinite if the change saves that too."""
    more = prices[after] - prices[before]
    return (errors[before] - errors[after]) / more if more > 0 else math.inf


def _hull(prices: Sequence[float], errors: Sequence[float]) -> list[int]:
    """The choices on the lower convex hull, from the cheapest on."""
    found: list[int] = []
    for number in sorted(range(len(prices)), key=lambda c: (prices[c], errors[c])):
        if found and errors[number] >= errors[found[-1]]:
            continue
        while len(found) > 1 and _gain(prices, errors, found[-1], number) >= _gain(
            prices, errors, found[-2], found[-1]
        ):
            found.pop()
        found.append(number)
    return found

"""One choice for each of several items, with the least error that a total price allows."""

import math
from collections.abc import Sequence

import numpy as np

_UNITS = 2**14
"""The largest number of units into which the budget is divided."""

Rows = Sequence[Sequence[float]]


def total(rows: Rows, choice: Sequence[int]) -> float:
    """The sum of the chosen entry of each row."""
    return math.fsum(row[c] for row, c in zip(rows, choice, strict=True))


def fill(prices: Rows, errors: Rows, room: float) -> list[int]:
    """Choices of the least total error whose total price is within the room.

    Dynamic programming over the room that is left after the cheapest choices, in units of price.
    Whole prices in a room of at most 16,384 are exact; otherwise prices are rounded up to units of
    that fraction of the room, and what the rounding leaves over is spent on the best single
    changes.

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
    """
    cheapest = [
        min(range(len(p)), key=lambda c, p=p, e=e: (p[c], e[c]))
        for p, e in zip(prices, errors, strict=True)
    ]
    left = room - total(prices, cheapest)
    if left <= 0:
        return cheapest
    unit = max(1.0, left / _UNITS)
    best, taken = np.zeros(int(left / unit) + 1), []
    for p, e, low in zip(prices, errors, cheapest, strict=True):
        found = np.full((len(p), len(best)), np.inf)
        for number, (price, error) in enumerate(zip(p, e, strict=True)):
            cost = math.ceil((price - p[low]) / unit)
            if cost < len(best):
                found[number, cost:] = best[: len(best) - cost] + error
        taken.append(found.argmin(axis=0))
        best = found.min(axis=0)
    place, choice = len(best) - 1, []
    for p, numbers, low in zip(reversed(prices), reversed(taken), reversed(cheapest), strict=True):
        choice.append(int(numbers[place]))
        place -= math.ceil((p[choice[-1]] - p[low]) / unit)
    return _spent(prices, errors, choice[::-1], room)


def _spent(prices: Rows, errors: Rows, choice: list[int], room: float) -> list[int]:
    """The best single changes that still fit."""
    left = room - total(prices, choice)
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
    found = []
    for item, now in enumerate(choice):
        for after in range(len(prices[item])):
            saved = errors[item][now] - errors[item][after]
            more = prices[item][after] - prices[item][now]
            if saved > 0:
                found.append((saved / more if more > 0 else math.inf, item, after))
    return [(item, after) for _, item, after in sorted(found, reverse=True)]

"""The decoder of interleaved rANS streams, whose encoder is `jaxcomp.entropy.rans`.

A stream has units of sixteen bits: the number of units of each lane (two units where a lane has
2¹⁶ symbols or more), the lower and the upper half of each lane's state, and the units of each lane.
Symbol `t·lanes + l` is in lane `l`. Lanes are decoded together, from the last symbol to the first;
so are several streams, since numpy's time is that of its calls.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxcomp_weights.alphabets import PRECISION, TOTAL
from jaxcomp_weights.errors import Damaged

_LOW = 1 << 16
_MOST_STEPS = 1 << 14
"""The most symbols of a lane: twice as many as any publisher writes. Each takes a step here."""
UNIT = np.dtype("<u2")


class Coded(NamedTuple):
    """A stream.

    Attributes:
        units: `uint16`.
        count: the number of symbols.
        lanes: how many lanes it has.
        contexts: the table of each symbol, `uint8[count]`; None for the first one.
    """

    units: np.ndarray
    count: int
    lanes: int
    contexts: np.ndarray | None = None


class _Lanes(NamedTuple):
    """The lanes of a stream before its last full step.

    Attributes:
        state: the states, `uint32`.
        place: for each lane, the number of the unit after the next one, in `body`.
        ends: where the units of each lane begin.
        body: the units of the lanes, after one that is not used.
    """

    state: np.ndarray
    place: np.ndarray
    begins: np.ndarray
    body: np.ndarray


def decode(streams: Sequence[Coded], slots: np.ndarray) -> list[np.ndarray]:
    """The symbols of each stream, `uint8`.

    Args:
        streams: the streams; all with contexts, or none.
        slots: `alphabets.slots` of the tables.

    Raises:
        Damaged: unless decoding ends in the initial states with all units read.
    """
    for one in streams:
        if not one.count and one.units.size:
            raise Damaged("a stream without symbols has units")
    order = sorted(
        (number for number, one in enumerate(streams) if one.count),
        key=lambda number: -(streams[number].count // streams[number].lanes),
    )
    found = [np.zeros(one.count, np.uint8) for one in streams]
    if order:
        symbols = _together([streams[number] for number in order], slots)
        for number, its in zip(order, symbols, strict=True):
            found[number] = its
    return found


def _together(streams: list[Coded], slots: np.ndarray) -> list[np.ndarray]:
    """The symbols of streams, of which the first has the most steps."""
    heads = [_begin(one) for one in streams]
    sizes = [one.body.size for one in heads]
    begins = np.cumsum(sizes) - sizes
    state = np.concatenate([one.state for one in heads])
    place = np.concatenate([one.place + at for one, at in zip(heads, begins, strict=True)])
    first = np.concatenate([one.begins + at for one, at in zip(heads, begins, strict=True)])
    body = np.concatenate([one.body for one in heads])
    ends = np.cumsum([one.count for one in streams])
    found = np.empty(ends[-1], np.uint8)
    contexts = None
    if streams[0].contexts is not None:
        contexts = np.concatenate([one.contexts for one in streams if one.contexts is not None])

    def step(its: slice, at: np.ndarray | slice) -> None:
        """Decodes the next symbol of some lanes, to these places."""
        now, unit = state[its], place[its]
        slot = now & (TOTAL - 1)
        if contexts is not None:
            slot |= np.left_shift(contexts[at], PRECISION, dtype=np.uint32)
        entry = slots[slot]
        found[at] = entry
        now >>= PRECISION
        now *= (entry >> 8) & (TOTAL - 1)
        now += entry >> 20
        short = now < _LOW
        np.copyto(now, (now << 16) | body[np.maximum(unit, 0)], where=short)
        unit -= short

    # Symbols after the last full step of each stream.
    lane = 0
    for one, end in zip(streams, ends, strict=True):
        if rest := one.count % one.lanes:
            step(slice(lane, lane + rest), slice(end - rest, end))
        lane += one.lanes
    full = [one.count // one.lanes for one in streams]
    lanes = np.array([one.lanes for one in streams])
    after = np.cumsum(lanes)
    stride = np.repeat(lanes, lanes)
    origin = np.repeat(ends - [one.count for one in streams], lanes)
    origin = origin + np.arange(after[-1]) - np.repeat(after - lanes, lanes)
    active = len(streams)
    while active and not full[active - 1]:
        active -= 1
    for number in range(full[0] - 1, -1, -1):
        active = sum(steps > number for steps in full)
        width = int(after[active - 1])
        if active == 1:
            begin = int(origin[0]) + number * int(lanes[0])
            step(slice(0, width), slice(begin, begin + width))
        else:
            step(slice(0, width), origin[:width] + number * stride[:width])
    if not (np.all(state == _LOW) and np.array_equal(place, first)):
        raise Damaged("a stream does not end in its initial state")
    return np.split(found, ends[:-1])


def least(count: int) -> int:
    """The fewest bytes of a stream of so many symbols: the lengths and states of its lanes."""
    return 3 * UNIT.itemsize * -(-count // _MOST_STEPS)


def _begin(one: Coded) -> _Lanes:
    steps = -(-one.count // one.lanes)
    if steps > _MOST_STEPS:
        raise Damaged(f"a stream of {one.count} symbols has {one.lanes} lanes")
    long = steps >= _LOW
    head = one.lanes * (4 if long else 3)
    if one.units.size < head:
        raise Damaged(f"a stream of {one.lanes} lanes has {one.units.size} units")
    first, body = one.units[:head].astype(np.int64), one.units[head:].astype(np.uint32)
    lengths, low, high = first[: one.lanes], first[-2 * one.lanes : -one.lanes], first[-one.lanes :]
    if long:
        lengths = lengths | (first[one.lanes : 2 * one.lanes] << 16)
    ends = np.cumsum(lengths)
    if ends[-1] != body.size:
        raise Damaged(f"the lanes of a stream have {ends[-1]} units, and there are {body.size}")
    # Places count from a unit before the first one, so that the last place is inside.
    state = (low | (high << 16)).astype(np.uint32)
    body = np.concatenate([np.zeros(1, np.uint32), body])
    return _Lanes(state, ends.copy(), ends - lengths, body)

"""The decoder of interleaved rANS streams, whose encoder is `jaxcomp.entropy.rans`.

A stream has units of sixteen bits: the number of units of each lane (two units where a lane has
2¹⁶ symbols or more), the lower and the upper half of each lane's state, and the units of each lane.
Symbol `t·lanes + l` is in lane `l`. Lanes are decoded together, from the last symbol to the first.
"""

import numpy as np

from jaxcomp_weights.alphabets import PRECISION, TOTAL
from jaxcomp_weights.errors import Damaged

_LOW = 1 << 16
UNIT = np.dtype("<u2")


def decode(
    units: np.ndarray, count: int, lanes: int, slots: np.ndarray, contexts: np.ndarray | None
) -> np.ndarray:
    """The symbols of a stream, `uint8`.

    Args:
        units: the stream, `uint16`.
        count: the number of symbols.
        lanes: how many lanes the stream has.
        slots: `alphabets.slots` of the tables.
        contexts: the table of each symbol, `uint8[count]`; None for the first one.

    Raises:
        Damaged: unless decoding ends in the initial state with all units read.
    """
    steps = -(-count // lanes)
    if not steps:
        if units.size:
            raise Damaged("a stream without symbols has units")
        return np.zeros(0, np.uint8)
    head = lanes * (4 if steps >= _LOW else 3)
    if units.size < head:
        raise Damaged(f"a stream of {lanes} lanes has {units.size} units")
    first, body = units[:head].astype(np.int64), units[head:].astype(np.uint32)
    lengths, low, high = first[:lanes], first[-2 * lanes : -lanes], first[-lanes:]
    if steps >= _LOW:
        lengths = lengths | (first[lanes : 2 * lanes] << 16)
    ends = np.cumsum(lengths)
    if ends[-1] != body.size:
        raise Damaged(f"the lanes of a stream have {ends[-1]} units, and there are {body.size}")
    # A unit before the first one and none missing at its end: places stay inside, and are checked
    # in the end.
    body = np.concatenate([np.zeros(1, np.uint32), body])
    state, place = (low | (high << 16)).astype(np.uint32), ends.copy()
    found = np.empty(steps * lanes, np.uint8)
    rows = None
    if contexts is not None:
        rows = np.zeros(steps * lanes, np.uint32)
        np.left_shift(contexts, PRECISION, out=rows[:count], dtype=np.uint32, casting="unsafe")
    last = count - (steps - 1) * lanes
    for step in range(steps - 1, -1, -1):
        begin, width = step * lanes, last if step == steps - 1 else lanes
        now, at = state[:width], place[:width]
        slot = now & (TOTAL - 1)
        if rows is not None:
            slot |= rows[begin : begin + width]
        entry = slots[slot]
        found[begin : begin + width] = entry
        now >>= PRECISION
        now *= (entry >> 8) & (TOTAL - 1)
        now += entry >> 20
        short = now < _LOW
        refilled = (now << 16) | body[np.maximum(at, 0)]
        np.copyto(now, refilled, where=short)
        at -= short
    if not (np.all(state == _LOW) and np.array_equal(place, ends - lengths)):
        raise Damaged("a stream does not end in its initial state")
    return found[:count]

"""How often a collective waits for its links: once, if all messages are sent at once.

A ring sends one message after another, `n − 1` of them, and each waits for the delay of the link.
Where a delay is long against the bytes, every worker sends to all others at the same time instead.
This module decides. The bytes are the same, but for a sum of few elements, which all gather.
"""

from fractions import Fraction
from typing import Any

import jax

from jaxcomp import checks
from jaxcomp.wire import cost as wire_cost

RING, GATHERED, SHOTS = "ring", "gathered", "shots"
"""A sum by a ring all-reduce, by an all-gather, or by two shots: of slices, and of their sums."""

_RATE = 2.5e7
"""Bytes per second that a link is assumed to have, 200 Mbit/s: long delays are those of slow links,
and a wrong choice at five times this rate doubles the messages that wait."""
_BETWEEN_CPUS = 5e-4
"""Seconds of delay that are assumed between CPUs of several processes, whose messages pass through
TCP and Gloo. A message takes twice as long, since its receiver announces first that it is ready."""
_FEW, _CROWDED_FEW, _CROWDED = 4, 0.35, 0.1
"""The part by which messages that are sent at once take longer, for up to four workers and for
more: Gloo sends and announces over one connection for each pair (`axes.exchange`)."""


def check(delay: float | None) -> None:
    """Raises a `ValueError` unless a delay is a number of seconds, or None."""
    if delay is not None:
        checks.number("delay", delay, 0.0)


def between_cpus() -> bool:
    """Whether the workers are CPUs of several processes."""
    if not jax.distributed.is_initialized():  # Asking further would start the backend.
        return False
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def wait(delay: float | None) -> float:
    """Seconds that a message takes beside its bytes; zero where nothing is known of the links.

    Args:
        delay: seconds one way; None for what is assumed.

    Example:
        >>> wait(0.05), wait(None)
        (0.1, 0.0)
    """
    if delay is None:
        delay = _BETWEEN_CPUS if between_cpus() else 0.0
    return 2 * delay


def at_once(size: float, workers: int, delay: float | None) -> bool:
    """Whether each worker sends messages of so many bytes to all others at the same time.

    Example:
        >>> at_once(1e5, 8, 0.05), at_once(1e5, 8, 0.0), at_once(1e9, 8, 0.05)
        (True, False, False)
    """
    return (workers - 2) * wait(delay) > _crowding(workers) * (workers - 1) * size / _RATE


def messages(size: float, workers: int, delay: float | None) -> int:
    """The sequential messages of an all-gather or an all-to-all of messages of so many bytes."""
    return 1 if at_once(size, workers, delay) else workers - 1


def of_sum(size: float, workers: int, delay: float | None) -> str:
    """The way with which a sum of so many bytes takes the least time.

    Example:
        >>> [of_sum(size, 8, 0.05) for size in (1e2, 1e7, 1e9)], of_sum(1e2, 8, None)
        (['gathered', 'shots', 'ring'], 'ring')
    """
    if workers < 2 or not wait(delay):
        return RING
    crowded = 1 + _crowding(workers)
    once, twice = size * (workers - 1) / _RATE, 2 * size * (workers - 1) / workers / _RATE
    seconds = {
        RING: 2 * (workers - 1) * wait(delay) + twice,
        GATHERED: wait(delay) + crowded * once,
        SHOTS: 2 * wait(delay) + crowded * twice,
    }
    return min(seconds, key=lambda way: seconds[way])


def sum_messages(size: float, workers: int, delay: float | None) -> int:
    """The sequential messages of a sum."""
    way = of_sum(size, workers, delay)
    return {RING: 2 * (workers - 1), GATHERED: 1, SHOTS: 2}[way]


def sum_bytes(elements: int, dtype: Any, workers: int, delay: float | None) -> Fraction | int:
    """The bytes that one device sends for a sum."""
    size = elements * dtype.itemsize
    way = of_sum(size, workers, delay)
    if way == GATHERED:
        return (workers - 1) * size
    if way == SHOTS:  # Slices are of whole elements.
        size = -(-elements // workers) * workers * dtype.itemsize
    return wire_cost.ring(size, workers)


def collectives(size: float, workers: int, delay: float | None, most: int, splits: bool) -> int:
    """Into how many collectives a payload is split: one, if each would wait longer than it sends.

    Args:
        size: bytes of the payload.
        workers: the number of workers.
        delay: seconds one way.
        most: the number without a delay.
        splits: whether each worker gets a slice of the payload, not all of it.
    """
    each = size / most / (workers if splits else 1)
    waits = messages(each, workers, delay) * wait(delay)
    return most if (workers - 1) * each / _RATE >= waits else 1


def _crowding(workers: int) -> float:
    return _CROWDED_FEW if workers <= _FEW else _CROWDED

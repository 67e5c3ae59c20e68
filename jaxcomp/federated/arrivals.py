"""When clients begin, and when their messages arrive: at once, or in a later round."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcomp import checks
from jaxcomp.federated import faults as faults_
from jaxcomp.federated.faults import Faults
from jaxcomp.federated.method import Method
from jaxcomp.types import Array

_NEVER = -1


class Arrivals:
    """Which clients begin in a round, and whose messages arrive in it.

    Args:
        method: the method, whose sampling draws among the clients that are free.
        clients: the number of clients.
        faults: the faults, whose `longest` is the longest delay.
        delays: `delays(numbers, round)`, the rounds until a message arrives; None for none.

    Raises:
        ValueError: for a method that late messages would break, or faults with old parameters.
    """

    def __init__(
        self,
        method: Method,
        clients: int,
        faults: Faults,
        delays: Callable[[np.ndarray, int], Any] | None,
    ):
        self._method, self._clients = method, clients
        self._delays, self._longest = delays, faults.longest
        # The round in which each client has begun last, and that in which its message arrives.
        self._began, self._ends = np.full((2, clients), _NEVER, np.int64)
        if delays is None:
            return
        checks.function("delays", delays)
        reason = faults_.late_refusal(method)
        if method.uplink.feedback.facts.mirrors or method.uplink.guessed:
            reason = "a Shift or side information, whose late messages Flower's server alone takes"
        if method.streams:
            reason = "fragments, a delay or a mix, where clients go on from their own parameters"
        if faults.old:
            reason = f"old parameters beside them, {faults!r}"
        if reason:
            raise ValueError(f"`delays` must be None with {reason}, got {delays!r}")

    def begin(self, key: Array, number: int) -> np.ndarray:
        """The clients that begin in a round, in ascending order."""
        sampling = self._method.sampling
        if self._delays is None:
            cohort = sampling.cohort(key, self._clients)
            self._ends[:] = _NEVER
            self._began[cohort] = self._ends[cohort] = number
            return cohort
        # A round that is repeated after an error begins with the same clients.
        busy = (self._began < number) & (self._ends >= number)
        cohort = sampling.among(key, self._clients, np.flatnonzero(~busy))
        given = np.asarray(self._delays(cohort, number))
        whole = given.shape == cohort.shape and given.dtype.kind in "iu"
        if not whole or given.min(initial=0) < 0 or given.max(initial=0) > self._longest:
            raise ValueError(
                f"`delays` must give {len(cohort)} integers from 0 to the longest delay, "
                f"Faults(longest={self._longest}), got {given.dtype}{list(given.shape)} from "
                f"{given.min(initial=0)} to {given.max(initial=0)}"
            )
        self._began[cohort], self._ends[cohort] = number, number + given
        return cohort

    def end(self, number: int) -> list[tuple[int, np.ndarray]]:
        """The rounds whose clients end in this one, the oldest first, with these clients."""
        ended = self._ends == number
        return [
            (int(began), np.flatnonzero(ended & (self._began == began)))
            for began in np.unique(self._began[ended])
        ]

    def kept(self) -> tuple[np.ndarray, ...]:
        """The arrays of a checkpoint; none without delays."""
        return () if self._delays is None else (self._began, self._ends)

    def take(self, kept: tuple[np.ndarray, ...]) -> None:
        """Goes on from what `kept` returned."""
        if kept:
            self._began, self._ends = (np.array(one) for one in kept)

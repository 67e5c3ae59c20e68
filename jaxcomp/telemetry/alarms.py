"""Alarms: conditions in the statistics of a run that need a change, with advice."""

import collections
import dataclasses
import itertools
import math
import statistics

from jaxcomp import checks
from jaxcomp.telemetry.records import Record

GROWS = "residual grows"
"""The name of the alarm that compares several windows."""

ADVICE = {
    GROWS: "The norm of the unsent residuals grew over four windows in a row, faster each time. "
    "Lower the learning rate, send more (a larger fraction, more bits), or forget a part: "
    "jaxcomp.Link(codec, jaxcomp.Residual(decay=0.9)) in place of the codec, or "
    "jaxcomp.PowerIteration(rank=4, feedback=jaxcomp.Residual(decay=0.9)).",
    "not finite": "A gradient was not finite. Wrap the chain, jaxcomp.skip_nonfinite(tx), and "
    "lower the learning rate or the loss scale if it happens again.",
    "steps are skipped": "Steps were skipped between all records of a window. Lower the loss "
    "scale or the learning rate, and look for NaN in the data.",
    "elements are lost": "Elements did not fit into the capacity of Coded in most steps of a "
    "window. Raise `capacity`; without a residual, what is lost is never sent.",
    "capacity is empty": "More than half of the payload was empty in a whole window. Lower the "
    "`capacity` of Coded.",
    "values are clipped": "More than a fifth of the values were beyond the outermost levels of the "
    "quantiser in a whole window, more than of a normal law. Take more bits, a scale that covers "
    "all elements such as jaxcomp.codecs.MaxAbs(), smaller buckets, or rotate with "
    "jaxcomp.eden(bits=4).",
    "messages are left out": "Robust left out messages that were not finite. Look for the worker "
    "that sends them.",
}
"""The advice for each alarm, by its name."""

WINDOW = 50
"""The records of a window, in a log and in `jaxcomp report`."""

WINDOWS = 4
"""Windows whose medians show that a residual grows."""

CLIPPED = 0.2
"""Fraction of clipped values, more than any codec clips of Gaussian input."""


@dataclasses.dataclass(frozen=True)
class Alarm:
    """Something in the statistics that needs a change.

    Attributes:
        name: one of the names in `ADVICE`.
        step: the step at which it was seen.
        where: the label of the mean; "" for the only one.
    """

    name: str
    step: int
    where: str = ""

    def __str__(self) -> str:
        of = f" of {self.where}" if self.where else ""
        return f"step {self.step}: {self.name}{of}. {ADVICE[self.name]}"


class Alarms:
    """Finds alarms in a sequence of records; each is told once until it has ended.

    An alarm ends when its condition has been false for a whole window of records, or for four
    windows if it is about the residual. So a condition that comes and goes is told once.

    Args:
        window: the number of records in a window.
        growth: the factor between the medians of two windows from which a residual grows.

    Raises:
        ValueError: for a window below 2, or a growth of at most 1.

    Example:
        >>> alarms = Alarms(window=2)
        >>> records = [{"step": k, "residual_norm": 2.0**k} for k in range(8)]
        >>> [alarm.name for record in records for alarm in alarms(record)]
        ['residual grows']
    """

    def __init__(self, window: int = WINDOW, growth: float = 1.25):
        checks.integer("window", window, 2)
        checks.number("growth", growth, 1.0)
        if growth == 1:
            raise ValueError("`growth` must be above 1, got 1")
        self.window, self.growth = window, growth
        self._seen: dict[str, collections.deque[float]] = {}
        self._last: dict[tuple[str, str], int] = {}
        self._records = 0

    def __call__(self, record: Record) -> list[Alarm]:
        """Adds a record, and returns the alarms that begin with it."""
        for name, value in record.items():
            kept = self._seen.setdefault(name, collections.deque(maxlen=WINDOWS * self.window))
            kept.append(value)
        labels = {name.rpartition("/")[0] for name in record} | {""}  # "" for the whole state.
        now = {(name, where) for where in labels for name in self._find(where)}
        self._records += 1
        self._last = {
            alarm: seen
            for alarm, seen in self._last.items()
            if self._records - seen <= self.window * (WINDOWS if alarm[0] == GROWS else 1)
        }
        new = now - self._last.keys()
        self._last |= dict.fromkeys(now, self._records)
        return [Alarm(name, int(record["step"]), where) for name, where in sorted(new)]

    def _find(self, where: str) -> list[str]:
        prefix = f"{where}/" if where else ""

        def last(name: str, count: int) -> list[float]:
            values = list(self._seen.get(prefix + name, ()))
            return values[-count:] if len(values) >= count else []

        window, found = self.window, []
        recent = last("residual_norm", WINDOWS * window)  # The ratio grows when gradients vanish.
        medians = [statistics.median(recent[i : i + window]) for i in range(0, len(recent), window)]
        # Faster and faster: a residual that fills up at first grows more and more slowly.
        steps = [after - before for before, after in itertools.pairwise(medians)]
        faster = all(a < b for a, b in itertools.pairwise(steps))
        by_factor = all(0 < self.growth * a < b for a, b in itertools.pairwise(medians))
        if medians and by_factor and faster:
            found.append(GROWS)
        if any(math.isnan(value) for value in last("relative_error", 1)):
            found.append("not finite")
        skipped = last("skipped", window)
        if skipped and all(a < b for a, b in itertools.pairwise(skipped)):
            found.append("steps are skipped")
        lost = last("lost", window)
        if sum(value > 0 for value in lost) > window / 2:
            found.append("elements are lost")
        spare, payload = last("spare_bytes", window), last("payload_bytes", window)
        if spare and all(2 * s > p > 0 for s, p in zip(spare, payload, strict=True)):
            found.append("capacity is empty")
        clipped = last("saturation", window)
        if clipped and min(clipped) > CLIPPED:
            found.append("values are clipped")
        if any(value > 0 for value in last("excluded", 1)):
            found.append("messages are left out")
        return found

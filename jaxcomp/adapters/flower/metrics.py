"""Numbers that clients report beside their messages, in Flower's metric records."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcomp.adapters.flower import extra
from jaxcomp.adapters.flower.records import Refused
from jaxcomp.adapters.flower.server_round import Taken, log

EXAMPLES = "num-examples"
"""The name under which apps for `flwr`'s `FedAvg` report their weight."""

_MOST = 1_000
"""Numbers that a client may report in a round."""

_LIGHTEST, _HEAVIEST = 1e-30, 1e30
"""Weights whose sum over all clients float32 can hold."""


def read(content: Any) -> Any:
    """The metric records of an answer, which may come from anybody.

    Raises:
        Refused: if there are too many numbers.
    """
    found = dict(content.metric_records)
    values = [value for record in found.values() for value in record.values()]
    count = sum(len(value) if isinstance(value, list) else 1 for value in values)
    if count > _MOST:
        raise Refused("malformed", f"it reports {count:,} numbers, of {_MOST:,} at most")
    return extra.RecordDict(found)


def weight(metrics: Any, key: str, times: np.float32) -> np.float32:
    """The weight that a client reports, times the server's own.

    Raises:
        Refused: if it reports none, several, or one that is not positive and finite.
    """
    found = [record[key] for record in metrics.metric_records.values() if key in record]
    if len(found) != 1 or isinstance(found[0], list):
        raise Refused("malformed", f"it reports {len(found)} weights {key!r}, not one number")
    if not _LIGHTEST <= float(times) * found[0] <= _HEAVIEST:
        raise Refused("malformed", f"its weight is {found[0]}, not positive and finite")
    return np.float32(float(times) * found[0])


def weight_by(
    metrics: Any, weight_of: Callable[[Mapping[str, Any]], float], times: np.float32
) -> np.float32:
    """The weight that a function makes of what a client reports, times the server's own.

    Raises:
        Refused: if the function refuses the numbers, or the weight is not positive and finite.
    """
    numbers = {
        name: value for one in metrics.metric_records.values() for name, value in one.items()
    }
    try:
        found = float(weight_of(numbers))
    except ValueError as error:
        raise Refused("malformed", str(error)[:200]) from error
    if not _LIGHTEST <= float(times) * found <= _HEAVIEST:
        raise Refused("malformed", f"its weight is {found}, not positive and finite")
    return np.float32(float(times) * found)


def warn_of_examples(metrics: Sequence[Any]) -> None:
    """Says that weights in the way of `flwr`'s `FedAvg` are not used, where clients report them."""
    records = [record for one in metrics for record in one.metric_records.values()]
    if any(EXAMPLES in record for record in records):
        log.warning("\t> clients report %r; with `weighted_by_key` None it is no weight", EXAMPLES)


def aggregate(
    taken: Sequence[Taken], function: Callable[[list[Any], str], Any] | None, key: str
) -> dict[str, Any]:
    """Aggregates what clients with accepted messages report, as `flwr`'s `FedAvg` does.

    Without a function it is the weighted mean of every number but `key`, over the clients that
    report a finite one.
    """
    if function is not None:
        return dict(function([one.metrics for one in taken], key)) if taken else {}
    sums: dict[str, tuple[float, float]] = {}
    for one in taken:
        for record in one.metrics.metric_records.values():
            for name, value in record.items():
                if name != key and not isinstance(value, list) and math.isfinite(value):
                    total, divisor = sums.get(name, (0.0, 0.0))
                    sums[name] = total + one.weight * value, divisor + one.weight
    return {name: total / divisor for name, (total, divisor) in sums.items()}

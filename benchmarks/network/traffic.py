"""What each message puts on each link: the busiest one decides how long it takes.

The link model of `jaxcomp.theory.cost` has one link a worker. Here links may have different rates,
and in a ring of hosts a message takes the links of all hosts on its way.
"""

import functools
from typing import Any

import namespaces
import numpy as np

import jaxcomp
from jaxcomp.graphs import mixing
from jaxcomp.theory import cost


def messages(reducer: Any, like: Any, workers: int) -> list[list[np.ndarray]]:
    """The messages of an exchange, one after another; of a graph, those of each of its rounds.

    A message is the bytes from each host to each other one, `[workers, workers]`. Sums and
    all-gathers pass around a ring in the order of the ranks, as those of gloo do. All else are
    permutations, which a program sends one after another: of two shots, the first one sends its
    part to each other worker.
    """
    sent = jaxcomp.wire_bytes(reducer, like, workers=workers)
    if isinstance(reducer, jaxcomp.Gossip):
        return _rounds(reducer, like, workers)
    if not isinstance(reducer, jaxcomp.TwoShot):
        return [[_shift(1, sent, workers)]]
    first = [_shift(by, sent / 2 / (workers - 1), workers) for by in range(1, workers)]
    return [[*first, _shift(1, sent / 2, workers)]]


def _shift(by: int, sent: float, workers: int) -> np.ndarray:
    """Each host sends so many bytes to the one at this distance."""
    return np.roll(np.eye(workers) * sent, by, axis=1)


def _rounds(reducer: Any, like: Any, workers: int) -> list[list[np.ndarray]]:
    payload, ranks = _payload(reducer, like, workers), np.arange(workers)

    def message(sources: np.ndarray) -> np.ndarray:
        load = np.zeros((workers, workers))
        load[sources, ranks] = payload
        return load * (1 - np.eye(workers))

    found = mixing.rounds(reducer.graph, workers)
    several = zip(found.sources, found.messages, strict=True)
    return [[message(own) for own in sources[:count]] for sources, count in several]


def _payload(reducer: Any, like: Any, workers: int) -> float:
    messages = jaxcomp.graphs.degree(reducer.graph, workers)
    return float(jaxcomp.wire_bytes(reducer, like, workers)) / float(messages)


def seconds(load: np.ndarray, links: dict[str, Any]) -> float:
    """Seconds of the busiest link, of those whose rate is known."""
    on_switch = links["shape"] == "switch"
    times = [0.0]
    for own, bytes_ in (_switched if on_switch else _ringed)(load).items():
        rate = links["slow"] if own == namespaces.slow_host(len(load)) else None
        speed = rate or links["rate"]
        times += [] if speed is None else [bytes_ / speed]
    return max(times)


def _switched(load: np.ndarray) -> dict[int, float]:
    """Of each host, the larger of what it sends and receives."""
    return dict(enumerate(np.maximum(load.sum(axis=0), load.sum(axis=1)).tolist()))


def _ringed(load: np.ndarray) -> dict[int, float]:
    """Of each host, what passes between it and the next one, in the busier direction."""
    workers = len(load)
    up, down = np.zeros((2, workers))
    for source, to in zip(*np.nonzero(load), strict=True):
        if namespaces.clockwise(source, to, workers):
            up[np.arange(source, source + (to - source) % workers) % workers] += load[source, to]
        else:
            down[np.arange(to, to + (source - to) % workers) % workers] += load[source, to]
    return dict(enumerate(np.maximum(up, down).tolist()))


def forecast(
    reducer: Any, like: Any, links: dict[str, Any], each: float, price: cost.Price, workers: int
) -> dict[str, float]:
    """Seconds of an exchange: of its messages over their busiest links, of `each`, and of work."""
    many = messages(reducer, like, workers)
    wire = float(np.mean([sum(seconds(load, links) for load in each) for each in many]))
    whole = wire + price.rounds * each + price.work
    return {"wire": wire, "work": price.work, "forecast": whole}


@functools.cache
def path(workers: int) -> jaxcomp.graphs.Mixing:
    """A ring without the edge from the slow host to the next one."""
    slow = namespaces.slow_host(workers)
    edges = [(rank, (rank + 1) % workers) for rank in range(workers) if rank != slow]
    return jaxcomp.graphs.metropolis(edges, workers)

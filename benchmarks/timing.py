"""Times work in turns: medians and ranges, into buffers that are warm or fresh."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

WARM_UP = 2
"""Turns that are not counted: pages are mapped, programs compiled."""
Run = Callable[[], Any]


class Seconds(NamedTuple):
    """The times of several runs of the same work."""

    median: float
    least: float
    most: float


def in_turns(
    runs: Mapping[str, Run], repeats: int, *, within: float | None = None
) -> dict[str, Seconds]:
    """Times each run in turns, so that whatever slows the machine down slows all of them.

    Args:
        runs: the work, by name.
        repeats: how many times each is timed.
        within: seconds; slow work is timed less often, but three times, to stay within them.
    """
    if within is not None:
        repeats = max(3, min(repeats, int(within / max(once(run) for run in runs.values()))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + WARM_UP):
        for name, run in runs.items():
            seconds = clock(run)
            if turn >= WARM_UP:
                times[name].append(seconds)
    return {name: spread(found) for name, found in times.items()}


def spread(times: list[float]) -> Seconds:
    return Seconds(statistics.median(times), min(times), max(times))


def clock(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def once(run: Run) -> float:
    """Seconds of the second run."""
    run()
    return clock(run)


def copy_of(data: np.ndarray) -> Run:
    """A numpy copy into an existing buffer, the reference for other times."""
    target = np.empty_like(data)
    return lambda: np.copyto(target, data)


def into_warm(f: Callable[..., Any], *args: Any, launches: int = 1) -> Run:
    """Runs `f` into the buffers of its last result, so that no page is mapped anew.

    With more than one launch, they are queued, and the run ends with the last of them.
    """
    compiled = jax.jit(lambda held, *rest: f(*rest), donate_argnums=0, keep_unused=True)
    like = jax.eval_shape(f, *args)
    held = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)]

    def run():
        for _ in range(launches):
            held[0] = compiled(held[0], *args)
        return jax.block_until_ready(held[0])

    return run


def into_fresh(f: Callable[..., Any], *args: Any) -> Run:
    """Runs `f` with its result in newly mapped memory, as without donation."""
    compiled = jax.jit(f)
    return lambda: jax.block_until_ready(compiled(*args))

"""What publishing weights adds to a training step of `examples/weights.py`, in turns.

    python benchmarks/publishing.py

A turn has some steps that publish, and as many that do not; each turn has the other order of the
two. The seconds of steps that publish include those until their versions are written. Whoever
trains on the processor's cores gives the publisher some of them.
"""

import contextlib
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import reporting  # It makes the examples importable.
from weights_trainer import Trainer

from jaxcomp.planning import Network
from jaxcomp.weights import Publisher

WIDTH, LAYERS, RATES = 192, 3, (3e-6, 1e-5)
LINK = 2.5e6
"""Bytes per second to a reader: the example's, which gets the fast coding."""

COLUMNS = (
    "rate {rate:g} | a step, ms {alone:.0f} | one that publishes, ms {published:.0f} | "
    "ratio, median of turns {ratio:.3f} | its quartiles {low:.3f} to {high:.3f} | "
    "processor time added, ms {added:.0f} | `publish` returns after, ms {call:.1f}"
)


class Steps:
    """Steps of training, with and without publishing.

    Args:
        folder: where versions are written.
        rate: the learning rate of REINFORCE.
        supervised: steps on examples before.
    """

    def __init__(self, folder: str, rate: float, supervised: int):
        self._trainer = Trainer(WIDTH, LAYERS, seed=0)
        for _ in range(supervised):
            self._trainer.learn()
        self._trainer.start_reinforcing(rate)
        self._publisher = Publisher(folder, dtype=jnp.bfloat16, link=Network(LINK), keep=None)
        self._step, self.calls = 0, []

    def close(self) -> None:
        """Ends the publisher."""
        self._publisher.close()

    def run(self, number: int, publish: bool) -> tuple[float, float]:
        """Seconds a step, and those of all cores."""
        start, work = time.perf_counter(), time.process_time()
        for _ in range(number):
            self._trainer.reinforce()
            if publish:
                self._step += 1
                begin = time.perf_counter()
                self._publisher.publish(self._trainer.params, self._step)
                self.calls.append(time.perf_counter() - begin)
        jax.block_until_ready(self._trainer.params)
        self._publisher.flush()
        return (time.perf_counter() - start) / number, (time.process_time() - work) / number


def measured(rate: float, turns: int, number: int, supervised: int) -> dict[str, Any]:
    """A row of the table."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Steps(folder, rate, supervised)) as steps,
    ):
        for publish in (True, False):  # They compile.
            steps.run(3 * number, publish)
        steps.calls.clear()
        seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for turn in range(turns):
            for publish in (turn % 2 == 0, turn % 2 == 1):
                seconds[publish].append(steps.run(number, publish))
    ratios = [a[0] / b[0] for a, b in zip(seconds[True], seconds[False], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    added = [a[1] - b[1] for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "rate": rate,
        "alone": 1e3 * statistics.median(each for each, _ in seconds[False]),
        "published": 1e3 * statistics.median(each for each, _ in seconds[True]),
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
        "added": 1e3 * statistics.median(added),
        "call": 1e3 * statistics.median(steps.calls),
    }


def main() -> None:
    given = reporting.options(
        __doc__,
        reporting.HERE / "results" / "weights",
        turns=(25, "turns"),
        steps=(16, "steps of a turn"),
        supervised=(180, "steps on examples before"),
    )
    rows = [measured(rate, given.turns, given.steps, given.supervised) for rate in RATES]
    table = reporting.Table("Weights: a step of training that publishes", COLUMNS, rows)
    reporting.show(table, {"rows": rows}, given.out / "publishing.md")


if __name__ == "__main__":
    main()

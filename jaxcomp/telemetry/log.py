"""The log of a training loop: records to writers, and alarms."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxcomp import checks
from jaxcomp.telemetry.alarms import Alarm, Alarms
from jaxcomp.telemetry.records import Record, record
from jaxcomp.types import PyTree


def _warn(alarm: Alarm) -> None:
    warnings.warn(str(alarm), stacklevel=3)


class Log:
    """Writes the statistics of every few steps, and raises alarms.

    Args:
        *writers: functions of the number of the step and a record, such as a `Csv` or a
            `TensorBoard`.
        every: steps from one record to the next. Reading a state waits for the step that makes it.
        alarms: finds alarms in the records; None for `Alarms()`.
        alarm: a function of an `Alarm`, such as `print`; by default it warns (`UserWarning`).

    Raises:
        ValueError: for a writer that cannot be called, or an `every` below 1.

    Example:
        >>> import jax.numpy as jnp, jaxcomp
        >>> tx = jaxcomp.compressed_mean(jaxcomp.sign(), "data", stats=True)
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> state = jaxcomp.init_state(tx, jnp.ones((64, 64)), mesh, "data")
        >>> step = jaxcomp.data_parallel(lambda s, x: tx.update(x[0], s), mesh, "data")
        >>> log = Log(lambda step, record: print(step, record["residual_ratio"], record["loss"]))
        >>> for _ in range(2):
        ...     _, state = step(state, jnp.ones((1, 64, 64)))
        ...     log(state, {"loss": 0.5})
        1 0.0 0.5
        2 0.0 0.5

    Note:
        In a job of several processes, every process calls it, and the first one writes.
    """

    def __init__(
        self,
        *writers: Callable[[int, Record], Any],
        every: int = 1,
        alarms: Alarms | None = None,
        alarm: Callable[[Alarm], Any] = _warn,
    ):
        for writer in writers:
            checks.function("writers", writer)
        checks.integer("every", every, 1)
        self.writers, self.every, self.alarm = writers, every, alarm
        self.alarms = alarms or Alarms()
        self._calls = 0

    def __call__(self, state: PyTree, values: Mapping[str, Any] | None = None) -> None:
        """Logs a step, if it is its turn.

        Args:
            state: the optimizer's state after the step.
            values: numbers of your own by name, such as the loss; the same names in every step.

        Raises:
            ValueError: if the state holds no statistics, or a value has the name of one.
        """
        self._calls += 1
        if (self._calls - 1) % self.every:
            return
        found = record(state)
        both = found.keys() & (values or {}).keys()
        if both:
            raise ValueError(f"`values` must not have names of statistics, got {sorted(both)}")
        found |= {name: float(value) for name, value in (values or {}).items()}
        if jax.process_index():
            return
        for writer in self.writers:
            writer(int(found["step"]), found)
        for alarm in self.alarms(found):
            self.alarm(alarm)

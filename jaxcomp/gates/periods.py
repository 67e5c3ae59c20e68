"""The number of local steps in a round: constant, scheduled, or adapted to the models' variance."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.base import Period
from jaxcomp.types import Array, PyTree

_COUNTED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Constant(Period):
    """Every round has `k` steps.

    Args:
        k: the number of steps.

    Raises:
        ValueError: if `k` is not a positive integer.

    Example:
        >>> Constant(30).steps((), 0)
        Array(30, dtype=int32)
    """

    k: int

    def __post_init__(self):
        checks.integer("every", self.k, 1, 2**31 - 1)

    def steps(self, state: PyTree, taken: Array) -> Array:
        return jnp.asarray(self.k, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Growing(Period, public=("position",)):
    """Rounds that grow by a factor: round `s` has `⌈first · factorˢ⌉` steps.

    Args:
        first: the steps of the first round.
        factor: `β`, above 1.

    Raises:
        ValueError: for settings out of range.

    Example:
        >>> lengths = Growing(10, 1.5)
        >>> [int(lengths.steps((), start)) for start in (0, 10, 25)]
        [10, 15, 23]
        >>> int(lengths.position(12))
        2
    """

    first: int
    factor: float

    def __post_init__(self):
        checks.integer("first", self.first, 1, 2**31 - 1)
        checks.number("factor", self.factor, 1.0)
        if self.factor < 1.001:
            raise ValueError(
                f"`factor` must be at least 1.001, got {self.factor}; rounds of one length are "
                f"jaxcomp.gates.Constant({self.first})"
            )

    def steps(self, state: PyTree, taken: Array) -> Array:
        lengths, number = self._round(taken)
        return jnp.asarray(lengths, jnp.int32)[number]

    def position(self, taken: Any) -> Array:
        """The number of steps of the current round before this one.

        Args:
            taken: the number of steps before this one.
        """
        lengths, number = self._round(taken)
        starts = np.cumsum([0, *lengths[:-1]])
        return jnp.asarray(taken, jnp.int32) - jnp.asarray(starts, jnp.int32)[number]

    def _round(self, taken: Any) -> tuple[list[int], Array]:
        """The lengths of all rounds that an int32 counts, and the number of the current one."""
        lengths, total = [], 0
        while total < _COUNTED:
            length = math.ceil(round(self.first * self.factor ** len(lengths), 6))
            lengths.append(min(length, _COUNTED - total))
            total += lengths[-1]
        ends = jnp.asarray(np.cumsum(lengths), jnp.int32)
        return lengths, jnp.searchsorted(ends, jnp.asarray(taken, jnp.int32), side="right")


@dataclasses.dataclass(frozen=True)
class _Scheduled(Period):
    """The number of steps follows from the number of steps before the round."""

    schedule: Callable[[Array], Any]

    def steps(self, state: PyTree, taken: Array) -> Array:
        return jnp.maximum(jnp.round(jnp.asarray(self.schedule(taken))).astype(jnp.int32), 1)


class AdaptiveState(NamedTuple):
    """State of `AdaptivePeriod`.

    Attributes:
        steps: the number of steps of the current round.
        rounds: the number of rounds so far.
        level: the mean of variance over learning rate in the rounds of the warm-up.
    """

    steps: Array
    rounds: Array
    level: Array


@dataclasses.dataclass(frozen=True)
class AdaptivePeriod(Period):
    """ADPSGD: rounds as long as the variance of the models is proportional to the learning rate.

    With `S` the variance of the workers' models before an exchange and `γ` the learning rate, the
    first `warmup` rounds have `start` steps and find `C`, the mean of `S/γ`. After that a round is
    one step longer if `S < low·γ·C`, and one shorter if `S > high·γ·C`.

    Args:
        learning_rate: `γ` of the local steps: a number, or a schedule of the number of steps.
        warmup: the number of rounds of the warm-up, at least one.
        start: the steps of a round in the warm-up.
        low: the lower threshold.
        high: the upper threshold.
        longest: the largest number of steps of a round; None for no limit.

    Raises:
        ValueError: for settings out of range.

    Example:
        >>> import jaxcomp, optax
        >>> period = AdaptivePeriod(learning_rate=0.1, warmup=50)
        >>> tx = jaxcomp.local_updates(optax.sgd(0.1), None, "data", every=period)

    References:
        Jiang and Agrawal, `Adaptive periodic averaging: a practical approach to reducing
        communication in distributed learning <https://arxiv.org/abs/2007.06134>`_, 2020.

    Note:
        The paper's warm-up is the first quarter of all rounds, with four steps each; these
        constants are from memory of the paper, not from its text.
    """

    learning_rate: Any
    warmup: int
    start: int = 4
    low: float = 0.7
    high: float = 1.3
    longest: int | None = None

    measures = True

    def __post_init__(self):
        if not callable(self.learning_rate):
            checks.number("learning_rate", self.learning_rate, 0.0)
        checks.integer("warmup", self.warmup, 1)
        checks.integer("start", self.start, 1)
        if self.longest is not None:
            checks.integer("longest", self.longest, self.start)
        if not 0 < self.low <= self.high:
            raise ValueError(
                f"`low` must be positive and at most high={self.high}, got {self.low}; the paper "
                "has low=0.7, high=1.3"
            )

    def init(self) -> AdaptiveState:
        zero = jnp.zeros((), jnp.int32)
        return AdaptiveState(jnp.asarray(self.start, jnp.int32), zero, jnp.zeros((), jnp.float32))

    def steps(self, state: AdaptiveState, taken: Array) -> Array:
        return state.steps

    def after(self, state: AdaptiveState, taken: Array, variance: Array | None) -> AdaptiveState:
        assert variance is not None
        rate = self.learning_rate(taken) if callable(self.learning_rate) else self.learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        warm = state.rounds < self.warmup
        # A learning rate of zero leaves no variance to compare with.
        seen = jnp.where(rate > 0, variance / jnp.where(rate > 0, rate, 1), state.level)
        level = state.level + (seen - state.level) / (state.rounds + 1).astype(jnp.float32)
        wanted = rate * state.level
        change = jnp.where(variance < self.low * wanted, 1, 0)
        change = jnp.where(variance > self.high * wanted, -1, change)
        steps = jnp.maximum(state.steps + change, 1)
        if self.longest is not None:
            steps = jnp.minimum(steps, self.longest)
        return AdaptiveState(
            steps=jnp.where(warm, state.steps, steps),
            rounds=jnp.minimum(state.rounds, 2**31 - 2) + 1,
            level=jnp.where(warm, level, state.level),
        )


def period(every: Any) -> Period:
    """The period for a user's argument: a `Period`, a number of steps, or a schedule of them.

    Raises:
        ValueError: for anything else, or a number that is not positive.
    """
    if isinstance(every, Period):
        return every
    if callable(every) and not isinstance(every, type):
        return _Scheduled(every)
    if isinstance(every, bool) or not isinstance(every, int):
        raise ValueError(
            "`every` must be a positive integer, a schedule such as "
            "optax.piecewise_constant_schedule(1, {1000: 16}), or a period such as "
            f"jaxcomp.gates.AdaptivePeriod, got {every!r}"
        )
    return Constant(every)

"""Gates that open in given steps, for all workers alike."""

import dataclasses
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.base import Feedback, Gate, Opened
from jaxcomp.types import Array, AxisName, PyTree

_LAST_STEP = 2**31 - 1


class WaitState(NamedTuple):
    """The number of steps for which `Every` stays closed."""

    gate_wait: Array


class PhaseState(NamedTuple):
    """The number of steps that `Phase` has counted."""

    gate_step: Array


@dataclasses.dataclass(frozen=True)
class Always(Gate):
    """Every worker sends in every step.

    Example:
        >>> import jaxcomp
        >>> tx = jaxcomp.compressed_mean(jaxcomp.sign(), "data", gate=Always())
    """

    closes = False

    def factor(self, workers: int) -> float:
        return 1.0

    def init(self, like: PyTree) -> tuple:
        return ()

    def open(
        self, key: Array, tree: Any, state: tuple, axis_name: AxisName, params: PyTree = None
    ) -> Opened:
        return Opened(jnp.asarray(np.True_), None, state)


@dataclasses.dataclass(frozen=True)
class Every(Gate):
    """All workers send in every `k`-th step: in the steps `offset`, `offset + k`, ….

    By default it opens in the last of each `k` steps: a residual then holds `k` gradients and sends
    their sum without further delay. The result is the sum, so the optimizer's step is `k` times as
    long.

    Args:
        k: the number of steps from one round to the next.
        offset: the first step with a round, counted from 0; None for `k − 1`.

    Raises:
        ValueError: if `k` is not positive, or `offset` negative.

    Example:
        >>> import jaxcomp
        >>> link = jaxcomp.Link(jaxcomp.top_k(fraction=0.01), jaxcomp.Residual())
        >>> tx = jaxcomp.compressed_mean(link, "data", gate=Every(4))

    References:
        Stich, `Local SGD converges fast and communicates little
        <https://arxiv.org/abs/1805.09767>`_, 2019, with steps taken between the rounds.

    Note:
        Workers take no local steps between rounds: gradients are accumulated at one point, as in
        `optax.MultiSteps`. Without a memory the gradients of closed rounds are lost.
    """

    k: int
    offset: int | None = None

    def __post_init__(self):
        checks.integer("k", self.k, 1, _LAST_STEP)
        if self.offset is not None:
            checks.integer("offset", self.offset, 0, _LAST_STEP)

    @property
    def closes(self) -> bool:
        return self.k > 1 or self._first > 0

    @property
    def _first(self) -> int:
        return self.k - 1 if self.offset is None else self.offset

    def check(self, feedback: Feedback) -> None:
        """Warns if the feedback loses the messages of closed rounds."""
        _warn_if_lost(self, feedback)

    def factor(self, workers: int) -> float:
        return 1.0

    def init(self, like: PyTree) -> WaitState:
        return WaitState(jnp.asarray(self._first, jnp.int32))

    def open(
        self, key: Array, tree: Any, state: WaitState, axis_name: AxisName, params: PyTree = None
    ) -> Opened:
        go = state.gate_wait == 0
        return Opened(go, None, WaitState(jnp.where(go, self.k, state.gate_wait) - 1))


@dataclasses.dataclass(frozen=True)
class Phase(Gate):
    """All workers send in the steps from `start` to `stop − 1`, counted from 0.

    Args:
        start: the first step with an open round.
        stop: the first closed step after that; None for no end.

    Raises:
        ValueError: unless `0 ≤ start < stop`.

    Example:
        >>> import jaxcomp
        >>> link = jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
        >>> tx = jaxcomp.compressed_mean(link, "data", gate=Phase(start=100))
    """

    start: int
    stop: int | None = None

    def __post_init__(self):
        checks.integer("start", self.start, 0, _LAST_STEP)
        if self.stop is not None:
            checks.integer("stop", self.stop, self.start + 1, _LAST_STEP)

    @property
    def closes(self) -> bool:
        return self.start > 0 or self.stop is not None

    def check(self, feedback: Feedback) -> None:
        """Warns if the feedback loses the messages of closed rounds."""
        _warn_if_lost(self, feedback)

    def factor(self, workers: int) -> float:
        return 1.0

    def init(self, like: PyTree) -> PhaseState:
        return PhaseState(jnp.zeros((), jnp.int32))

    def open(
        self, key: Array, tree: Any, state: PhaseState, axis_name: AxisName, params: PyTree = None
    ) -> Opened:
        step = state.gate_step
        go = step >= self.start
        go = go if self.stop is None else go & (step < self.stop)
        # The count stops at the largest integer, so that it never becomes negative.
        return Opened(go, None, PhaseState(jnp.minimum(step, _LAST_STEP - 1) + 1))


def _warn_if_lost(gate: Any, feedback: Feedback) -> None:
    if gate.closes and not feedback.facts.memory:
        warnings.warn(
            f"{gate!r} without feedback loses the gradients of closed steps; use "
            "Link(codec, Residual()) with a contractive codec, such as "
            "jaxcomp.codecs.Contractive(codec), which sends them later.",
            stacklevel=5,
        )

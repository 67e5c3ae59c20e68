"""The energy, the time and the error bound of GenQSGD for given rounds, steps and batches."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxcomp import checks
from jaxcomp.theory import qsgd


@dataclasses.dataclass(frozen=True)
class Loss:
    """The constants of the loss and of its training in the convergence bound.

    Args:
        size: `D`, the number of parameters.
        gap: `Q`, the first loss minus the least.
        gradient: `G`, a bound of the norm of a gradient.
        smoothness: `L`.
        noise: `σ`, the deviation of a stochastic gradient from the gradient.
        learning_rate: `γ`, at most `1/L`. It is given, not planned: `c` times as many steps with
            batches and rates `c` times as small have the same bound and cost.

    Raises:
        ValueError: for numbers that are not positive, or a rate above `1/L`.
    """

    size: int
    gap: float
    gradient: float
    smoothness: float
    noise: float
    learning_rate: float

    def __post_init__(self):
        checks.integer("size", self.size, 1)
        for name in ("gap", "gradient", "smoothness", "noise", "learning_rate"):
            checks.positive(name, getattr(self, name))
        if self.learning_rate > 1 / self.smoothness:
            raise ValueError(
                f"`learning_rate` must be at most 1/smoothness = {1 / self.smoothness:.4g}, got "
                f"{self.learning_rate}"
            )

    def variance(self, levels: float) -> float:
        """`q = min(D/s², √D/s)`, the relative variance of QSGD with `s` levels."""
        return qsgd.qsgd_variance(self.size, levels)

    def bits(self, levels: float) -> float:
        """`M = 32 + D + D log₂ s`, the bits of a message."""
        return qsgd.qsgd_bits(self.size, levels)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Machines of one class: workers, or the server.

    Args:
        number: how many.
        cycles: cycles for a sample's gradient, or for a round of the server.
        frequency: cycles per second.
        power: watts while it sends.
        rate: bits per second that it sends.
        levels: `s`, the levels of its quantizer.
        capacitance: `α`: a cycle takes `α · frequency²` joules.

    Raises:
        ValueError: for numbers that are not positive.
    """

    number: int
    cycles: float
    frequency: float
    power: float
    rate: float
    levels: float
    capacitance: float = 2e-28

    def __post_init__(self):
        checks.integer("number", self.number, 1)
        for name in ("cycles", "frequency", "power", "rate", "levels", "capacitance"):
            checks.positive(name, getattr(self, name))

    @property
    def seconds(self) -> float:
        """Seconds of a sample's gradient, or of the server's round."""
        return self.cycles / self.frequency

    @property
    def joules(self) -> float:
        """Joules of the same."""
        return self.capacitance * self.cycles * self.frequency**2


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings of GenQSGD, and their cost.

    Attributes:
        rounds: `K₀`.
        steps: `K`, the local steps of each class of workers.
        batch: `B`, the samples of a step.
        energy: joules of all rounds.
        seconds: their time.
        error: the bound of the mean squared norm of the gradient.
    """

    rounds: int
    steps: tuple[int, ...]
    batch: int
    energy: float
    seconds: float
    error: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """The constants of a problem: `c₁/(K₀ΣK) + c₂ max K² + c₃/B + Σ c₄K²/ΣK ≤ error`."""

    loss: Loss
    classes: tuple[Machine, ...]
    server: Machine
    error: float
    seconds: float

    @property
    def workers(self) -> int:
        return sum(each.number for each in self.classes)

    @property
    def numbers(self) -> np.ndarray:
        return np.array([each.number for each in self.classes], float)

    @property
    def first(self) -> float:
        return 2 * self.workers * self.loss.gap / self.loss.learning_rate

    @property
    def second(self) -> float:
        loss = self.loss
        return (2 * loss.gradient * loss.smoothness * loss.learning_rate) ** 2

    @property
    def third(self) -> float:
        loss = self.loss
        return loss.smoothness * loss.noise**2 * loss.learning_rate / self.workers

    @property
    def fourth(self) -> np.ndarray:
        loss = self.loss
        down = 1 + loss.variance(self.server.levels)
        up = np.array([down * (1 + loss.variance(each.levels)) - 1 for each in self.classes])
        return 2 * loss.smoothness * loss.gradient**2 * loss.learning_rate * up * self.numbers

    @property
    def messages(self) -> tuple[float, float]:
        """Seconds and joules of a round that do not depend on its steps."""
        bits = [self.loss.bits(each.levels) / each.rate for each in self.classes]
        down = self.loss.bits(self.server.levels) / self.server.rate
        sent = sum(b * e.number * e.power for b, e in zip(bits, self.classes, strict=True))
        seconds = max(bits) + down + self.server.seconds
        return seconds, sent + down * self.server.power + self.server.joules

    @property
    def joules(self) -> np.ndarray:
        """Joules of a sample's gradient on all machines of each class."""
        return np.array([each.joules * each.number for each in self.classes])

    @property
    def each_second(self) -> np.ndarray:
        """Seconds of a sample's gradient on a machine of each class."""
        return np.array([each.seconds for each in self.classes])

    def floor(self, steps: np.ndarray, batch: np.ndarray | float) -> np.ndarray:
        """The bound after any number of rounds, for `steps` of shape `[..., classes]`."""
        drift = self.second * np.max(steps, -1) ** 2
        return drift + steps**2 @ self.fourth / (steps @ self.numbers) + self.third / batch

    def rounds(self, steps: np.ndarray, batch: np.ndarray | float) -> np.ndarray:
        """The fewest rounds that meet the error; infinite if none do, or they take too long."""
        rounds = self.enough(steps, batch)
        return np.where(rounds * self.round_seconds(steps, batch) <= self.seconds, rounds, np.inf)

    def enough(self, steps: np.ndarray, batch: np.ndarray | float) -> np.ndarray:
        """The fewest rounds that meet the error; infinite if none do."""
        left = self.error - self.floor(steps, batch)
        with np.errstate(divide="ignore"):
            rounds = np.ceil(self.first / (steps @ self.numbers * left) * (1 - 1e-12))
        return np.where(left > 0, np.maximum(rounds, 1), np.inf)

    def round_seconds(self, steps: np.ndarray, batch: np.ndarray | float) -> np.ndarray:
        """The seconds of a round."""
        return batch * np.max(steps * self.each_second, -1) + self.messages[0]

    def energy(self, steps: np.ndarray, batch: np.ndarray | float) -> np.ndarray:
        """The joules of the fewest rounds; infinite if no number of rounds meets both limits."""
        return self.rounds(steps, batch) * (batch * (steps @ self.joules) + self.messages[1])

    def choice(self, steps: Sequence[int], batch: int) -> Choice | None:
        """The fewest rounds that meet the error; None if none do, or they take too long."""
        own = np.array(steps, float)
        rounds = float(self.rounds(own, batch))
        if math.isinf(rounds):
            return None
        return Choice(
            rounds=int(rounds),
            steps=tuple(int(k) for k in steps),
            batch=int(batch),
            energy=float(self.energy(own, batch)),
            seconds=float(rounds * self.round_seconds(own, batch)),
            error=float(self.first / (own @ self.numbers * rounds) + self.floor(own, batch)),
        )

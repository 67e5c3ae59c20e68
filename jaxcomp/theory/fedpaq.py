"""The time of federated rounds with few clients, local steps and quantised messages."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from jaxcomp import checks
from jaxcomp.theory import qsgd


@final
@dataclasses.dataclass(frozen=True)
class Smooth:
    """The constants of a smooth loss in the convergence bound, the same for all clients.

    Args:
        size: `D`, the number of parameters.
        gap: `f(x₀) − f*`, the first loss minus the least.
        smoothness: `L`.
        noise: `σ`, the deviation of the gradient of one sample from the gradient.

    Raises:
        ValueError: for numbers that are not positive.
    """

    size: int
    gap: float
    smoothness: float
    noise: float

    def __post_init__(self):
        checks.integer("size", self.size, 1)
        for name in ("gap", "smoothness", "noise"):
            checks.positive(name, getattr(self, name))


@final
@dataclasses.dataclass(frozen=True)
class Clients:
    """Clients of one kind, and the link that they share.

    The gradients of `m` samples take `m · shift` seconds and an exponential time of mean
    `m · tail`.

    Args:
        number: `n`, how many there are.
        shift: the least seconds of a sample's gradient.
        tail: the mean of the seconds beyond that.
        bandwidth: the bits per second that the server receives from all clients together.

    Raises:
        ValueError: for numbers that are not positive, or a negative tail.
    """

    number: int
    shift: float
    tail: float
    bandwidth: float

    def __post_init__(self):
        checks.integer("number", self.number, 1)
        checks.number("tail", self.tail, 0.0)
        for name in ("shift", "bandwidth"):
            checks.positive(name, getattr(self, name))

    def seconds(self, participants: int) -> float:
        """Mean seconds per sample of the slowest participant: `shift + tail (1 + ½ + … + 1/r)`."""
        checks.integer("participants", participants, 1, self.number)
        return self.shift + self.tail * math.fsum(1 / each for each in range(1, participants + 1))


def fedpaq_round(
    clients: Clients,
    size: int,
    *,
    steps: int,
    participants: int,
    levels: float | None,
    batch: int = 1,
) -> float:
    """The mean seconds of a round: `τ B (shift + tail H_r) + r bits / bandwidth`.

    The slowest of `r` clients counts, whose exponential time has the mean `H_r = 1 + ½ + … + 1/r`,
    and the messages follow one another on the server's link.

    Args:
        clients: their speed and their link.
        size: `D`, the number of parameters.
        steps: `τ`, the local steps of a round.
        participants: `r`, the clients of a round.
        levels: `s` of QSGD; None for messages of 32 bits per element.
        batch: `B`, the samples of a step.

    Raises:
        ValueError: for numbers that are not positive, or more participants than clients.

    Example:
        >>> clients = Clients(50, shift=1e-4, tail=1e-4, bandwidth=1e7)
        >>> round(fedpaq_round(clients, 100_000, steps=5, participants=25, levels=1, batch=10), 3)
        0.274

    References:
        Reisizadeh et al., `FedPAQ: a communication-efficient federated learning method with
        periodic averaging and quantization <https://arxiv.org/abs/1909.13014>`_, 2020; Lee et al.,
        Speeding up distributed machine learning using codes, 2018, for the time of clients.

    Note:
        The model is from memory of the paper. Its constants are not: give your own. The model sent
        to the clients is not counted, as in the paper.
    """
    for name, value in (("steps", steps), ("batch", batch)):
        checks.integer(name, value, 1)
    message = _message(clients, size, levels, participants)
    return steps * batch * clients.seconds(participants) + message.seconds(clients)


def fedpaq_time(
    clients: Clients,
    size: int,
    *,
    iterations: int,
    steps: int,
    participants: int,
    levels: float | None,
    batch: int = 1,
) -> float:
    """The mean seconds of a training of `T` iterations: `⌈T/τ⌉` rounds.

    At fixed `T` it falls with every further local step, and so does not say how many are best:
    see `plan_fedpaq`.

    Args:
        clients: their speed and their link.
        size: `D`, the number of parameters.
        iterations: `T = K τ`, the local steps of all rounds.
        steps: `τ`, the local steps of a round.
        participants: `r`, the clients of a round.
        levels: `s` of QSGD; None for messages of 32 bits per element.
        batch: `B`, the samples of a step.

    Raises:
        ValueError: as `fedpaq_round`.

    Example:
        >>> clients = Clients(50, shift=1e-4, tail=1e-4, bandwidth=1e7)
        >>> quick = dict(participants=25, levels=1, batch=10)
        >>> [round(fedpaq_time(clients, 100_000, iterations=100, steps=τ, **quick), 1)
        ...  for τ in (1, 2, 5, 10, 50)]
        [25.5, 13.0, 5.5, 3.0, 1.0]

    References:
        As `fedpaq_round`.
    """
    checks.integer("iterations", iterations, 1)
    each = fedpaq_round(
        clients, size, steps=steps, participants=participants, levels=levels, batch=batch
    )
    return math.ceil(iterations / steps) * each


def fedpaq_longest(
    clients: Clients, size: int, *, iterations: int, participants: int, levels: float | None
) -> int:
    """The most local steps per round for which the bound holds.

    `τ ≤ (√(B₂² + 0.8) − B₂)/8 · √T` with `B₂ = q/n + 4(1 + q)(n − r)/(r(n − 1))`.

    Args:
        clients: of which only the number counts.
        size: `D`, the number of parameters.
        iterations: `T = K τ`, the local steps of all rounds.
        participants: `r`, the clients of a round.
        levels: `s` of QSGD; None for messages of 32 bits per element.

    Returns:
        The number of steps; 0 if the theory needs more iterations.

    Raises:
        ValueError: as `fedpaq_round`.

    Example:
        >>> clients = Clients(50, shift=1e-4, tail=1e-4, bandwidth=1e7)
        >>> fedpaq_longest(clients, 1000, iterations=40_000, participants=50, levels=10)
        20

    References:
        Reisizadeh et al., `FedPAQ <https://arxiv.org/abs/1909.13014>`_, 2020.

    Note:
        From memory of the paper's condition for nonconvex losses.
    """
    checks.integer("iterations", iterations, 1)
    message = _message(clients, size, levels, participants)
    return math.floor(message.reach * math.sqrt(iterations))


@final
@dataclasses.dataclass(frozen=True)
class FedpaqPlan:
    """Settings of FedPAQ, and their cost.

    Attributes:
        rounds: `K`.
        steps: `τ`, the local steps of a round.
        participants: `r`, the clients of a round.
        levels: `s` of QSGD; None for messages of 32 bits per element.
        learning_rate: `1/(L √T)` with `T = K τ`.
        seconds: the mean time of all rounds.
        error: the bound of the mean squared norm of the gradient.
    """

    rounds: int
    steps: int
    participants: int
    levels: float | None
    learning_rate: float
    seconds: float
    error: float


def plan_fedpaq(
    loss: Smooth,
    clients: Clients,
    *,
    error: float,
    levels: Sequence[float | None] = (1, 2, 4, 8, 16, 32, 64, 128, 256, None),
    participants: Sequence[int] | None = None,
    steps: int | None = None,
    batch: int = 1,
) -> FedpaqPlan:
    """The local steps, participants and levels of FedPAQ that meet an error in the least time.

    Least `K (τ B (shift + tail H_r) + r bits/bandwidth)` with
    `(2L(f(x₀) − f*) + σ²/B (1/n + B₂))/√T + σ²/B (1 + 1/n)(τ − 1)/T ≤ error`, `T = K τ` and `τ` at
    most `fedpaq_longest`. More local steps spare messages and need more iterations, so the best
    number is between one and the longest. Every pair of participants and levels is tried, and every
    number of steps that may be best.

    Args:
        loss: the constants of the loss.
        clients: their speed and their link.
        error: the bound to meet, of the mean squared norm of the gradient.
        levels: numbers of levels to try; None for messages of 32 bits per element.
        participants: numbers of participants to try; every one by default.
        steps: the number of local steps, if it is given.
        batch: `B`, the samples of a step.

    Raises:
        ValueError: for numbers that are not positive, more participants than clients, or nothing
            to try.

    Example:
        >>> loss = Smooth(size=1000, gap=2.0, smoothness=1.0, noise=3.0)
        >>> clients = Clients(50, shift=1e-4, tail=1e-4, bandwidth=1e6)
        >>> choice = plan_fedpaq(loss, clients, error=0.05, batch=10)
        >>> choice.steps, choice.participants, choice.levels, choice.rounds
        (4, 4, 128, 2444)

    References:
        Reisizadeh et al., `FedPAQ: a communication-efficient federated learning method with
        periodic averaging and quantization <https://arxiv.org/abs/1909.13014>`_, 2020.

    Note:
        The bound is a reconstruction: its form and `B₂` are from memory of the paper, the weight of
        the noise, `1/n + B₂`, follows from the same steps of the proof. Trust what it compares, not
        its value.
    """
    checks.positive("error", error)
    checks.integer("batch", batch, 1)
    if steps is not None:
        checks.integer("steps", steps, 1)
    call = "jaxcomp.planning.Smooth(size=1000, gap=2.0, smoothness=1.0, noise=3.0)"
    checks.instance("loss", loss, Smooth, call)
    checks.instance("clients", clients, Clients, _CLIENTS)
    tried = range(1, clients.number + 1) if participants is None else participants
    for name, value in (("participants", tried), ("levels", levels)):
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"`{name}` must be a sequence of numbers to try, got {value!r}")
    if not len(tried) or not len(levels):
        raise ValueError(
            "`participants` and `levels` must have at least one number to try, got "
            f"{participants!r} and {levels!r}"
        )
    best: FedpaqPlan | None = None
    for r in tried:
        for s in levels:
            search = _Search(loss, clients, _message(clients, loss.size, s, r), error, batch)
            for choice in search.choices(steps, math.inf if best is None else best.seconds):
                if best is None or choice.seconds < best.seconds:
                    best = choice
    assert best is not None  # Every training that is long enough meets the error.
    return best


@dataclasses.dataclass(frozen=True)
class _Message:
    """The messages of a round."""

    size: int
    levels: float | None
    clients: int
    participants: int

    def __post_init__(self):
        checks.integer("size", self.size, 1)
        checks.integer("participants", self.participants, 1, self.clients)
        if self.levels is not None:
            checks.number("levels", self.levels, 1.0)

    def seconds(self, clients: Clients) -> float:
        bits = 32 * self.size if self.levels is None else qsgd.qsgd_bits(self.size, self.levels)
        return self.participants * bits / clients.bandwidth

    @property
    def spread(self) -> float:
        """`B₂ = q/n + 4(1 + q)(n − r)/(r(n − 1))`."""
        n, r = self.clients, self.participants
        q = 0.0 if self.levels is None else qsgd.qsgd_variance(self.size, self.levels)
        return q / n + (4 * (1 + q) * (n - r) / (r * (n - 1)) if r < n else 0.0)

    @property
    def reach(self) -> float:
        """`τ/√T` of the longest round."""
        return 0.1 / (math.sqrt(self.spread**2 + 0.8) + self.spread)


_CLIENTS = "jaxcomp.planning.Clients(number=50, shift=1e-4, tail=1e-4, bandwidth=1e7)"


def _message(clients: Clients, size: int, levels: float | None, participants: int) -> _Message:
    checks.instance("clients", clients, Clients, _CLIENTS)
    return _Message(size, levels, clients.number, participants)


@dataclasses.dataclass(frozen=True)
class _Search:
    """Over the local steps, for given participants and levels."""

    loss: Smooth
    clients: Clients
    message: _Message
    target: float
    batch: int

    @property
    def constants(self) -> tuple[float, float]:
        """`a` and `b` of the bound `a/√T + b (τ − 1)/T`."""
        noise = self.loss.noise**2 / self.batch
        first = 2 * self.loss.smoothness * self.loss.gap
        n = self.clients.number
        return first + noise * (1 / n + self.message.spread), noise * (1 + 1 / n)

    def iterations(self, steps: np.ndarray) -> np.ndarray:
        """The least `T`, a real number, for rounds of these steps."""
        first, drift = self.constants
        root = first + np.sqrt(first**2 + 4 * self.target * drift * (steps - 1))
        return np.maximum((root / (2 * self.target)) ** 2, (steps / self.message.reach) ** 2)

    def choices(self, steps: int | None, best: float) -> Iterator[FedpaqPlan]:
        """The fastest of each range of steps, until further ones cannot be faster than `best`."""
        first, drift = self.constants
        work = self.batch * self.clients.seconds(self.message.participants)
        sent = self.message.seconds(self.clients)
        low, high = (1, 64) if steps is None else (steps, steps + 1)
        while low == 1 or float(self.iterations(np.array(float(low)))) * work < best:
            tried = np.arange(low, high, dtype=float)
            rounds = np.ceil(self.iterations(tried) / tried * (1 - 1e-12))
            seconds = rounds * (tried * work + sent)
            at = int(np.argmin(seconds))
            best = min(best, float(seconds[at]))
            local, root = int(tried[at]), math.sqrt(int(rounds[at]) * int(tried[at]))
            yield FedpaqPlan(
                rounds=int(rounds[at]),
                steps=local,
                participants=self.message.participants,
                levels=self.message.levels,
                learning_rate=1 / (self.loss.smoothness * root),
                seconds=float(seconds[at]),
                error=first / root + drift * (local - 1) / root**2,
            )
            if steps is not None:
                return
            low, high = high, 2 * high

"""The least energy of federated rounds with quantised messages, under limits of error and time."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxcomp import checks
from jaxcomp.lazy import Lazy
from jaxcomp.theory import qsgd

optimize = Lazy("scipy.optimize")


@dataclasses.dataclass(frozen=True)
class Loss:
    """What the convergence bound needs to know about the loss, and about how it is trained.

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
        frequency: cycles a second.
        power: watts while it sends.
        rate: bits a second that it sends.
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
class Plan:
    """Settings of GenQSGD, and what they cost.

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

    def floor(self, steps: np.ndarray, batch: float) -> float:
        """The bound after any number of rounds."""
        total = self.numbers @ steps
        drift = self.second * steps.max() ** 2 + self.fourth @ steps**2 / total
        return float(drift + self.third / batch)

    def plan(self, steps: Sequence[int], batch: int) -> Plan | None:
        """The fewest rounds that meet the error; None if none do, or they take too long."""
        own = np.array(steps, float)
        left, total = self.error - self.floor(own, batch), float(self.numbers @ own)
        if left <= 0:
            return None
        rounds = max(math.ceil(self.first / (total * left) * (1 - 1e-12)), 1)
        seconds, energy = self.messages
        slowest = max(k * each.seconds for k, each in zip(steps, self.classes, strict=True))
        work = sum(k * e.joules * e.number for k, e in zip(steps, self.classes, strict=True))
        took = rounds * (batch * slowest + seconds)
        if took > self.seconds:
            return None
        return Plan(
            rounds=rounds,
            steps=tuple(int(k) for k in steps),
            batch=batch,
            energy=rounds * (batch * work + energy),
            seconds=took,
            error=self.first / (total * rounds) + self.floor(own, batch),
        )


def plan_genqsgd(
    loss: Loss,
    classes: Sequence[Machine],
    server: Machine,
    *,
    error: float,
    seconds: float,
    per_class: bool = False,
    steps: int | None = None,
    batch: int | None = None,
) -> Plan | None:
    """The rounds, local steps and batch of GenQSGD of least energy that meet an error and a time.

    Least `K₀ (B Σ αCF²Kₙ + αC₀F₀² + Σ pₙMₙ/rₙ + p₀M₀/r₀)` with
    `2NQ/(γK₀ΣK) + 4G²L²γ² max K² + Lσ²γ/(NB) + 2LG²γ Σ qₙKₙ²/ΣK ≤ error` and
    `K₀ (B max CₙKₙ/Fₙ + C₀/F₀ + max Mₙ/rₙ + M₀/r₀) ≤ seconds`.

    With the same number of steps on all workers every pair of steps and batch that could be best is
    tried, so the result is exact. With `per_class`, the sum of the steps is replaced by a product
    that bounds it, the geometric program is solved, and both are repeated until nothing changes;
    then integers near the solution are tried.

    Args:
        loss: the constants of the loss.
        classes: the workers.
        server: the server; its number is 1.
        error: the bound to meet, of the mean squared norm of the gradient.
        seconds: the time to meet.
        per_class: whether classes may take different numbers of steps.
        steps: the number of local steps, if it is given (1: mini-batch SGD).
        batch: the samples of a step, if they are given.

    Returns:
        The plan, or None if no plan meets both limits.

    Raises:
        ValueError: for limits that are not positive, no worker, or `steps` beside `per_class`.

    Example:
        >>> loss = Loss(100_352, gap=2.5, gradient=33.63, smoothness=0.084, noise=33.18,
        ...             learning_rate=0.01)
        >>> fast = Machine(5, cycles=1e8, frequency=2e10 / 11, power=1.5, rate=5e6, levels=2**14)
        >>> slow = dataclasses.replace(fast, frequency=2e9 / 11)
        >>> server = Machine(1, cycles=100, frequency=3e9, power=20, rate=7.5e7, levels=2**32)
        >>> plan = plan_genqsgd(loss, [fast, slow], server, error=0.25, seconds=1e5)
        >>> plan.rounds, plan.steps, plan.batch, round(plan.energy, 1)
        (835, (4, 4), 2, 6738.5)

    References:
        Li, Cui and Lau, `Optimization-based GenQSGD for federated edge learning
        <https://arxiv.org/abs/2111.00526>`_, 2021, and the authors' code, from which the constants
        of the example are.

    Note:
        The paper also optimises `γ`. But `c` times as many steps, with batches and rates `c` times
        as small, leave every term as it is, so that minimum is not unique.
    """
    checks.positive("error", error)
    checks.positive("seconds", seconds)
    checks.made("loss", loss, Loss, "jaxcomp.planning.Loss(size, gap=..., ...)")
    checks.sequence("classes", classes)
    for name, machine in [("classes", each) for each in classes] + [("server", server)]:
        checks.made(name, machine, Machine, "jaxcomp.planning.Machine(number, cycles=..., ...)")
    for name, value in (("steps", steps), ("batch", batch)):
        if value is not None:
            checks.integer(name, value, 1)
    checks.flag("per_class", per_class)
    if not classes:
        raise ValueError("`classes` must have at least one class of workers, got none")
    if per_class and steps is not None:
        raise ValueError(
            f"`steps` must be None with per_class=True, which chooses them, got {steps}"
        )
    setting = Problem(loss, tuple(classes), server, error, seconds)
    best = min(_uniform(setting, steps, batch), key=lambda plan: plan.energy, default=None)
    if not per_class:
        return best
    found = [best] if best else []
    found += _per_class(setting, best, batch)
    return min(found, key=lambda plan: plan.energy, default=None)


def _uniform(setting: Problem, steps: int | None, batch: int | None) -> Iterator[Plan]:
    """Every plan with equal steps that may be the best."""
    best, classes = math.inf, len(setting.classes)
    for k in itertools.count(1) if steps is None else [steps]:
        own = np.full(classes, float(k))
        left = setting.error - setting.floor(own, math.inf)
        if left <= 0:  # More steps only drift further.
            return
        fewest = max(setting.first / (setting.numbers @ own * left), 1.0)
        work = float(k * sum(each.joules * each.number for each in setting.classes))
        for b in itertools.count(1) if batch is None else [batch]:
            # No larger batch needs fewer rounds than `fewest`.
            if fewest * (b * work + setting.messages[1]) > best:
                break
            if fewest * b * k * max(each.seconds for each in setting.classes) > setting.seconds:
                break
            plan = setting.plan([k] * classes, b)
            if plan:
                best = min(best, plan.energy)
                yield plan


def _per_class(setting: Problem, start: Plan | None, batch: int | None) -> list[Plan]:
    """Plans near the solution of the geometric programs, from the best uniform one."""
    classes = len(setting.classes)
    steps = np.array(start.steps if start else [1] * classes, float)
    point = np.log([*steps, start.batch if start else 1, start.rounds if start else 1e3])
    for _ in range(_ROUNDS):
        shares = setting.numbers * np.exp(point[:classes])
        found = _solved(setting, shares / shares.sum(), point, batch)
        if found is None:
            break
        change, point = np.abs(found - point).max(), found
        if change < 1e-9:
            break
    near = [_near(float(np.exp(x))) for x in point[: classes + 1]]
    near[-1] = near[-1] if batch is None else [batch]
    plans = [setting.plan(each[:-1], each[-1]) for each in itertools.product(*near)]
    return [plan for plan in plans if plan]


_ROUNDS = 50


def _near(x: float) -> list[int]:
    """The integers next to a number, two on each side."""
    low = math.floor(x)
    return [n for n in range(low - 1, low + 3) if n >= 1]


def _solved(
    setting: Problem, shares: np.ndarray, start: np.ndarray, batch: int | None
) -> np.ndarray | None:
    """The geometric program for given shares of the steps, convex in logarithms; None if it fails.

    `ΣK ≥ Π (K/β)^β` with equality at the shares `β`, so the point stays feasible for the bound.
    """
    classes, numbers = len(setting.classes), setting.numbers
    seconds, energy = setting.messages
    joules = np.array([each.joules * each.number for each in setting.classes])
    each_second = np.array([each.seconds for each in setting.classes])

    def total(y: np.ndarray) -> float:
        return float(np.exp(shares @ (y[:classes] + np.log(numbers) - np.log(shares))))

    def cost(y: np.ndarray) -> float:
        k, b, rounds = np.exp(y[:classes]), math.exp(y[-2]), math.exp(y[-1])
        return math.log(rounds * (b * float(joules @ k) + energy))

    def error(y: np.ndarray, largest: int) -> float:
        k, b, rounds = np.exp(y[:classes]), math.exp(y[-2]), math.exp(y[-1])
        drift = setting.second * k[largest] ** 2 + setting.fourth @ k**2 / total(y)
        bound = setting.first / (rounds * total(y)) + drift + setting.third / b
        return -math.log(bound / setting.error)

    def time(y: np.ndarray, slowest: int) -> float:
        k, b, rounds = np.exp(y[:classes]), math.exp(y[-2]), math.exp(y[-1])
        return -math.log(
            rounds * (b * k[slowest] * each_second[slowest] + seconds) / setting.seconds
        )

    constraints = [
        {"type": "ineq", "fun": function, "args": (one,)}
        for function in (error, time)
        for one in range(classes)
    ]
    bounds = [(0.0, 20.0)] * classes
    bounds += [(0.0, 20.0) if batch is None else (math.log(batch), math.log(batch)), (0.0, 30.0)]
    found = optimize.minimize(
        cost,
        start,
        method="SLSQP",
        bounds=bounds,
        constraints=constraints,
        options={"maxiter": 500},
    )
    return found.x if found.success else None

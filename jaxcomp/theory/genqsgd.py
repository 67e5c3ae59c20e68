"""The least energy of federated rounds with quantised messages, under limits of error and time."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxcomp import checks
from jaxcomp.theory import genqsgd_classes
from jaxcomp.theory.genqsgd_problem import Choice, Loss, Machine, Problem


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
) -> Choice | None:
    """The rounds, local steps and batch of GenQSGD of least energy that meet an error and a time.

    Least `K₀ (B Σ αCF²Kₙ + αC₀F₀² + Σ pₙMₙ/rₙ + p₀M₀/r₀)` with
    `2NQ/(γK₀ΣK) + 4G²L²γ² max K² + Lσ²γ/(NB) + 2LG²γ Σ qₙKₙ²/ΣK ≤ error` and
    `K₀ (B max CₙKₙ/Fₙ + C₀/F₀ + max Mₙ/rₙ + M₀/r₀) ≤ seconds`.

    With the same number of steps on all workers every pair of steps and batch that could be best is
    tried, so the result is exact. With `per_class`, the best real numbers of steps are found for
    batches, largest numbers of steps and numbers of rounds throughout the feasible region, since
    these are convex problems; then integers near them are improved until no change of one or two of
    them helps.

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
        The choice, or None if no choice meets both limits.

    Raises:
        ValueError: for limits that are not positive, no worker, or `steps` beside `per_class`.

    Example:
        >>> import dataclasses
        >>> loss = Loss(100_352, gap=2.5, gradient=33.63, smoothness=0.084, noise=33.18,
        ...             learning_rate=0.01)
        >>> fast = Machine(5, cycles=1e8, frequency=2e10 / 11, power=1.5, rate=5e6, levels=2**14)
        >>> slow = dataclasses.replace(fast, frequency=2e9 / 11)
        >>> server = Machine(1, cycles=100, frequency=3e9, power=20, rate=7.5e7, levels=2**32)
        >>> choice = plan_genqsgd(loss, [fast, slow], server, error=0.25, seconds=1e5)
        >>> choice.rounds, choice.steps, choice.batch, round(choice.energy, 1)
        (835, (4, 4), 2, 6738.5)

    References:
        Li, Cui and Lau, `Optimization-based GenQSGD for federated edge learning
        <https://arxiv.org/abs/2111.00526>`_, 2021, and the authors' code, from which the constants
        of the example are.

    Note:
        The authors solve a sequence of geometric programs from one start, which may end at a worse
        choice, or at none; here no start is needed. The paper also optimises `γ`. But `c` times as
        many steps, with batches and rates `c` times as small, leave every term as it is, so that
        minimum is not unique.
    """
    checks.positive("error", error)
    checks.positive("seconds", seconds)
    checks.instance("loss", loss, Loss, "jaxcomp.planning.Loss(size, gap=..., ...)")
    checks.sequence("classes", classes)
    for name, machine in [("classes", each) for each in classes] + [("server", server)]:
        checks.instance(name, machine, Machine, "jaxcomp.planning.Machine(number, cycles=..., ...)")
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
    best = min(_uniform(setting, steps, batch), key=lambda choice: choice.energy, default=None)
    if not per_class:
        return best
    return genqsgd_classes.choice(setting, best, batch)


def _uniform(setting: Problem, steps: int | None, batch: int | None) -> Iterator[Choice]:
    """Every choice with equal steps that may be the best."""
    best, classes = math.inf, len(setting.classes)
    for k in itertools.count(1) if steps is None else [steps]:
        own = np.full(classes, float(k))
        left = setting.error - setting.floor(own, math.inf)
        if left <= 0:  # Further steps only increase the drift.
            return
        fewest = max(setting.first / (setting.numbers @ own * left), 1.0)
        work = float(k * sum(each.joules * each.number for each in setting.classes))
        for b in itertools.count(1) if batch is None else [batch]:
            # No larger batch needs fewer rounds than `fewest`.
            if fewest * (b * work + setting.messages[1]) > best:
                break
            if fewest * b * k * max(each.seconds for each in setting.classes) > setting.seconds:
                break
            choice = setting.choice([k] * classes, b)
            if choice:
                best = min(best, choice.energy)
                yield choice

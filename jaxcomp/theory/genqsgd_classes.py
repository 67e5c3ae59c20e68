"""The choice of GenQSGD of least energy whose classes of workers take different numbers of steps.

For a batch `B` and a largest number of steps `M` the error leaves `R = error − c₂M² − c₃/B`, and
its bound is `Σ (R N k − c₄ k²) ≥ c₁/K₀`. With `v = K₀k` in place of `k`, this, the time and the
energy are convex in `(K₀, v)`. So the numbers of rounds that are feasible are an interval, and for
each of them the best steps follow from one multiplier.
"""

import itertools
from typing import NamedTuple

import numpy as np

from jaxcomp.theory.genqsgd_problem import Choice, Problem

_HALVINGS = 40
_ROUNDS = 16
"""Numbers of rounds that are tried for each batch and largest number of steps."""
_STARTS = 24
"""Plans from which integers are improved."""
_MISSED = 1e100
"""Larger than any energy: the cost of a point that misses a limit."""
_GOLDEN = (5**0.5 - 1) / 2


def choice(setting: Problem, best: Choice | None, batch: int | None) -> Choice | None:
    """The best choice, at least as good as the given one; None if there is none."""
    found = _relaxed(setting, best, batch)
    if best:
        found = np.concatenate([found, [[*best.steps, best.batch]]])
    if not len(found):
        return best
    found = np.unique(np.maximum(np.concatenate([np.floor(found), np.ceil(found)]), 1.0), axis=0)
    starts = found[np.argsort(_worth(setting, found))[:_STARTS]]
    ends = [_improved(setting, start, batch) for start in starts]
    *steps, taken = ends[int(np.argmin([_worth(setting, end) for end in ends]))]
    return setting.choice([int(k) for k in steps], int(taken))


def _worth(setting: Problem, points: np.ndarray) -> np.ndarray:
    """The energies of points `[..., steps and batch]`, or how far they are from both limits.

    A point that misses a limit is worse than all that meet both, and the worse the more it misses.
    """
    steps, batch = points[..., :-1], points[..., -1]
    late = setting.enough(steps, batch) * setting.round_seconds(steps, batch) / setting.seconds
    wrong = setting.floor(steps, batch) / setting.error
    missed = np.where(np.isfinite(late), _MISSED * late, _MISSED**2 * wrong)
    energy = setting.energy(steps, batch)
    return np.where(np.isfinite(energy), energy, missed)


def _improved(setting: Problem, point: np.ndarray, batch: int | None) -> np.ndarray:
    """The integers after all changes of one or two of them that meet the limits or save energy."""
    free = len(point) - (batch is not None)
    ways = [by * sign for by in 2.0 ** np.arange(20) for sign in (-1, 1)]
    moves = [way * np.eye(len(point))[at] for at in range(free) for way in ways]
    for one, other in itertools.combinations(range(free), 2):
        for by, also in itertools.product((-2, -1, 1, 2), repeat=2):
            moves.append(by * np.eye(len(point))[one] + also * np.eye(len(point))[other])
    changes, worth = np.array(moves), float(_worth(setting, point))
    while True:
        near = point + changes
        near = near[np.all(near >= 1, axis=1)]
        found = _worth(setting, near)
        at = int(np.argmin(found))
        if not found[at] < worth:
            return point
        point, worth = near[at], float(found[at])


class _Region(NamedTuple):
    """Batches and largest numbers of steps, and what the error leaves, `[pairs, 1]`."""

    setting: Problem
    batch: np.ndarray
    largest: np.ndarray
    left: np.ndarray

    def gain(self, steps: np.ndarray) -> np.ndarray:
        """`Σ (R N k − c₄ k²)`."""
        own = self.left * self.setting.numbers * steps - self.setting.fourth * steps**2
        return own.sum(-1, keepdims=True)

    def steps(self, rounds: np.ndarray, price: np.ndarray | float) -> np.ndarray:
        """The steps that gain most at a price of their energy, within the time."""
        spare = self.setting.seconds / rounds - self.setting.messages[0]
        most = np.clip(spare / (self.batch * self.setting.each_second), 1.0, self.largest)
        worth = self.left * self.setting.numbers - self.setting.joules * price
        return np.clip(worth / (2 * self.setting.fourth), 1.0, most)

    def reserve(self, rounds: np.ndarray) -> np.ndarray:
        """The margin of the error after these rounds: concave in the rounds, feasible from 0."""
        return rounds * self.gain(self.steps(rounds, 0.0)) - self.setting.first

    def cheapest(self, rounds: np.ndarray) -> np.ndarray:
        """The steps of least energy that meet the error in so many rounds."""
        setting = self.setting
        low = np.zeros(rounds.shape)
        high = np.max(self.left * setting.numbers / setting.joules, -1, keepdims=True) + low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = rounds * self.gain(self.steps(rounds, middle)) >= setting.first
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        return self.steps(rounds, low)


def _relaxed(setting: Problem, best: Choice | None, batch: int | None) -> np.ndarray:
    """Points `[points, steps and batch]` of real steps that are best for their batch and rounds."""
    spare = setting.seconds - setting.messages[0]
    if spare <= 0:
        return np.zeros((0, len(setting.classes) + 1))
    slowest, fastest = setting.each_second.max(), setting.each_second.min()
    most = min((setting.error / setting.second) ** 0.5, spare / fastest)
    batches = _grid(spare / slowest) if batch is None else np.array([float(batch)])
    pairs = np.array(list(itertools.product(batches, _grid(most))), float).reshape(-1, 2, 1)
    b, m = pairs[:, 0], pairs[:, 1]
    left = setting.error - setting.second * m**2 - setting.third / b
    last = setting.seconds / (setting.messages[0] + b * slowest)
    keep = (left > 0) & (last >= 1)
    if best:  # One round takes the energy of a step on each worker, at least.
        least = b * (setting.joules.sum() + setting.joules.min() * (m - 1)) + setting.messages[1]
        keep &= least <= best.energy
    keep = keep[:, 0]
    region, last = _Region(setting, b[keep], m[keep], left[keep]), last[keep]
    ends = _feasible(region, last)
    reserve = region.reserve(np.exp(ends[1]))[:, 0]
    # Keeps at least the nearest one: batches between those that are tried may meet the limits.
    some = reserve >= min(0.0, reserve.max(initial=-np.inf))
    region = _Region(setting, *(x[some] for x in region[1:]))
    low, _, high = (end[some] for end in ends)
    points = []
    for at in np.linspace(0, 1, _ROUNDS):
        steps = region.cheapest(np.exp(low + at * (high - low)))
        points.append(np.concatenate([steps, region.batch], axis=1))
    return np.concatenate(points)


def _grid(most: float) -> np.ndarray:
    """Integers from 1 to `most`: all small ones, then further apart."""
    whole = np.unique(np.round([*range(1, 9), *(8 * 1.25 ** np.arange(1, 100))]))
    return whole[whole <= max(most, 1)]


def _feasible(region: _Region, last: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The logarithms of the fewest, the best and the most rounds within the error, if any are."""
    low, high = np.zeros(last.shape), np.log(last)
    for _ in range(_HALVINGS):
        one, other = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        rising = region.reserve(np.exp(one)) < region.reserve(np.exp(other))
        low, high = np.where(rising, one, low), np.where(rising, high, other)
    best = (low + high) / 2
    ends = []
    for end in (np.zeros(last.shape), np.log(last)):
        inside, outside = best, end
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2
            within = region.reserve(np.exp(middle)) >= 0
            inside, outside = np.where(within, middle, inside), np.where(within, outside, middle)
        ends.append(inside)
    return ends[0], best, ends[1]

"""What hostile voters that know the rule do to `Credible` and to the plain mean.

    python benchmarks/hostile_votes.py

31 workers send binary votes on weights `tanh(1.5·θᵢ)`, `θᵢ ~ N(θ, 0.3²)`, for six rounds. The
hostile ones know all honest votes of the round, and send the same. The error is the mean squared
distance from the mean of the honest votes, over the last three rounds and all seeds. Seconds on a
CPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
from rich.progress import track

import jaxcomp
from jaxcomp import aggregates

WORKERS, ROUNDS, LAST, SPREAD = 31, 6, 3, 0.3
REGIMES = {"decided": 1.0, "mixed": 0.5, "nearly coin tosses": 0.1}
"""Standard deviations of `θ`: how often honest workers agree."""

RULES: dict[str, jaxcomp.Aggregate] = {
    "mean": aggregates.Mean(),
    "bounded": aggregates.Credible(),
    "soft": aggregates.Credible(rule="soft"),
    "hard": aggregates.Credible(rule="hard"),
}

_COMPILED = {rule: jax.jit(rule.combine) for rule in RULES.values()}


def majority(honest: np.ndarray) -> np.ndarray:
    return np.where(honest.sum(0) > 0, 1, -1)


def inverted(honest: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The opposite of the majority."""
    del draw
    return -majority(honest)


def partial(honest: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The opposite of the majority on half of the elements, and the majority on the others."""
    return majority(honest) * draw.choice([-1, 1], honest.shape[1])


def random(honest: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Coin tosses, others for each hostile worker."""
    return draw.choice([-1, 1], (WORKERS - len(honest), honest.shape[1]))


def adaptive(honest: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The majority, but its opposite on the tenth of the elements on which it is weakest."""
    del draw
    weakest = np.argsort(np.abs(honest.sum(0)), kind="stable")[: honest.shape[1] // 10]
    votes = majority(honest)
    votes[weakest] *= -1
    return votes


def copies(honest: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The same coin tosses by all hostile workers."""
    return draw.choice([-1, 1], honest.shape[1])


def framing(honest: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """The majority where most of six honest workers, who shall lose their weight, are against it
    or no vote could hide it, and the opposite elsewhere.
    """
    del draw
    most = majority(honest)
    against = (honest[:6] != most).sum(0) >= 4
    return np.where(against | (np.abs(honest.sum(0)) == len(honest)), most, -most)


ATTACKS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    attack.__name__: attack for attack in (inverted, partial, random, adaptive, copies, framing)
}


def errors(attack: str, attackers: int, deviation: float, size: int, seed: int) -> dict[str, float]:
    """The squared error of each rule."""
    draw = np.random.default_rng(seed)
    theta = draw.normal(0, deviation, size)
    own = draw.normal(theta, SPREAD, (WORKERS - attackers, size))
    chances = (1 + np.tanh(1.5 * own)) / 2
    states = {name: rule.init(np.zeros(size, np.float32), WORKERS) for name, rule in RULES.items()}
    found: dict[str, list[float]] = {name: [] for name in RULES}
    for number in range(ROUNDS):
        honest = np.where(draw.random(chances.shape) < chances, 1, -1)
        hostile = np.broadcast_to(ATTACKS[attack](honest, draw), (attackers, size))
        votes = np.concatenate([hostile, honest]).astype(np.float32)
        for name, rule in RULES.items():
            value, states[name] = _COMPILED[rule](votes, jnp.ones(WORKERS), states[name])
            if number >= ROUNDS - LAST:
                found[name].append(float(np.mean((np.asarray(value) - honest.mean(0)) ** 2)))
    return {name: float(np.mean(each)) for name, each in found.items()}


COLUMNS = (
    "honest votes {regime} | hostile {attackers} | attack {attack} | "
    "mean {mean:.4f} | bounded {bounded:.4f} | soft {soft:.4f} | hard {hard:.4f}"
)


def main() -> None:
    options = reporting.options(
        __doc__, "out/hostile_votes", elements=(20_000, "of a vote"), seeds=(5, "of each case")
    )
    cases = [(r, b, a) for r in REGIMES for b in (5, 10) for a in ATTACKS]
    records = []
    for regime, attackers, attack in track(cases, description="attacks"):
        runs = [
            errors(attack, attackers, REGIMES[regime], options.elements, seed)
            for seed in range(options.seeds)
        ]
        record: dict[str, Any] = {"regime": regime, "attackers": attackers, "attack": attack}
        records.append(record | {name: float(np.mean([r[name] for r in runs])) for name in RULES})
    title = f"Squared error of {WORKERS} workers' votes under attack, against the honest mean"
    table = reporting.Table(title, COLUMNS, records)
    reporting.show(
        table, {"seeds": options.seeds, "records": records}, options.out / "hostile_votes.md"
    )


if __name__ == "__main__":
    main()

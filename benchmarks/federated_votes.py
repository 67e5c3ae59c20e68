"""FedVote with hostile clients, and the networks that it deploys, for `federated_methods.py`."""

import dataclasses
from typing import Any

import federated_task as task
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

from jaxcomp import aggregates, federated
from jaxcomp.base import Aggregate
from jaxcomp.federated import Method

VOTERS, VOTER_IMAGES, ATTACKERS = 31, 41, (0, 5, 10, 14)


@dataclasses.dataclass(frozen=True)
class Attacked(Aggregate):
    """Another rule, after the first clients have replaced their votes.

    They know all honest votes, and send the opposite of the majority.
    """

    rule: Aggregate
    attackers: int

    def init(self, like: Any, workers: int) -> Any:
        return self.rule.init(like, workers)

    def combine(self, messages: Any, weights: Any, state: Any) -> tuple[Any, Any]:
        def spoilt(rows: Any) -> Any:
            majority = jnp.where(rows[self.attackers :].sum(0) > 0, 1, -1).astype(rows.dtype)
            return rows.at[: self.attackers].set(-majority)

        return self.rule.combine(jax.tree.map(spoilt, messages), weights, state)


def normal(x: Any) -> Any:
    """Batch normalization's part in FedVote's networks, without parameters."""
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def voted(weights: Any, x: Any) -> Any:
    for name in ("a", "b"):
        x = jax.nn.relu(normal(x @ weights[name]))
    return 4 * normal(x @ weights["c"])


def voted_loss(weights: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(voted(weights, batch[0]), batch[1])
    return losses.mean()


@jax.jit
def accuracy(weights: Any) -> Any:
    images, digits = task.DATA.test
    return 100 * jnp.mean(voted(weights, images).argmax(-1) == digits)


def random(seed: int = 0) -> Any:
    draw = np.random.default_rng(seed)
    shapes = {"a": (64, 256), "b": (256, 128), "c": (128, 10)}
    return {name: np.float32(draw.normal(0, 0.3, shape)) for name, shape in shapes.items()}


def elect(method: Method, rounds: int, params: Any, seed: int = 0) -> Any:
    """The parameters after a training of 31 clients with a random part of the images each."""
    data = task.batches(True, 20, seed, clients=VOTERS, images=VOTER_IMAGES)
    sim = federated.Simulation(method, params, VOTERS, data, key=seed, chunk=VOTERS)
    sim.run(rounds)
    return sim.params, sim.ledger.up / 1e6


def votes(cases: task.Cases, rounds: int) -> dict[str, Any]:
    """Accuracies of trained and of deployed networks.

    Hostile clients are there from the first round, of random parameters, or come after as many
    rounds without any.
    """
    latent = federated.Latent(voted_loss)
    rules = {"plain": aggregates.Mean(), "credible": aggregates.Credible(rule="hard")}

    def voting(rule: str, attackers: int) -> Method:
        return federated.fedvote(latent, values=2, aggregate=Attacked(rules[rule], attackers))

    def begun(start: str, seed: int) -> Any:
        if start == "random":
            return random(seed)
        return elect(voting("plain", 0), rounds, random(seed), seed)[0]

    every = [(s, r, n) for s in STARTS for r in rules for n in ATTACKERS]
    seeds: list[list[dict[str, Any]]] = []
    for seed in range(task.SEEDS):
        records = []
        for start, rule, attackers in track(every, description=f"FedVote, seed {seed}"):

            def elected(
                start: str = start, rule: str = rule, hostile: int = attackers, seed: int = seed
            ) -> Any:
                params, up = elect(voting(rule, hostile), rounds, begun(start, seed), seed)
                return {
                    "trained": float(accuracy(latent.weights(params))),
                    "binary": float(accuracy(latent.deploy(params, 2))),
                    "ternary": float(accuracy(latent.deploy(params, 3))),
                    "megabytes": up,
                }

            later = ", after training" if start == "trained" else ""
            case = f"binary votes, {rule}, {attackers} hostile, {rounds} rounds{later}, seed {seed}"
            record = {"name": "binary votes", "start": start, "rule": rule, "attackers": attackers}
            records.append(record | cases(case, elected))
        seeds.append(records)
    names = ("name", "start", "rule", "attackers")
    return {"records": task.medians(seeds, names), "rounds": rounds}


STARTS = ("random", "trained")

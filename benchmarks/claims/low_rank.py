"""Low rank and decoupled momentum in training.

The networks and the driver are in `networks.py`.
"""

from typing import Any

import optax

import jaxcomp
from claims import networks, scores
from claims.claim import FAILS, HOLDS, Change, Claim, Judged, decide
from claims.descent import least
from claims.networks import AXIS, Method, Plan, Rate, mean
from jaxcomp import algorithms

STEPS = 250


RANKS = {"CNN": 2, "GRU": 4}
"""Of the paper's convolutional network and of its LSTM."""


def _plan(steps: int, rates: tuple[float, ...], size: int, falls: tuple[float, float]) -> Plan:
    """A warm-up of a sixtieth of the steps, and a rate that falls tenfold twice."""
    warm = optax.linear_schedule(0.0, 1.0, steps // 60)
    drops = optax.piecewise_constant_schedule(1.0, {int(steps * part): 0.1 for part in falls})
    return Plan(steps, rates, size=size, schedule=lambda step: warm(step) * drops(step))


def _train_powersgd() -> dict[str, Any]:
    found = {}
    for task, plan in (
        (networks.cnn(), _plan(1500, (0.01, 0.02, 0.05, 0.1, 0.2), 8, (1 / 2, 5 / 6))),
        (networks.gru(), _plan(1000, (0.25, 0.5, 1.0, 2.0, 4.0), 4, (2 / 3, 8 / 9))),
    ):
        ways = {f"PowerSGD, rank {rank}": jaxcomp.PowerIteration(rank) for rank in (2, 4)}
        methods = {"dense": jaxcomp.Dense(), **ways}
        found[task.name] = networks.compare(
            {name: mean(way) for name, way in methods.items()}, task, plan
        )
        like = networks.shapes(task)
        for name, way in ways.items():
            sent = jaxcomp.wire_bytes(way, like, 4) / jaxcomp.wire_bytes(jaxcomp.Dense(), like, 4)
            found[task.name]["methods"][name]["share"] = round(sent, 4)
    return {"numbers": found}


def _powersgd_judged(numbers: dict[str, Any]) -> Judged:
    pairs = [(found, f"PowerSGD, rank {RANKS[task]}") for task, found in numbers.items()]
    kept = [scores.equal(found, name, "dense") for found, name in pairs]
    unclear = any(scores.undecided(found, name, "dense") for found, name in pairs)
    words = "; ".join(
        f"{task}: {scores.told(found, 'dense')}, "
        + ", ".join(
            f"{scores.told(found, name)} with {100 * one['share']:.1f} % of the bytes"
            for name, one in found["methods"].items()
            if "share" in one
        )
        for task, found in numbers.items()
    )
    margin = least(*(scores.as_good(found, name, "dense") for found, name in pairs))
    return Judged(words, decide(all(kept), any(kept), unclear), margin)


def _demo(k: int) -> Method:
    def make(rate: Rate, key: Any) -> Any:
        codec = jaxcomp.demo(k)  # Of matrices: the GRU's vectors are sent dense.
        signs = algorithms.demo_sgd(AXIS, decay=0.99, policy=codec, key=key)
        return optax.chain(signs, optax.sgd(rate))

    return make


def _train_demo() -> dict[str, Any]:
    task, plan = networks.gru(), Plan(STEPS, (0.005, 0.01, 0.02, 0.05, 0.1), size=4)
    methods = {
        "DeMo, 32 of 4,096": _demo(32),
        "DeMo, 128 of 4,096": _demo(128),
    }
    found = networks.compare({"AdamW": mean(jaxcomp.Dense(), _adamw), **methods}, task, plan)
    for name in methods:
        codec = jaxcomp.demo(k=32 if "32" in name else 128)
        found["methods"][name]["bits"] = networks.bits(codec, task)
    return {"numbers": found}


def _adamw(rate: Rate) -> Any:
    return optax.adamw(rate)


def _demo_judged(numbers: dict[str, Any]) -> Judged:
    names = [name for name in numbers["methods"] if name.startswith("DeMo")]
    kept = [scores.equal(numbers, name, "AdamW") for name in names]
    fewer = [32 / numbers["methods"][name]["bits"] for name in names]
    most = max((times for times, good in zip(fewer, kept, strict=True) if good), default=0)
    words = ", ".join(
        f"{scores.told(numbers, name)} with {32 / numbers['methods'][name]['bits']:.0f} times "
        "fewer bits"
        for name in numbers["methods"]
        if name != "AdamW"
    )
    margin = max(
        least(times / 50, scores.as_good(numbers, name, "AdamW"))
        for name, times in zip(names, fewer, strict=True)
    )
    words = f"{scores.told(numbers, 'AdamW')}; {words}"
    return Judged(words, decide(most >= 50, any(kept)), margin)


_GRU = (
    "A GRU on bytes of the standard library (47,472 parameters), 250 steps, four workers, the best "
    "of the same five rates each, twenty seeds"
)

CLAIMS = (
    Claim(
        name="powersgd",
        methods=("PowerIteration",),
        source="Vogels, Karimireddy and Jaggi, PowerSGD: practical low-rank gradient compression "
        "for distributed optimization, 2019, tables of ranks",
        claim="Rank 2 on a convolutional network, and rank 4 on a language model, reach the "
        "test quality of SGD.",
        setting="A CNN on 5,000 images of MNIST and a GRU on bytes, 1,500 and 1,000 steps, four "
        "workers, SGD with momentum, a warm-up and a rate that falls tenfold twice, as in the "
        "paper, the best of five rates each, twenty seeds.",
        judge=_powersgd_judged,
        criterion="rank 2 as good as dense on the CNN, and rank 4 on the GRU",
        why="size",
        fixed="a5941335",
        changed=(
            Change(
                "9179b20c",
                FAILS,
                "Rank 2 was asked of the GRU, too, where the paper needs rank 4; trainings were "
                "three and five times shorter, on a cosine.",
            ),
        ),
        run=_train_powersgd,
        minutes=18,
        note="Matrices here are small, so low rank saves less than in large networks. On the GRU "
        "rank 4 loses 0.05 bits a byte, where 0.03 are allowed. The paper's tables could not be "
        "opened again: its ranks and its schedule are quoted from memory.",
    ),
    Claim(
        name="demo",
        methods=("demo_sgd",),
        source="Peng et al., DeMo: decoupled momentum optimization, 2024, abstract of the second "
        "version",
        claim="DeMo transmits up to 85 times less data than AdamW at a comparable loss.",
        setting=f"{_GRU}; momentum decays by 0.99 a step.",
        judge=_demo_judged,
        criterion="as good as AdamW with at least 50 times fewer bits, for one of the "
        "two numbers of elements",
        fixed="10662d7f",
        changed=(
            Change(
                "10662d7f",
                HOLDS,
                "The grid of rates was moved, since the best one was at its edge.",
            ),
        ),
        run=_train_demo,
        minutes=6,
        note="Fifty times counts as reached. The paper's decay of 0.999 is for runs of many "
        "thousand steps. Vectors are sent dense, without momentum. A first run had all best rates "
        "at the upper edge of the grid, 0.02, with the same verdict; the grid was moved.",
    ),
)

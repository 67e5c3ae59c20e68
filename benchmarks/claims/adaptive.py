"""Adaptive steps on compressed gradients."""

from typing import Any

import jax.numpy as jnp
import optax
from convergence import AXIS, Prices, Way, everywhere, price

import jaxcomp
from claims import descent, networks, nonconvex, scores
from claims.claim import Claim, Judged, decide
from claims.descent import Make, Oracle, least, within
from jaxcomp import algorithms

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
STEPS, EVERY = 6000, 10
B1, B2 = 0.9, 0.99


def ways(size: int, workers: int) -> dict[str, Make]:
    """AMSGrad on the exact mean, and on signs both ways with each kind of memory."""
    sign = everywhere(jaxcomp.sign(bucket_size=None))

    def decaying(rate: Any) -> Any:
        return lambda step: rate / jnp.sqrt(1 + step / 100)

    def stepped(optimizer: Any, reducer: Any, bits: float) -> Make:
        def make(rate: Any, key: Any) -> Way:
            mean = jaxcomp.compressed_mean(reducer, AXIS, key=key)
            tx = optax.chain(mean, optimizer(decaying(rate), B1, B2))
            return Way(tx, Prices(bits, bits, 0.0, workers))

        return make

    def ours(rate: Any, key: Any) -> Way:
        scaled = algorithms.cd_adam(sign, AXIS, b1=B1, b2=B2, key=key)
        tx = optax.chain(scaled, optax.sgd(decaying(rate)))
        return Way(tx, Prices(one, one, 0.0, workers))

    one, whole = price(sign, size), 64.0 * size
    residual, bare = (
        jaxcomp.Link(sign, jaxcomp.Residual()),
        jaxcomp.Link(sign, jaxcomp.NoFeedback()),
    )
    return {
        "Adam": stepped(optax.adam, jaxcomp.Dense(), whole),
        "AMSGrad": stepped(optax.amsgrad, jaxcomp.Dense(), whole),
        "CD-Adam": ours,
        "error feedback": stepped(optax.amsgrad, jaxcomp.TwoShot(residual, residual), one),
        "no memory": stepped(optax.amsgrad, jaxcomp.TwoShot(bare, bare), one),
    }


@descent.in_float64
def _cd_adam() -> dict[str, Any]:
    problem = nonconvex.regularized(workers=5)
    every = ways(problem.solution.size, problem.workers)
    found: dict[str, Any] = {}
    for title, batch in (("batches", 8), ("full gradients", 0)):
        runs = descent.run_all(
            every,
            problem,
            title,
            rates=RATES,
            steps=STEPS,
            oracle=Oracle(batch=batch),
            seeds=descent.SEEDS if batch else 1,
            every=EVERY,
        )
        found[title] = {}
        for name, each in runs.items():
            at = descent.best(each.floors)
            found[title][name] = {
                "rate": RATES[at],
                "error": descent.spread(each.floors[at]),
                "kilobytes": float(each.bits[at, 0, -1]) / 8e3,
            }
    return {"numbers": {"rates": list(RATES), "steps": STEPS, "found": found}}


def _cd_adam_judged(numbers: dict[str, Any]) -> Judged:
    words, holds, margins = [], [], []
    for title, rows in numbers["found"].items():
        error = {name: row["error"][0] for name, row in rows.items()}
        listed = ", ".join(f"{name} {each:.1e}" for name, each in error.items())
        words.append(f"{title}: {listed}")
        near = error["CD-Adam"] <= 2 * error["AMSGrad"] or error["CD-Adam"] < 1e-20
        others = min(error["error feedback"], error["no memory"])
        holds.append(near and error["CD-Adam"] < others)
        limits = max(2 * error["AMSGrad"], 1e-20), others
        margins.extend(within(limit, error["CD-Adam"]) for limit in limits)
    rows = numbers["found"]["batches"]
    saved = rows["AMSGrad"]["kilobytes"] / rows["CD-Adam"]["kilobytes"]
    text = f"squared gradient, {'; '.join(words)}; {saved:.0f} times fewer bits than AMSGrad"
    return Judged(text, decide(all(holds), any(holds)), least(*margins))


ADAM_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def _networks() -> dict[str, Any]:
    sign = networks.everywhere(jaxcomp.sign(bucket_size=None))

    def whole(rate: Any, key: Any) -> Any:
        mean = jaxcomp.compressed_mean(jaxcomp.Dense(), networks.AXIS, key=key)
        return optax.chain(mean, optax.amsgrad(rate, B1, B2))

    def ours(rate: Any, key: Any) -> Any:
        scaled = algorithms.cd_adam(sign, networks.AXIS, b1=B1, b2=B2, key=key)
        return optax.chain(scaled, optax.sgd(rate))

    found = {}
    for make, steps, size in ((networks.cnn, 500, 8), (networks.gru, 200, 4)):
        task, plan = make(), networks.Plan(steps, ADAM_RATES, size=size)
        found[task.name] = networks.compare({"AMSGrad": whole, "CD-Adam": ours}, task, plan)
    return {"numbers": found}


def _networks_judged(numbers: dict[str, Any]) -> Judged:
    words, good, margins = [], [], []
    for task, found in numbers.items():
        told = ", ".join(scores.told(found, name) for name in ("AMSGrad", "CD-Adam"))
        difference = scores.words(scores.paired(found, "CD-Adam", "AMSGrad"))
        words.append(f"{task}: {told}: {difference}")
        good.append(scores.equal(found, "CD-Adam", "AMSGrad"))
        margins.append(scores.as_good(found, "CD-Adam", "AMSGrad"))
    return Judged("; ".join(words), decide(all(good), any(good)), least(*margins))


CLAIMS = (
    Claim(
        name="cd-adam-against-amsgrad",
        methods=("cd_adam", "CD-Adam"),
        source="Wang, Lin and Chen, Communication-compressed adaptive gradient method for "
        "distributed nonconvex optimization, 2022, Figure 1 and the theorem",
        claim="With one bit both ways and learned memories, AMSGrad converges at the rate of the "
        "uncompressed one; with residuals, or without memories, it does not.",
        setting="Logistic regression on breast cancer with the bounded regularizer "
        "0.1 Σ x²/(1 + x²), 5 workers with sorted rows, batches of 8 and full gradients, "
        f"{STEPS:,} steps, {descent.SEEDS} seeds; every method at its best of the same seven "
        "rates γ/√(1 + t/100), γ from 3e-4 to 0.3; the mean of the last quarter.",
        judge=_cd_adam_judged,
        criterion="batches and full: squared gradient below both other one-bit ways', and ≤ 2 "
        "times AMSGrad's or < 1e-20",
        why="false",
        run=_cd_adam,
        minutes=1.5,
    ),
    Claim(
        name="cd-adam-networks",
        methods=("cd_adam", "CD-Adam"),
        source="Wang, Lin and Chen, Communication-compressed adaptive gradient method for "
        "distributed nonconvex optimization, 2022, the experiments with networks",
        claim="On networks one-bit CD-Adam has the test accuracy of uncompressed AMSGrad.",
        setting="A CNN on 5,000 images of MNIST (500 steps) and a GRU on bytes of the standard "
        "library (200 steps), four workers, every leaf in signs both ways, β₁ = 0.9, β₂ = 0.99, "
        "the best of five rates each, twenty seeds.",
        judge=_networks_judged,
        criterion="on both networks as good as AMSGrad, by paired differences",
        why="false",
        fixed="a39be1f8",
        run=_networks,
        minutes=6,
    ),
)

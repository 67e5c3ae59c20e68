"""Rates of federated averaging on a problem whose solution is known."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from convergence import everywhere
from rich.progress import track

import jaxcomp
from claims import descent
from claims.claim import Claim, Judged, decide
from claims.descent import between, least
from jaxcomp import federated

CLIENTS, STEPS, ROUNDS, SIZE, SEEDS = 16, 5, 2000, 64, 5
PARTICIPANTS = (4, 8, 16)
NOISE, LEAST = 1.0, 0.2
"""The deviation of an element of a step's gradient, and the smallest curvature."""


def _curve(participants: int, seed: int) -> np.ndarray:
    """The squared distances to the solution after every round.

    A round's rate is `4 / (μ (k τ + τ + κ τ))` as in the theorem, a factor of the loss here.
    """
    draw = np.random.default_rng(seed)
    best = draw.standard_normal(SIZE).astype(np.float32)
    curvature = np.linspace(LEAST, 1.0, SIZE).astype(np.float32)

    def loss(params: Any, batch: Any) -> Any:
        factor, noise = batch
        return factor * (jnp.sum(curvature * (params - best) ** 2) / 2 + jnp.vdot(params, noise))

    def batches(numbers: Any, round: int) -> Any:
        draws = np.random.default_rng((seed, round)).standard_normal((CLIENTS, STEPS, SIZE))
        factor = 4 / (LEAST * STEPS * (round + 1 + 4 / LEAST))
        factors = np.full((len(numbers), STEPS), factor, np.float32)
        return factors, np.float32(NOISE * draws[numbers])

    codec = everywhere(jaxcomp.qsgd(bits=2, bucket_size=SIZE))
    method = federated.fedpaq(codec, loss, learning_rate=1.0, participants=participants)
    zero = np.zeros(SIZE, np.float32)
    sim = federated.Simulation(method, zero, CLIENTS, batches, key=seed, chunk=CLIENTS)
    found = []
    for _ in range(ROUNDS):
        sim.round()
        found.append(float(np.sum((np.asarray(sim.params) - best) ** 2)))
    return np.asarray(found)


def _rates() -> dict[str, Any]:
    rows = []
    for participants in PARTICIPANTS:
        curves = np.stack([
            _curve(participants, seed)
            for seed in track(range(SEEDS), description=f"{participants} participants")
        ])  # fmt: skip
        middle = np.median(curves, axis=0)
        early, late = (middle[at - at // 10 : at].mean() for at in (ROUNDS // 10, ROUNDS))
        rows.append({
            "participants": participants,
            "end": descent.spread(curves[:, -ROUNDS // 10 :].mean(axis=1)),
            "power": float(np.log10(late / early)),
        })  # fmt: skip
    return {"numbers": {"rounds": ROUNDS, "rows": rows}}


def _rates_judged(numbers: dict[str, Any]) -> Judged:
    rows = numbers["rows"]
    words = ", ".join(
        f"{row['participants']} of {CLIENTS} clients ∝ K^{row['power']:.2f}, {row['end'][0]:.2e} "
        "in the end"
        for row in rows
    )
    powers = [between(0.75, -row["power"], 1.25) for row in rows]
    fewer = rows[0]["end"][0] / rows[-1]["end"][0]
    verdict = decide(min(*powers, fewer) >= 1, part=min(powers) >= 1)
    return Judged(f"squared distance: {words}", verdict, least(*powers, fewer))


CLAIMS = (
    Claim(
        name="fedpaq-rate",
        methods=("fedpaq", "FedPAQ"),
        source="Reisizadeh et al., FedPAQ, 2020, Theorem 1, on strongly convex losses",
        claim="With decreasing rates the squared distance to the solution falls as 1/K in K "
        "rounds, with partial participation and quantised messages, and more participants are "
        "better.",
        setting=f"Least squares of {SIZE} elements and condition {1 / LEAST:g}, {CLIENTS} clients "
        f"with the same data and noisy gradients, {', '.join(map(str, PARTICIPANTS))} of them in a "
        f"round, {STEPS} local steps, two bits, the theorem's rates, {ROUNDS:,} rounds, {SEEDS} "
        "seeds.",
        judge=_rates_judged,
        criterion="for 4, 8 and 16 participants, distance ∝ K^p over the last decade with p from "
        "−1.25 to −0.75; 16 below 4",
        fixed="36d80f3e",
        run=_rates,
        minutes=1.5,
        note="The theorem's rate 4 μ⁻¹/(k τ + 1) is shifted by 4/μ rounds, so that the first steps "
        "are below 1/L.",
    ),
)

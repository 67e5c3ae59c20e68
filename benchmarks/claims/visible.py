"""Visible changes between sites."""

import functools
import statistics
from typing import Any

import jax
import numpy as np
import optax
import reporting  # noqa: F401  # It makes the examples importable.
from rich.progress import track

import jaxcomp
from claims.claim import Claim, Judged, decide
from claims.descent import least, within
from jaxcomp import federated

RATES = {1e-6: 0.1, 3e-6: 0.1, 1e-3: 1.0}
"""Learning rates, and the capacity of a message as a fraction of the weights."""
SLOW = ("1e-06", "3e-06")
SEEDS, SITES, ROUNDS, STEPS, SIZE, CONTEXT = 3, 4, 10, 8, 8, 64
FIRST, FIRST_SIZE, FIRST_RATE = 300, 16, 2e-3
"""Steps, batch and rate of the training before, which all seeds begin from."""
DENSE, VISIBLE = "DiLoCo", "PULSELoCo"
FEWER, CLOSE, GAIN = 10, 0.005, 0.9


@functools.cache
def _task() -> Any:
    """The loss with weights in bfloat16, the held-out bits per byte, and batches by their step."""
    import byte_lm_model  # pyright: ignore[reportMissingImports]
    import training  # pyright: ignore[reportMissingImports]

    text, model = byte_lm_model.read_text(), byte_lm_model.ByteModel(2, 128)
    held_out = byte_lm_model.validation_of(text, CONTEXT)

    def round_weights(params: Any) -> Any:
        return jax.tree.map(lambda w: jax.lax.reduce_precision(w, 8, 7), params)

    def loss(params: Any, batch: Any) -> Any:
        return training.loss_of(model, round_weights(params), batch)

    def score(params: Any) -> float:
        return float(byte_lm_model.bits_per_byte(model, round_weights(params), held_out))

    def batch(step: int, size: int, seed: int) -> tuple:
        return byte_lm_model.batch_of(text, step, size=size, context=CONTEXT, seed=seed)

    first = model.init(jax.random.key(0), np.zeros((1, CONTEXT), np.int32))
    return loss, score, batch, first


def _start() -> Any:
    """Parameters after the training at a usual rate."""
    loss, _, batch, params = _task()
    tx = optax.adam(optax.linear_schedule(0.0, FIRST_RATE, 20))

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for number in track(range(FIRST), description="training before"):
        params, state = step(params, state, batch(number, FIRST_SIZE, 0))
    return params


def _method(name: str, rate: float) -> Any:
    loss, inner = _task()[0], optax.adam(rate)
    if name == DENSE:
        return federated.diloco(None, loss, inner=inner)
    return federated.pulseloco(jaxcomp.visible(RATES[rate]), loss, inner=inner)


def _between_sites(method: Any, start: Any, seed: int) -> dict[str, Any]:
    """The score after the rounds, and bytes up of a site and round, of the last one too."""
    _, score, batch, _ = _task()

    def batches(numbers: np.ndarray, round: int) -> tuple:
        steps = [(1 + int(n), round * STEPS + at) for n in numbers for at in range(STEPS)]
        found = [batch(10**6 * site + at, SIZE, seed) for site, at in steps]
        shape = (len(numbers), STEPS, SIZE, CONTEXT)
        return tuple(np.stack(part).reshape(shape) for part in zip(*found, strict=True))

    sim = federated.Simulation(method, start, SITES, batches, key=seed, messages=SITES)
    up = [report.up / SITES for report in sim.run(ROUNDS)]
    return {"score": round(score(sim.params), 5), "up": round(sum(up) / ROUNDS), "last": up[-1]}


def _train() -> dict[str, Any]:
    start = _start()
    size = sum(x.size for x in jax.tree.leaves(start))
    rows = []
    cases = [(rate, name) for rate in RATES for name in (DENSE, VISIBLE)]
    for rate, name in track(cases, description="between sites"):
        method = _method(name, rate)
        found = [_between_sites(method, start, 1 + seed) for seed in range(SEEDS)]
        rows.append({"rate": f"{rate:g}", "method": name, "seeds": found})
    return {"numbers": {"weights": size, "start": round(_task()[1](start), 5), "rows": rows}}


def _compared(numbers: dict[str, Any], rate: str) -> dict[str, list[float]]:
    """For every seed: times fewer bytes than dense float32, loss beside DiLoCo's, part of gain."""
    dense, ours = (
        next(r["seeds"] for r in numbers["rows"] if (r["rate"], r["method"]) == (rate, name))
        for name in (DENSE, VISIBLE)
    )
    start, whole = numbers["start"], 4 * numbers["weights"]
    pairs = list(zip(ours, dense, strict=True))
    return {
        "fewer": [whole / one["up"] for one in ours],
        "worse": [one["score"] / other["score"] - 1 for one, other in pairs],
        "gain": [(start - one["score"]) / (start - other["score"]) for one, other in pairs],
    }


def _told(rate: str, found: dict[str, list[float]]) -> str:
    fewer, worse, gain = (found[name] for name in ("fewer", "worse", "gain"))
    return (
        f"at {rate} {statistics.median(fewer):.3g} times fewer bytes ({min(fewer):.3g} to "
        f"{max(fewer):.3g}), loss {100 * min(worse):+.2f} to {100 * max(worse):+.2f} %, "
        f"{100 * min(gain):.0f} to {100 * max(gain):.0f} % of DiLoCo's gain"
    )


def _judged(numbers: dict[str, Any]) -> Judged:
    found = {f"{rate:g}": _compared(numbers, f"{rate:g}") for rate in RATES}
    margins = {
        rate: least(
            min(found[rate]["fewer"]) / FEWER,
            within(CLOSE, max(found[rate]["worse"])),
            min(found[rate]["gain"]) / GAIN,
        )
        for rate in SLOW
    }
    words = "; ".join(_told(rate, each) for rate, each in found.items())
    met = [margin >= 1 for margin in margins.values()]
    return Judged(words, decide(all(met), part=any(met)), least(*margins.values()))


CLAIMS = (
    Claim(
        name="pulseloco-bytes",
        methods=("visible", "PULSE"),
        source="Miahi and Belilovsky, Understanding and exploiting weight update sparsity for "
        "communication-efficient distributed RL (PULSE), arXiv 2602.03839, version 2, 2026, "
        "abstract",
        claim="PULSELoCo, which sends the changes that are visible in bfloat16 and keeps the "
        "others in a residual, matches DiLoCo with over 17 times fewer bytes.",
        setting="A byte model of 0.46 million weights, rounded to bfloat16 in the loss, after "
        f"{FIRST} steps of Adam at {FIRST_RATE:g}; then {SITES} sites, {ROUNDS} rounds of {STEPS} "
        f"steps of Adam at 1e-6, 3e-6 and 1e-3, {SEEDS} seeds of the sites' text; messages of "
        "`to_bytes` beside 4 bytes a weight.",
        judge=_judged,
        criterion="at 1e-6 and 3e-6, each seed: 10 times fewer bytes, loss at most 0.5 % above, "
        "90 % of DiLoCo's gain",
        why="size",
        fixed="8292664b",
        run=_train,
        minutes=9,
        note="It holds in part if only one of the two rates meets its limits. The gain is that of "
        "the held-out loss over the start. At 1e-6 the bytes are as few as published, but the loss "
        "lags: a site's 80 steps add up to about 8e-5, and a unit in the last place of a weight of "
        "0.06 is 2.4e-4, so that many changes are still in the residuals; a longer run was not "
        "tried. At 3e-6 messages have the length of full ones, with room for 10 % of the weights. "
        "The gradients are those of text and not of rewards, and the model is far smaller than the "
        "paper's. The row at 1e-3, with room for all, is not judged: it shows what is left at a "
        "rate of pretraining.",
    ),
)

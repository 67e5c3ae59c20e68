"""Patches of weights between steps of reinforcement learning."""

import argparse
import importlib.util
import statistics
from typing import Any

import jax
import ml_dtypes
import numpy as np
import reporting
from rich.progress import track

from claims.claim import Claim, Judged, decide
from claims.descent import least, within

RATES = (1e-6, 3e-6, 1e-5, 1e-4, 1e-3)
SEEDS, FIRST, STEPS, EVERY = 5, 11, 40, 10
"""Steps are measured from FIRST to STEPS; patches are coded at those that EVERY divides."""
EXAMPLES = 600
WIDTH, LAYERS = 192, 3
SAME = {"1e-06": 0.98, "3e-06": 0.95}
"""The least part of weights that stay the same, by the rate."""
FEWER = 100


def _example() -> Any:
    """The program `examples/weights.py`: the benchmark of weights has the same name."""
    path = reporting.HERE.parent / "examples" / "weights.py"
    spec: Any = importlib.util.spec_from_file_location("weights_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _start(example: Any, seed: int) -> tuple[Any, float]:
    """A trainer after its steps on examples, and its part of right answers."""
    given = argparse.Namespace(width=WIDTH, layers=LAYERS, seed=seed)
    trainer, reward = example.Trainer(given), 0.0
    for step in range(1, EXAMPLES + 1):
        trainer.learn()
        if step % 20 == 0:
            reward = trainer.reward()
            if reward >= example.ENOUGH:
                break
    return trainer, reward


def _flat(params: Any) -> np.ndarray:
    """All weights in float32, leaf after leaf."""
    return np.concatenate([np.ravel(np.asarray(params[name])) for name in sorted(params)])


def _bits(exact: np.ndarray) -> np.ndarray:
    return exact.astype(ml_dtypes.bfloat16).view("<u2")


def _reinforced(trainer: Any, rate: float) -> dict[str, Any]:
    """Steps at a rate: parts of weights that stay the same, and what patches save."""
    import weights  # The benchmark, not the example.

    trainer.start_reinforcing(rate)
    before, same, still, rewards = _flat(trainer.params), [], [], []
    ways: dict[str, list[float]] = {name: [] for name in ("gaps", "fast", "small", "entropy")}
    for step in range(1, STEPS + 1):
        rewards.append(trainer.reinforce())
        after = _flat(trainer.params)
        old, new = _bits(before), _bits(after)
        if step >= FIRST:
            same.append(round(float(np.mean(old == new)), 6))
            still.append(round(float(np.mean(before == after)), 6))
            if step % EVERY == 0:
                row = weights.compared(old, new)  # It checks that nothing is lost.
                for name, times in ways.items():
                    times.append(round(row[name], 3))
        before = after
    return {
        "same": same,
        "still": statistics.median(still),
        "fewer": ways,
        "rewards": [round(statistics.mean(part), 4) for part in (rewards[:10], rewards[-10:])],
    }


def _train() -> dict[str, Any]:
    example, starts = _example(), []
    found: dict[str, list[dict[str, Any]]] = {f"{rate:g}": [] for rate in RATES}
    size = 0
    for seed in track(range(SEEDS), description="seeds"):
        trainer, reward = _start(example, seed)
        begin = {name: np.asarray(x) for name, x in trainer.params.items()}
        exact = _flat(begin)
        size = exact.size
        # Half a unit of a weight is at most |w| / 256: a step of the rate always changes these.
        below = {f"{r:g}": round(float(np.mean(np.abs(exact) < 256 * r)), 5) for r in RATES}
        deviation = round(float(np.std(exact)), 5)
        starts.append({"reward": reward, "deviation": deviation, "small": below})
        for rate in RATES:
            trainer.params = jax.device_put(begin)
            found[f"{rate:g}"].append(_reinforced(trainer, rate))
    return {"numbers": {"weights": size, "starts": starts, "rates": found}}


def _sparsity(numbers: dict[str, Any]) -> Judged:
    medians = {
        rate: [statistics.median(run["same"]) for run in runs]
        for rate, runs in numbers["rates"].items()
    }
    told = ", ".join(
        f"{100 * statistics.median(each):.2f} % ({100 * min(each):.2f} to {100 * max(each):.2f}) "
        f"at {rate}"
        for rate, each in medians.items()
    )
    # What may change is compared: 2 % of the weights or less, not 98 % or more.
    margins = {rate: within(1 - needed, 1 - min(medians[rate])) for rate, needed in SAME.items()}
    verdict = decide(min(margins.values()) >= 1, part=max(margins.values()) >= 1)
    return Judged(f"the same after a step: {told}", verdict, least(*margins.values()))


def _fewer(found: dict[str, Any]) -> Judged:
    rates = found["numbers"]["rates"]
    medians = {
        rate: [statistics.median(run["fewer"]["gaps"]) for run in runs]
        for rate, runs in rates.items()
    }
    ours = {
        rate: [statistics.median(run["fewer"]["small"]) for run in runs]
        for rate, runs in rates.items()
    }
    told = ", ".join(
        f"{statistics.median(each):.3g} times ({min(each):.3g} to {max(each):.3g}) at {rate}, "
        f"ours {statistics.median(ours[rate]):.3g} ({min(ours[rate]):.3g} to {max(ours[rate]):.3g})"
        for rate, each in medians.items()
    )
    margins = [min(medians[rate]) / FEWER for rate in SAME]
    verdict = decide(min(margins) > 1, part=max(margins) > 1)
    return Judged(f"fewer bytes: {told}", verdict, least(*margins))


_SOURCE = (
    "Miahi and Belilovsky, Understanding and exploiting weight update sparsity for "
    "communication-efficient distributed RL (PULSE), arXiv 2602.03839, 2026, abstract"
)
_SETTING = (
    "A transformer of 1.33 million weights that adds two numbers, from examples until 40 % of its "
    "answers are right, then REINFORCE with Adam on float32 weights, which are rounded to "
    f"bfloat16; steps {FIRST} to {STEPS} at each of {len(RATES)} rates, {SEEDS} seeds"
)

CLAIMS = (
    Claim(
        name="pulse-sparsity",
        methods=("weights", "PULSE"),
        source=_SOURCE,
        claim="At the learning rates of reinforcement learning about 99 % of the weights in "
        "bfloat16 stay the same in a step, as Adam's steps are below half a unit in the last "
        "place.",
        setting=f"{_SETTING}.",
        judge=_sparsity,
        criterion="in the median step of every seed at least 98 % the same at 1e-6, and at least "
        "95 % at 3e-6",
        fixed="d3ddb171",
        run=_train,
        minutes=15,
        note="It holds in part if only one of the two rates meets its limit. Models of the paper "
        "have 0.5 to 7 billion weights, norms and large embeddings whose rows are rarely used; "
        "this one has no weights in its norms and twelve tokens, so that no row is rare. The "
        "other rates show where it ends.",
    ),
    Claim(
        name="pulse-bytes",
        methods=("weights", "PULSE"),
        source=f"{_SOURCE}; version 1: 14 GB become 108 MB",
        claim="Lossless patches of gaps and new values take more than 100 times fewer bytes than "
        "all weights.",
        setting=f"{_SETTING}; the patches of every tenth step: varints of gaps with values by "
        'Zstandard at level 3, and the library\'s coding "small".',
        judge=_fewer,
        criterion="in the median patch of every seed more than 100 times fewer bytes by gaps and "
        "values at 1e-6 and at 3e-6",
        why="size",
        fixed="d3ddb171",
        results="reproductions/pulse-sparsity.json",
        command="make reproduce CLAIM=pulse-sparsity",
        note="It holds in part if one of the two rates meets the limit. All weights are coded as "
        "one leaf. The library's own coding is a comparison and is not judged.",
    ),
)

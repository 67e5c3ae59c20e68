"""Compares the final loss of sharded training, compressed and dense, over five seeds.

    python benchmarks/sharded_training.py
    python benchmarks/sharded_training.py --ways pipeline --update

Bytes of source text by a small transformer, and handwritten digits by a perceptron, over four
workers that share the training in five ways: fully sharded, with a sharded optimizer,
tensor-parallel, with experts, and in a pipeline. A compressed run of a seed has the parameters and
the batches in the order of the dense one of the same way. The held-out loss is taken without
compression, on the parameters that the training leaves. Its difference from dense is the mean over
the seeds, with its range and with the 95 % interval of Student's t. "At most 0.5 %" is "yes" or
"no" if the whole interval is on one side of this bound.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import convergence
import jax
import optax
import reporting
import sharded_models as models
import sharded_ways as ways
from rich.progress import track
from scipy import stats

import jaxcomp

TASKS = {"bytes": models.bytes_, "digits": models.digits}
BOUND = 0.5
"""Per cent above dense."""
LAST = 20
"""Steps of the training loss."""

EIGHT, FOUR, IDENTITY = jaxcomp.qsgd_inf(bits=8), jaxcomp.qsgd_inf(bits=4), ways.IDENTITY
ROTATED, EDEN, MXFP8 = jaxcomp.rotated_uniform(bits=4), jaxcomp.eden(bits=4), jaxcomp.mx("mxfp8")
BLOCKS, EIGHT_BIT_MEMORY = jaxcomp.blockwise(4), jaxcomp.Residual(decay=0.9, dtype="int8")
"""The uplink of `jaxcomp.algorithms.loco`."""
Make = Callable[[models.Task, optax.GradientTransformation], ways.Way]


def cases() -> dict[str, dict[str, Make]]:
    """The codecs of each way; the first are dense."""

    def fsdp(weights: Any, gradients: Any) -> Make:
        return lambda task, tx: ways.fully_sharded(task, tx, weights, gradients)

    def zero(up: Any, down: Any, feedback: Any) -> Make:
        link = jaxcomp.Link(down, feedback)
        return lambda task, tx: ways.sharded_optimizer(task, tx, up, link)

    def tensor(codec: Any) -> Make:
        return lambda task, tx: ways.tensor_parallel(task, tx, codec)

    def experts(dispatch: Any, combine: Any) -> Make:
        return lambda task, tx: ways.experts(task, tx, dispatch, combine)

    def pipeline(codec: Any) -> Make:
        return lambda task, tx: ways.pipeline(task, tx, codec)

    none, residual = jaxcomp.NoFeedback(), jaxcomp.Residual()
    return {
        "fully sharded": {
            "dense": fsdp(None, None),
            "8-bit weights, 8-bit gradients": fsdp(EIGHT, EIGHT),
            "8-bit weights, 4-bit gradients": fsdp(EIGHT, FOUR),
            "8-bit weights, 4-bit eden gradients": fsdp(EIGHT, EDEN),
            "8-bit weights, dense gradients": fsdp(EIGHT, IDENTITY),
            "4-bit weights, dense gradients": fsdp(FOUR, IDENTITY),
            "4-bit weights, 4-bit gradients": fsdp(FOUR, FOUR),
        },
        "sharded optimizer": {
            "dense": zero(IDENTITY, IDENTITY, none),
            "4-bit up, 4-bit down, Residual": zero(FOUR, FOUR, residual),
            "4-bit up, 4-bit down, NoFeedback": zero(FOUR, FOUR, none),
            "4-bit eden up, 4-bit down, Residual": zero(EDEN, FOUR, residual),
            "dense up, 4-bit down, Residual": zero(IDENTITY, FOUR, residual),
            "LoCo": zero(jaxcomp.Link(BLOCKS, EIGHT_BIT_MEMORY), jaxcomp.blockwise(8), residual),
            "LoCo without memory": zero(BLOCKS, jaxcomp.blockwise(8), residual),
            "LoCo up, dense down": zero(jaxcomp.Link(BLOCKS, EIGHT_BIT_MEMORY), IDENTITY, none),
            "LoCo up without memory, dense down": zero(BLOCKS, IDENTITY, none),
        },
        "tensor parallel": {
            "dense": tensor(None),
            "8-bit": tensor(EIGHT),
            "4-bit": tensor(FOUR),
            "4-bit, rotated": tensor(ROTATED),
            "4-bit, eden": tensor(EDEN),
        },
        "experts": {
            "dense": experts(None, None),
            "mxfp8 dispatch, dense combine": experts(MXFP8, None),
            "mxfp8 dispatch, 8-bit combine": experts(MXFP8, EIGHT),
            "mxfp4 dispatch, dense combine": experts(jaxcomp.mx("mxfp4"), None),
        },
        "pipeline": {
            "dense": pipeline(None),
            "8-bit": pipeline(EIGHT),
            "4-bit": pipeline(FOUR),
            "4-bit, rotated_uniform": pipeline(ROTATED),
            "4-bit, eden": pipeline(EDEN),
        },
    }


def runs(options: Any) -> Iterator[dict[str, Any]]:
    for name, steps in zip(TASKS, options.steps, strict=True):
        if name not in options.tasks:
            continue
        task = TASKS[name]()
        rate = optax.warmup_cosine_decay_schedule(0.0, task.rate, steps // 10, steps)
        for kind in options.ways:
            for codecs, make in cases()[kind].items():
                if codecs not in options.codecs:
                    continue
                way = make(task, optax.adam(rate))
                for seed in range(options.seeds):
                    found = {"task": name, "way": kind, "codecs": codecs, "seed": seed}
                    yield {**found, "sent": way.sent, **trained(task, way, steps, seed)}


def trained(task: models.Task, way: ways.Way, steps: int, seed: int) -> dict[str, float]:
    key = jax.random.key(seed)
    params, state = way.begin(key)
    losses = []
    for number, batch in enumerate(task.batches(steps, seed), start=1):
        params, state, loss = way.step(params, state, batch, jax.random.fold_in(key, number))
        losses.append(float(loss))  # On a few cores, simulated devices must not queue up steps.
    return {
        "training": statistics.fmean(losses[-LAST:]),
        "held_out": float(way.final(params, task.held_out)),
    }


COLUMNS = (
    "way {way} | task {task} | codecs {codecs} | seeds {seeds} | bytes of a step {sent:,} | "
    "times fewer {fewer:.2f} | training loss {training:.4f} | held-out loss {held_out:.4f} | "
    "above dense, % {above:+.2f} | from {least:+.2f} | to {most:+.2f} | "
    "95 % from {low:+.2f} | 95 % to {high:+.2f} | at most 0.5 % {verdict} | "
    "training loss above dense, % {above_training:+.2f}"
)


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, and differences from dense of the same seed."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for run in found:
        groups.setdefault((run["way"], run["task"], run["codecs"]), []).append(run)
    records = []
    for (way, task, codecs), own in groups.items():
        dense = groups[way, task, "dense"]
        record = {"way": way, "task": task, "codecs": codecs, "seeds": len(own)}
        record["sent"] = own[0]["sent"]
        for name in ("training", "held_out"):
            record[name] = statistics.fmean(run[name] for run in own)
        if codecs != "dense":
            record |= against(own, dense)
        records.append(record)
    return records


def against(own: list[dict[str, Any]], dense: list[dict[str, Any]]) -> dict[str, Any]:
    """The differences of runs from dense ones of the same seeds, in per cent."""
    held_out, trained = (
        [100 * (a[name] / b[name] - 1) for a, b in zip(own, dense, strict=True)]
        for name in ("held_out", "training")
    )
    mean, half = statistics.fmean(held_out), float("inf")
    if len(held_out) > 1:
        error = statistics.stdev(held_out) / len(held_out) ** 0.5
        half = float(stats.t.ppf(0.975, len(held_out) - 1)) * error
    low, high = mean - half, mean + half
    verdict = "yes" if high <= BOUND else "no" if low > BOUND else "undecided"
    return {
        "fewer": dense[0]["sent"] / own[0]["sent"],
        "above": mean,
        "least": min(held_out),
        "most": max(held_out),
        "low": low,
        "high": high,
        "verdict": verdict,
        "above_training": statistics.fmean(trained),
    }


def main() -> None:
    options = convergence.options(
        __doc__,
        steps=([200, 140], "of either task"),
        seeds=(5, "runs of each"),
        tasks=(TASKS, "some of them"),
        ways=(cases(), "some of them"),
        codecs=(dict.fromkeys(name for way in cases().values() for name in way), "some of them"),
        update=(False, "keep the other tasks, ways and codecs of the file"),
    )
    path = options.out / "sharded.md"
    kept = options.update and path.with_suffix(".json").exists()
    old = reporting.read(path.with_suffix(".json"))["runs"] if kept else []
    started = reporting.now()
    found = [
        run
        for run in old
        if run["task"] not in options.tasks
        or run["way"] not in options.ways
        or run["codecs"] not in options.codecs
    ]
    for run in track(runs(options), description="runs"):
        found.append(run)
        print(run, flush=True)
    order = [(way, task, codecs) for way in cases() for task in TASKS for codecs in cases()[way]]
    found.sort(key=lambda run: order.index((run["way"], run["task"], run["codecs"])))
    text = (__doc__ or "").split("\n\n")[2].rstrip()
    title = f"Sharded training against dense, {ways.WORKERS} workers"
    table = reporting.Table(title, COLUMNS, summary(found))
    reporting.show(table, {"measured": started, "runs": found}, path, before=text)


if __name__ == "__main__":
    main()

"""Compares a budget of bytes, spent by measured errors, with the same bits for all leaves.

    python benchmarks/budget.py

Handwritten digits by the perceptron of `examples/train_digits.py` and bytes of source text by the
transformer of `examples/byte_lm.py`, over eight simulated workers. A dense run of another seed
gives gradients of one worker after 2, 5 and 10 % of the steps. The budget is spent on these, once
for all seeds: it is the bytes that `eden` of so many bits sends for all leaves. "Weighted" counts
an element's error divided by the root of Adam's second moment; "whole run" is spent on gradients
after 5, 50 and 100 % of the steps. All means are gathered, so a message is rounded once. The error
of the mean is that of the mean of eight messages, over all leaves, after 10 % and at the end of a
dense run. Seeds differ in parameters, batches and noise.
"""

import functools
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import convergence
import jax
import jax.numpy as jnp
import networks
import numpy as np
import optax
import reporting
from rich.progress import track

import jaxcomp
from jaxcomp import planning
from jaxcomp.planning import budget

# isort: split
import training  # pyright: ignore[reportMissingImports]

AXIS = training.AXIS
TASKS = {"digits": networks.digits, "bytes": networks.bytes_}
RATES = {
    ("digits", "momentum"): 0.05,
    ("digits", "Adam"): 1e-3,
    ("bytes", "Adam"): 3e-3,
}
PILOT = 100
"""The seed of the run on whose gradients budgets are spent."""
EARLY, WHOLE = (2, 5, 10), (5, 50, 100)
"""Per cent of the steps."""
NOISE = 2
"""Keys over which the error of the mean is averaged."""


def optimizer(name: str, rate: float, steps: int) -> Any:
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    return optax.adam(schedule) if name == "Adam" else optax.sgd(schedule, momentum=0.9)


class Sampled(NamedTuple):
    """Gradients of every worker, `[workers, ...]`, at some steps of a dense run.

    Attributes:
        early: those after 2, 5 and 10 % of the steps.
        whole: those after 5, 50 and 100 %.
        second: the second moment of Adam after the first tenth; None for momentum.
    """

    early: list[Any]
    whole: list[Any]
    second: Any


def sample(task: convergence.Task, name: str, rate: float, steps: int, seed: int) -> Sampled:
    """Trains densely, and keeps gradients on the way."""
    first = next(task.batches(1, seed))
    params: Any = jax.jit(task.model.init)(jax.random.key(seed), first[0][:1])
    tx = optimizer(name, rate, steps)
    state: Any = tx.init(params)

    @jax.jit
    def each(params: Any, rows: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(convergence.DEVICES, -1, *x.shape[1:]), rows)
        one = functools.partial(jax.grad(training.loss_of, argnums=1), task.model, params)
        return jax.vmap(one)(parts)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        mean = jax.tree.map(lambda g: g.mean(0), grads)
        updates, state = tx.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    early, whole, second = [], [], None
    moments, late = ({max(1, steps * p // 100) for p in some} for some in (EARLY, WHOLE))
    for number, rows in enumerate(task.batches(steps, seed), start=1):
        grads = each(params, rows)
        params, state = step(params, state, grads)
        if number in moments:
            early.append(grads)
            second = optax.tree.get(state, "nu", None) if name == "Adam" else None
        if number in late:
            whole.append(grads)
        jax.block_until_ready(params)
    return Sampled(early, whole, second)


def error_of_mean(policy: jaxcomp.Policy, grads: Any) -> float:
    """The relative squared error of the mean of eight decoded messages."""
    exact = jax.tree.map(lambda g: np.asarray(g, np.float64).mean(0), grads)
    energy = sum(float(np.sum(leaf**2)) for leaf in jax.tree.leaves(exact))
    lost = 0.0
    for key in range(NOISE):
        total = jax.tree.map(np.zeros_like, exact)
        for worker in range(convergence.DEVICES):
            own = jax.tree.map(lambda g, w=worker: g[w], grads)
            decoded = jaxcomp.roundtrip(policy, key, own, worker=worker)
            total = jax.tree.map(lambda t, d: t + np.asarray(d, np.float64), total, decoded)
        mean = jax.tree.map(lambda t: t / convergence.DEVICES, total)
        off = jax.tree.map(lambda m, e: float(np.sum((m - e) ** 2)), mean, exact)
        lost += sum(jax.tree.leaves(off))
    return lost / NOISE / energy


def policies(sampled: Sampled, bits: int) -> Iterator[tuple[str, jaxcomp.Policy, float]]:
    """Uniform bits, and budgets of the same bytes, with the predicted error of one message."""
    own = [jax.tree.map(lambda g: g[0], grads) for grads in sampled.early]
    uniform = jaxcomp.Policy(budget.widths()[f"eden {bits}-bit"])
    size = jaxcomp.wire_bytes(uniform, own[0])
    spent = planning.spend(size, *own)
    assert spent.uniform is not None
    assert spent.uniform.bytes == size
    yield "uniform", uniform, spent.uniform.error
    yield "budget", spent.policy, spent.error
    ours = [jax.tree.map(lambda g: g[0], grads) for grads in sampled.whole]
    spread = planning.spend(size, *ours)
    yield "budget, whole run", spread.policy, spread.error
    if sampled.second is not None:
        weights = jax.tree.map(lambda nu: 1 / (jnp.sqrt(nu) + 1e-8), sampled.second)
        weighted = planning.spend(size, *own, weights=weights)
        yield "budget, weighted", weighted.policy, weighted.error


def cases(options: Any) -> Iterator[dict[str, Any]]:
    for (name, rule), rate in RATES.items():
        if name not in options.tasks:
            continue
        task, steps = TASKS[name](), dict(zip(TASKS, options.steps, strict=True))[name]
        pilot = sample(task, rule, rate, steps, PILOT)
        ways: list[tuple[str, int, Any, float]] = [("dense", 32, None, 0.0)]
        for bits in options.bits:
            ways += [(way, bits, policy, error) for way, policy, error in policies(pilot, bits)]
        for seed in range(options.seeds):
            own = sample(task, rule, rate, steps, seed)
            like = jax.tree.map(lambda g: g[0], own.whole[-1])
            for way, bits, policy, predicted in ways:
                mean = jaxcomp.Dense() if policy is None else jaxcomp.Gather(policy)
                record = {"task": name, "optimizer": rule, "way": way, "bits": bits, "seed": seed}
                record["payload"] = jaxcomp.describe(mean, like).payload_bytes
                record |= {"predicted": predicted, "early": 0.0, "error": 0.0}
                if policy is not None:
                    record["early"] = error_of_mean(policy, own.early[-1])
                    record["error"] = error_of_mean(policy, own.whole[-1])
                if seed < options.trained and not options.errors:
                    compressed = jaxcomp.compressed_mean(mean, AXIS, key=seed)
                    tx = optax.chain(compressed, optimizer(rule, rate, steps))
                    run = convergence.train(task, tx, steps, seed)
                    record["loss"] = statistics.mean(run.losses[-20:])
                    record["score"] = run.curve[-1][1]
                yield record


COLUMNS = (
    "task {task} | optimizer {optimizer} | bits {bits} | way {way} | payload bytes {payload:,} | "
    "error of a message, predicted {predicted:.4f} | error of the mean after 10 % {early:.4f} | "
    "of seeds, below uniform {fresh} | at the end {error:.4f} | "
    "of seeds, below uniform {better} | loss, last 20 steps {loss:.4f} | ± {spread:.4f} | "
    "of seeds, below uniform {lower} | score {score:.2f}"
)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds, and how often a budget was below uniform bits of the same seed."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["optimizer"], run["bits"], run["way"]), []).append(run)
    found = []
    for (task, name, bits, way), rows in groups.items():
        uniform = groups.get((task, name, bits, "uniform"), rows)
        record = {"task": task, "optimizer": name, "bits": bits, "way": way}
        record["payload"] = max(row["payload"] for row in rows)
        for key in ("predicted", "early", "error", "loss", "score"):
            values = [row[key] for row in rows if key in row]
            if values:
                record[key] = statistics.mean(values)
        losses = [row["loss"] for row in rows if "loss" in row]
        if losses[1:]:
            record["spread"] = statistics.stdev(losses)
        for column, key in (("fresh", "early"), ("better", "error"), ("lower", "loss")):
            pairs = [(a[key], b[key]) for a, b in zip(rows, uniform, strict=True) if key in a]
            if "budget" in way and pairs:
                record[column] = f"{sum(a < b for a, b in pairs)} of {len(pairs)}"
        found.append(record)
    return found


def main() -> None:
    options = convergence.options(
        __doc__,
        steps=([140, 100], "of either task"),
        bits=([2], "of the uniform codec, whose bytes are the budget"),
        seeds=(5, "runs of each"),
        trained=(5, "of these, that train with each mean too"),
        errors=(False, "measure errors alone, and train with no mean"),
        tasks=(TASKS, "some of them"),
        update=(False, "keep the other tasks of the file"),
    )
    path = options.out / "budget.md"
    kept = options.update and path.with_suffix(".json").exists()
    old = reporting.read(path.with_suffix(".json"))["runs"] if kept else []
    runs = [run for run in old if run["task"] not in options.tasks]
    for run in track(cases(options)):
        runs.append(run)
        print(run, flush=True)
    text = (__doc__ or "").split("\n\n")[2].rstrip()
    runs.sort(key=lambda run: list(TASKS).index(run["task"]))
    title = f"A budget against uniform bits, {options.seeds} seeds"
    table = reporting.Table(title, COLUMNS, summary(runs))
    reporting.show(table, {"runs": runs}, path, before=text)


if __name__ == "__main__":
    main()

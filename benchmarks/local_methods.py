"""Local methods over five seeds: adaptive rounds on digits, and few bits on a language model.

    python benchmarks/local_methods.py

`adaptive` trains a perceptron on handwritten digits with momentum SGD whose rate falls twice, in
rounds of constant, adaptive and scheduled length, and counts the exchanges. `bits` trains a byte
model in rounds of Adam or Muon, with dense and with compressed exchanges, and `tuned` searches the
rates of their baseline, dense DiLoCo, and `tuned sparse` those of SparseLoCo, over the same grid
and higher outer rates. Workers are simulated on one device. Tables and `local.json`
are in the `--out` folder.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting  # It makes the examples importable, too.
from reporting import Table
from rich.progress import track

import byte_lm_model  # isort: skip  # pyright: ignore[reportMissingImports]
import federated_model  # isort: skip  # pyright: ignore[reportMissingImports]
import training  # isort: skip  # pyright: ignore[reportMissingImports]

import jaxcomp
from jaxcomp import algorithms

AXIS = "workers"
ADAPTIVE = (
    "method {name} | exchanges {exchanges:.0f} | least {fewest} | most {most} | "
    "training loss {loss:.4f} | from {low:.4f} | to {high:.4f} | test accuracy, % {accuracy:.2f} | "
    "variance of the models {variance:.2e}"
)
BITS = (
    "method {name} | bits a parameter and round {bits:.3f} | bits a byte {score:.4f} | "
    "from {low:.4f} | to {high:.4f} | against dense, % {against:+.2f}"
)
INNER, OUTER = (1.5e-3, 3e-3, 6e-3, 1.2e-2), (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
HIGHER = (1.0, 2.0, 4.0)
"""Outer rates of a method without outer momentum."""
SPEEDUP = (
    "communication ÷ computation {ratio:.2f} | link {link} | rounds of 8 {eight:.2f} | "
    "rounds of 16 {sixteen:.2f}"
)


class Task(NamedTuple):
    """What a method trains on.

    Attributes:
        workers: how many there are.
        loss: of parameters and a worker's batch.
        begin: parameters and the batches of all steps, `[steps, workers, ...]`, of a seed.
        score: of the centre at the end, by name.
    """

    workers: int
    loss: Callable[[Any, Any], Any]
    begin: Callable[[int], tuple[Any, Any]]
    score: Callable[[Any], dict[str, float]]


def trainer(tx: Any, task: Task) -> Callable[[Any, Any], tuple[Any, Any, Any]]:
    """From a start and batches: the centre, the number of exchanges, and the mean variance."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
        grads = jax.grad(task.loss)(here, batch)
        apart = optax.tree.norm(optax.tree.sub(here, params), squared=True)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (state.waited == 0, apart)

    mapped = jax.vmap(step, axis_name=AXIS)

    @jax.jit
    def run(params: Any, batches: Any) -> tuple[Any, Any, Any]:
        def everyone(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.stack([x] * task.workers), tree)

        def one(carry: Any, batch: Any) -> tuple[Any, Any]:
            params, state = carry
            params, state, told = mapped(params, state, batch)
            return (params, state), told

        state = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)(jnp.arange(task.workers))
        (params, _), (ends, apart) = jax.lax.scan(one, (everyone(params), state), batches)
        return jax.tree.map(lambda x: x[0], params), ends[:, 0].sum(), apart.mean()

    return run


def digits(steps: int, workers: int = 8, size: int = 16) -> Task:
    (images, labels), test = federated_model.load()

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        logits = federated_model.logits_of(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def begin(seed: int) -> tuple[Any, Any]:
        rows = np.random.default_rng(seed).integers(len(images), size=(steps, workers, size))
        return federated_model.init(seed), (images[rows], labels[rows])

    whole = jax.jit(loss)

    def score(params: Any) -> dict[str, float]:
        right = federated_model.accuracy_of(params, *test)
        return {"loss": float(whole(params, (images, labels))), "accuracy": float(right)}

    return Task(workers, loss, begin, score)


def language(steps: int, workers: int = 4, size: int = 4, context: int = 64) -> Task:
    text, model = byte_lm_model.read_text(), byte_lm_model.ByteModel(2, 128)
    held_out = byte_lm_model.validation_of(text, context)

    def begin(seed: int) -> tuple[Any, Any]:
        params = model.init(jax.random.key(seed), np.zeros((1, context), np.int32))
        whole = [
            byte_lm_model.batch_of(text, at, size=workers * size, context=context, seed=seed)
            for at in range(steps)
        ]
        shape = (steps, workers, size, context)
        return params, tuple(np.stack(part).reshape(shape) for part in zip(*whole, strict=True))

    def score(params: Any) -> dict[str, float]:
        return {"score": float(byte_lm_model.bits_per_byte(model, params, held_out))}

    loss = functools.partial(training.loss_of, model)
    return Task(workers, loss, begin, score)


def measure(name: str, tx: Any, task: Task, seeds: int) -> dict[str, list[float]]:
    """What each seed came to."""
    run, found = trainer(tx, task), {"exchanges": [], "variance": []}
    for seed in track(range(seeds), description=f"{name:<32}"):
        params, exchanges, apart = run(*task.begin(seed))
        found["exchanges"].append(int(exchanges))
        found["variance"].append(float(apart))
        for key, value in task.score(params).items():
            found.setdefault(key, []).append(value)
    return found


def adaptive(seeds: int, steps: int = 1600) -> dict[str, Any]:
    """Constant, adaptive and scheduled rounds; the schedules exchange as often as rounds of 8."""
    rate = optax.piecewise_constant_schedule(0.05, {steps // 2: 0.1, 3 * steps // 4: 0.1})
    make = functools.partial(jaxcomp.local_updates, optax.sgd(rate, 0.9), None, AXIS)
    dense, third = jaxcomp.Dense(), steps // 3
    cases = {
        "every step": make(every=1),
        **{f"rounds of {p}": make(every=p) for p in (4, 6, 8, 12, 16)},
        "ADPSGD": algorithms.adpsgd(
            dense, AXIS, learning_rate=rate, momentum=0.9, start=4, warmup=steps // 16
        ),
        "ADPSGD, from rounds of 8": algorithms.adpsgd(
            dense, AXIS, learning_rate=rate, momentum=0.9, start=8, warmup=steps // 32
        ),
        "front-loaded: 4, then 16": make(every=lambda taken: jnp.where(taken < third, 4, 16)),
        "back-loaded: 16, then 4": make(
            every=lambda taken: jnp.where(taken < steps - third, 16, 4)
        ),
    }
    task = digits(steps)
    return {name: measure(name, tx, task, seeds) for name, tx in cases.items()}


def bits(seeds: int, rounds: int = 20, every: int = 15) -> dict[str, Any]:
    steps = rounds * every
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 20, steps, 1.5e-4)
    hidden = functools.partial(jax.tree_util.tree_map_with_path, _hidden)
    muon = optax.contrib.muon(
        optax.warmup_cosine_decay_schedule(0.0, 0.02, 20, steps, 1e-3),
        beta=0.9,
        adam_learning_rate=rate,
        muon_weight_dimension_numbers=hidden,
    )
    sparse = jaxcomp.Policy(jaxcomp.chunk_top_k(), min_size=0, min_ndim=0)
    dense, adam, two = jaxcomp.Dense(), optax.adam(rate), jaxcomp.blockwise(bits=2)
    outer = functools.partial(jaxcomp.local_updates, every=every)
    cases = {
        "DiLoCo, dense": (algorithms.diloco(dense, AXIS, every=every, inner=adam), dense, None),
        "SparseLoCo": (
            algorithms.sparseloco(sparse, AXIS, every=every, inner=adam, learning_rate=2.0),
            sparse,
            "DiLoCo, dense",
        ),
        "DiLoCo, 4-bit": (
            algorithms.diloco(jaxcomp.qsgd_inf(bits=4), AXIS, every=every, inner=adam),
            jaxcomp.qsgd_inf(bits=4),
            "DiLoCo, dense",
        ),
        "MuLoCo, dense": (
            outer(muon, optax.sgd(0.9, 0.8, nesterov=True), AXIS, reducer=dense),
            dense,
            None,
        ),
        "MuLoCo, 2-bit": (
            algorithms.muloco(two, AXIS, learning_rate=0.02, every=every, inner=muon),
            two,
            "MuLoCo, dense",
        ),
    }
    task = language(steps)
    like, _ = task.begin(0)
    leaves = jax.tree.leaves(like)
    size, whole = (sum(part) for part in zip(*((x.size, x.nbytes) for x in leaves), strict=True))
    found = {}
    for name, (tx, codec, base) in cases.items():
        sent = 8 * (whole if codec is dense else jaxcomp.wire_bytes(codec, like)) / size
        found[name] = {"bits": sent, "base": base, **measure(name, tx, task, seeds)}
    return found


def tuned(seeds: int) -> dict[str, Any]:
    """Dense DiLoCo as in `bits`, with the best pair of rates for a seed that is not counted."""

    def diloco(every: int, adam: Any, outer: float) -> Any:
        return algorithms.diloco(
            jaxcomp.Dense(), AXIS, every=every, inner=adam, learning_rate=outer
        )

    return _best("DiLoCo, dense, tuned", diloco, OUTER, seeds)


def tuned_sparse(seeds: int) -> dict[str, Any]:
    """SparseLoCo alike."""
    sparse = jaxcomp.Policy(jaxcomp.chunk_top_k(), min_size=0, min_ndim=0)

    def sparseloco(every: int, adam: Any, outer: float) -> Any:
        return algorithms.sparseloco(sparse, AXIS, every=every, inner=adam, learning_rate=outer)

    return _best("SparseLoCo, tuned", sparseloco, (*OUTER, *HIGHER), seeds)


def _best(
    name: str, make: Any, outers: Sequence[float], seeds: int, rounds: int = 20, every: int = 15
) -> dict[str, Any]:
    steps = rounds * every
    task, grid = language(steps), {}

    def method(inner: float, outer: float) -> Any:
        rate = optax.warmup_cosine_decay_schedule(0.0, inner, 20, steps, inner / 20)
        return make(every, optax.adam(rate), outer)

    pairs = [(inner, outer) for inner in INNER for outer in outers]
    for pair in track(pairs, description=f"rates of {name}"):
        params, *_ = trainer(method(*pair), task)(*task.begin(seeds))
        grid[pair] = task.score(params)["score"]
    best = min(grid, key=lambda pair: grid[pair])
    shown = {f"inner {inner:g}, outer {outer:g}": score for (inner, outer), score in grid.items()}
    measured = measure(name, method(*best), task, seeds)
    return {"grid": shown, "inner": best[0], "outer": best[1], **measured}


def _hidden(path: Any, leaf: Any) -> Any:
    inside = "block" in jax.tree_util.keystr(path) and leaf.ndim == 2
    return optax.contrib.MuonDimensionNumbers() if inside else None


def adaptive_record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "exchanges": statistics.median(found["exchanges"]),
        "fewest": min(found["exchanges"]),
        "most": max(found["exchanges"]),
        "loss": statistics.median(found["loss"]),
        "low": min(found["loss"]),
        "high": max(found["loss"]),
        "accuracy": statistics.fmean(found["accuracy"]),
        "variance": statistics.median(found["variance"]),
    }


def bits_record(name: str, found: dict[str, Any], of: dict[str, Any]) -> dict[str, Any]:
    score = statistics.fmean(found["score"])
    base = of[found["base"] or name]
    against = 100 * (score / statistics.fmean(base["score"]) - 1)
    low, high = min(found["score"]), max(found["score"])
    return {"name": name, "bits": found["bits"], "score": score, "low": low, "high": high} | {
        "against": against
    }


def speedups() -> list[dict[str, Any]]:
    """`(1 + ρ) / (1 + ρ/p)` of rounds of `p` steps over a dense mean in every step."""
    found = []
    for ratio, link in (
        (0.16, "100 Gbit/s"),
        (0.32, "100 Gbit/s"),
        (0.56, "10 Gbit/s"),
        (1.26, "10 Gbit/s"),
    ):
        eight, sixteen = ((1 + ratio) / (1 + ratio / p) for p in (8, 16))
        found.append({"ratio": ratio, "link": link, "eight": eight, "sixteen": sixteen})
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=("adaptive", "bits", "tuned", "tuned sparse"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/local"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "local.json"
    book = reporting.read(path) if path.exists() else {}
    book["environment"] = reporting.environment()
    jobs = {"adaptive": adaptive, "bits": bits, "tuned": tuned, "tuned sparse": tuned_sparse}
    for name, job in jobs.items():
        if options.only in (name, None):
            book[name] = job(options.seeds)
            reporting.keep(path, book)
    write(options.out, book)


def write(folder: pathlib.Path, book: dict[str, Any], *, quiet: bool = False) -> None:
    parts: list[Any] = [f"{reporting.line(book['environment'])}."]
    if "adaptive" in book:
        rows = [adaptive_record(name, one) for name, one in book["adaptive"].items()]
        parts.append(Table("Rounds of constant and of adaptive length, digits", ADAPTIVE, rows))
    if "bits" in book:
        rows = [bits_record(name, one, book["bits"]) for name, one in book["bits"].items()]
        if "tuned" in book:
            best = {"bits": 32.0, "base": "DiLoCo, dense", **book["tuned"]}
            rows.append(bits_record("DiLoCo, dense, tuned", best, book["bits"]))
        if "tuned sparse" in book:
            of = book["bits"]["SparseLoCo"]["bits"]
            best = {"bits": of, "base": "DiLoCo, dense", **book["tuned sparse"]}
            rows.append(bits_record("SparseLoCo, tuned", best, book["bits"]))
        parts.append(Table("Few bits in rounds, byte model", BITS, rows))
    parts.append(Table("Speed-up over a dense mean in every step, link model", SPEEDUP, speedups()))
    reporting.sections(parts, folder / "local.md", quiet=quiet)


if __name__ == "__main__":
    main()

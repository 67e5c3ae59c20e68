"""Times compiling and running a training step, compressed and by a hand-written `pmean`.

    python benchmarks/step.py --out out/bench

A model of 100 leaves over eight simulated devices of one machine: no link is slow here, so the
times show the cost of compression and not its savings. A second table splits the time of one codec:
programs that end after the gradients, after encoding, after the collective, and the whole step.
"""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import reporting
import timing
from cases import CODECS, WORKERS

import jaxcomp
from jaxcomp.backend import axes
from jaxcomp.wire import buffer

MODEL = {
    f"layer{i:02d}": {
        "kernel": np.full((128, n), 0.01, np.float32),
        "bias": np.zeros(n, np.float32),
    }
    for i, n in enumerate([200, 256] * 25)
}


def loss(params: Any, x: jax.Array) -> Any:
    return sum(jnp.mean(jnp.tanh(x @ layer["kernel"] + layer["bias"])) for layer in params.values())


def data() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (64, 128))


def stages(codec: Any, repeats: int) -> dict[str, float]:
    """Milliseconds of a step that ends after each stage."""
    mesh, policy = jax.make_mesh((WORKERS,), ("data",)), jaxcomp.Policy(codec)
    key = jnp.zeros(2, jnp.uint32)

    def own(tree):
        return jaxcomp.PerWorker.wrap(tree, "stage", "data")

    def gradients(params, x):
        return jax.grad(loss)(jaxcomp.local(params, "data"), x)

    def encoded(params, x):
        worker = jax.lax.axis_index("data")
        return jaxcomp.encode(policy, key, gradients(params, x), worker=worker)

    def whole(params, x):
        mean = jaxcomp.compressed_mean(jaxcomp.Gather(jaxcomp.Link(policy)), "data")
        grads = gradients(params, x)
        return mean.update(grads, mean.init(params))[0]

    programs = {
        "gradients": lambda params, x: own(gradients(params, x)),
        "and encoding": lambda params, x: own(encoded(params, x)),
        "and the collective": lambda params, x: axes.gather(
            buffer.fuse(encoded(params, x).batches), "data"
        ),
        "and decoding: the mean": whole,
    }
    runs, x = {}, data()
    for name, program in programs.items():
        compiled = jaxcomp.data_parallel(program, mesh, "data").lower(MODEL, x).compile()
        runs[name] = lambda c=compiled: jax.block_until_ready(c(MODEL, x))
    return {name: 1e3 * took.median for name, took in timing.in_turns(runs, repeats).items()}


def measure(names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Compiling and running one step of a model of 100 leaves, dense and compressed."""
    mesh = jax.make_mesh((WORKERS,), ("data",))
    params, batch = jax.tree.map(jnp.asarray, MODEL), data()

    by_hand = optax.stateless(lambda updates, _: jax.lax.pmean(updates, "data"))
    codecs = {"Dense()": jaxcomp.Dense(), **{name: CODECS[name] for name in names}}
    means = {name: jaxcomp.compressed_mean(codec, "data") for name, codec in codecs.items()}
    found: dict[str, dict[str, float]] = {}
    runs = {}
    for name, mean in {"pmean by hand": by_hand, **means}.items():
        tx = optax.chain(mean, optax.sgd(0.1))

        def step(params, state, x, tx=tx):
            grads = jax.grad(loss)(jaxcomp.local(params, "data"), x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        run = jaxcomp.data_parallel(step, mesh, "data")
        state = jaxcomp.init_state(tx, params, mesh, "data")
        compiling = []
        for _ in range(3):
            jax.clear_caches()
            start = time.perf_counter()
            compiled = run.lower(params, state, batch).compile()
            compiling.append(time.perf_counter() - start)
        found[name] = {
            "compile_s": statistics.median(compiling),
            "link_bytes": sum(jaxcomp.collective_bytes(compiled).values()),
        }
        runs[name] = lambda c=compiled, s=state: jax.block_until_ready(c(params, s, batch))
    for name, took in timing.in_turns(runs, repeats).items():
        found[name]["step_ms"] = 1e3 * took.median
    return found


COLUMNS = (
    "mean {name} | compile s {compile_s:.2f} | of dense {compiling:.2f} | "
    "step ms {step_ms:.1f} | of dense {stepping:.2f} | link bytes {link_bytes:,.0f}"
)


def main() -> None:
    options = reporting.options(
        __doc__,
        "out/bench",
        repeats=(11, "runs that a median is taken over"),
        codec=(CODECS, "some of them"),
    )
    steps = measure(options.codec, options.repeats)
    base = steps["pmean by hand"]
    records = [
        {
            **row,
            "name": name,
            "compiling": row["compile_s"] / base["compile_s"],
            "stepping": row["step_ms"] / base["step_ms"],
        }
        for name, row in steps.items()
    ]
    title = "One step of a model of 100 leaves over 8 simulated devices"
    reporting.show(
        reporting.Table(title, COLUMNS, records), {"steps": steps}, options.out / "step.md"
    )
    name = options.codec[0]
    times = stages(CODECS[name], options.repeats)
    before = [0.0, *times.values()]
    records = [
        {"until": stage, "ms": spent, "more": spent - earlier}
        for (stage, spent), earlier in zip(times.items(), before, strict=False)
    ]
    table = reporting.Table(
        f"Where the step of {name} goes", "until {until} | ms {ms:.1f} | more {more:+.1f}", records
    )
    reporting.show(table, {name: times}, options.out / "stages.md")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()

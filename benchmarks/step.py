"""What a training step costs to compile and to run, compressed and by a hand-written `pmean`.

    python benchmarks/step.py --out out/bench

A model of 100 leaves over eight simulated devices of one machine: no link is slow here, so this is
the price of compressing, and not what it saves.
"""

import argparse
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import optax
from harness import CODECS, WORKERS, median_times, show

import jaxcomp


def measure(names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Compiling and running one step of a model of 100 leaves, dense and compressed."""
    mesh = jax.make_mesh((WORKERS,), ("data",))
    params = {
        f"layer{i:02d}": {"kernel": jnp.full((128, n), 0.01), "bias": jnp.zeros(n)}
        for i, n in enumerate([200, 256] * 25)
    }
    batch = jax.random.normal(jax.random.key(0), (64, 128))

    def loss(params, x):
        return sum(
            jnp.mean(jnp.tanh(x @ layer["kernel"] + layer["bias"])) for layer in params.values()
        )

    def by_hand():
        return optax.GradientTransformation(
            lambda params: (),
            lambda updates, state, params=None: (jax.lax.pmean(updates, "data"), state),
        )

    means = {
        "pmean by hand": by_hand(),
        "Dense()": jaxcomp.compressed_mean(jaxcomp.Dense(), "data"),
    }
    for name in names:
        codec = CODECS[name]
        means[name] = jaxcomp.compressed_mean(codec, "data")
    found: dict[str, dict[str, float]] = {}
    runs = []
    for name, mean in means.items():
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
        runs.append(lambda c=compiled, s=state: jax.block_until_ready(c(params, s, batch)))
    for name, seconds in zip(found, median_times(runs, repeats), strict=True):
        found[name]["step_ms"] = 1e3 * seconds
    return found


COLUMNS = ("mean", "compile s", "of dense", "step ms", "of dense", "link bytes")


def rows(steps: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    base = steps["pmean by hand"]
    return [
        (
            name,
            f"{row['compile_s']:.2f}",
            f"{row['compile_s'] / base['compile_s']:.2f}",
            f"{row['step_ms']:.1f}",
            f"{row['step_ms'] / base['step_ms']:.2f}",
            f"{row['link_bytes']:,.0f}",
        )
        for name, row in steps.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=11, help="runs a median is taken over")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/bench"))
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats must be positive, got {options.repeats}")
    steps = measure(options.codec, options.repeats)
    title = "One step of a model of 100 leaves over 8 simulated devices"
    show(title, COLUMNS, rows(steps), {"steps": steps}, options.out / "step.md")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", WORKERS)
    main()

"""Compares two checkouts of the package, in turns on one machine: tracing, compiling, stepping.

    python benchmarks/turns.py --other FOLDER

Each turn is a process of its own with an empty compilation cache. The ratio of the medians says
what this checkout costs or saves.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

MEASURE = "--measure"
"""Measures this process's own checkout, and prints the seconds."""


def measure() -> dict[str, float]:
    """Seconds of a compressed mean over eight simulated devices, for a model of 100 leaves."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxcomp

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = jax.make_mesh((8,), ("data",))
    params = {f"w{i}": jnp.ones((128, 64 + i)) for i in range(50)}
    params |= {f"b{i}": jnp.ones(64 + i) for i in range(50)}
    found = {}
    for name, codec in {"qsgd_inf": jaxcomp.qsgd_inf(bits=4), "sign": jaxcomp.sign()}.items():
        tx = optax.chain(jaxcomp.compressed_mean(codec, "data"), optax.adam(1e-3))

        def step(params, state, x, tx=tx):
            grads = jax.tree.map(lambda p: p * x.mean(), jaxcomp.local(params, "data"))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        run = jaxcomp.data_parallel(step, mesh, "data", donate_argnums=(0, 1))
        own = jaxcomp.place(jax.tree.map(jnp.array, params), mesh, "data")
        begin = time.perf_counter()
        state = jaxcomp.init_state(tx, own, mesh, "data")
        found[f"{name}: init_state"] = time.perf_counter() - begin
        x = jnp.ones(8)
        begin = time.perf_counter()
        lowered = run.lower(own, state, x)
        found[f"{name}: trace and lower"] = time.perf_counter() - begin
        begin = time.perf_counter()
        lowered.compile()
        found[f"{name}: compile"] = time.perf_counter() - begin
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            own, state = jax.block_until_ready(run(own, state, x))
            times.append(time.perf_counter() - begin)
        found[f"{name}: step"] = statistics.median(times[5:])
    return found


def main() -> None:
    """Runs both checkouts in turns, and writes a table."""
    import reporting

    options = reporting.options(
        __doc__,
        reporting.RESULTS / "turns",
        other=("", "the folder of the other checkout"),
        turns=(5, "turns of each checkout"),
    )
    here = pathlib.Path(__file__).resolve().parents[1]
    seconds: dict[str, dict[str, list[float]]] = {"before": {}, "now": {}}
    for _ in range(options.turns):
        for name, tree in (("before", options.other), ("now", here)):
            settings = os.environ | {"PYTHONPATH": str(tree), "JAX_NUM_CPU_DEVICES": "8"}
            settings.pop("JAX_COMPILATION_CACHE_DIR", None)
            command = [sys.executable, __file__, MEASURE]
            said = subprocess.run(command, env=settings, stdout=subprocess.PIPE, check=True)
            for what, number in json.loads(said.stdout.splitlines()[-1]).items():
                seconds[name].setdefault(what, []).append(number)
    report(seconds, options.out / "turns.md")


def report(seconds: dict[str, dict[str, list[float]]], path: pathlib.Path) -> None:
    """Prints and writes the medians of all turns, and their ratio."""
    import reporting

    rows = []
    for what, times in seconds["before"].items():
        before, now = statistics.median(times), statistics.median(seconds["now"][what])
        rows.append({"what": what, "before": before, "now": now, "ratio": now / before})
    columns = "what {what} | before, s {before:.4f} | now, s {now:.4f} | now / before {ratio:.2f}"
    table = reporting.Table("Two checkouts in turns", columns, rows)
    reporting.show(table, seconds, path)


if __name__ == "__main__":
    print(json.dumps(measure())) if MEASURE in sys.argv else main()

"""Times the host's part of a call of `data_parallel` beside that of `jit(shard_map)`.

    JAX_NUM_CPU_DEVICES=8 python benchmarks/dispatch.py

Arrays are of a few elements, so that a call takes the time of the host: of checks, layouts and the
launch. Both programs are the same, and both are called in turns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import timing
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomp

ARRAYS = (152, 1202)
COLUMNS = (
    "devices {devices} | arrays {arrays} | jit(shard_map), ms {plain_ms:.2f} | "
    "data_parallel, ms {ours_ms:.2f} | ratio {ratio:.2f}"
)


def step(params, state, batch):
    less = 1 - 1e-6 * jax.lax.pmean(batch.mean(), "data")
    return jax.tree.map(lambda x: x * less, (params, state))


def measure(devices: int, arrays: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a call, until its results are there."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    here, split = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(here, here, split), out_specs=(here, here))
    calls = {
        "plain": jax.jit(mapped, donate_argnums=(0, 1)),
        "ours": jaxcomp.data_parallel(step, mesh, "data", donate_argnums=(0, 1)),
    }
    batch = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, split))
    tree = {f"layer {n}": {"bias": jnp.ones(3), "scale": jnp.ones(())} for n in range(arrays // 4)}
    home = NamedSharding(mesh, here)
    held = {  # Copies: the calls may overwrite what they are given.
        name: jax.device_put(jax.tree.map(jnp.copy, (tree, tree)), home) for name in calls
    }

    def run(name: str) -> None:
        held[name] = jax.block_until_ready(calls[name](*held[name], batch))

    took = timing.in_turns({name: lambda name=name: run(name) for name in calls}, repeats)
    plain, ours = took["plain"].median, took["ours"].median
    return {"plain_ms": 1e3 * plain, "ours_ms": 1e3 * ours, "ratio": ours / plain}


def main() -> None:
    options = reporting.options(
        __doc__, reporting.RESULTS / "dispatch", repeats=(101, "calls that a median is taken over")
    )
    rows = [
        {"devices": devices, "arrays": arrays + 1} | measure(devices, arrays, options.repeats)
        for devices in sorted({1, jax.device_count()})
        for arrays in ARRAYS
    ]
    title = "A call of a step, with its launch"
    table = reporting.Table(title, COLUMNS, rows)
    reporting.show(table, {"rows": rows}, options.out / "dispatch.md")


if __name__ == "__main__":
    main()

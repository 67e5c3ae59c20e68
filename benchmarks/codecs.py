"""How fast the codecs are on this machine, against a copy of the same array in the same run.

    python benchmarks/codecs.py --size 25000000 --out out/bench

For each codec: encode, decode, decode and sum of eight payloads, as ratios to a numpy copy, all
into warm (donated) buffers (medians, taken in turns with the copy); measured
payload bits; relative squared error; and the link speed below which sending the payload beats
sending float32 from one worker to another, had they nothing else to do.
"""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import CODECS, WORKERS, median_times, show
from rich.console import Console
from rich.progress import track

import jaxcomp
from jaxcomp import noise, summing, trees


def into_warm(f: Callable[..., Any], like: Any, *args: Any) -> Callable[[], None]:
    """Runs `f` with its result in the buffers of the last one, so that no page is mapped anew."""
    compiled = jax.jit(lambda held, *rest: f(*rest), donate_argnums=0, keep_unused=True)
    held = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)]

    def run():
        held[0] = jax.block_until_ready(compiled(held[0], *args))

    return run


def decode_sum(codec: Any, plan: trees.Layout, key: Any, payloads: Any) -> Any:
    stacks = []
    for number, (batch, part) in enumerate(zip(plan.batches, payloads.batches, strict=True)):
        own = [trees.batch_key(key, number, worker).own for worker in range(WORKERS)]
        keys = trees.batch_key(key, number, 0)._replace(own=jnp.stack(own))
        stacks.append(summing.decode_sum(codec, keys, part, batch.like))
    return trees.assemble(plan, stacks, ())


def measure(codec: Any, data: np.ndarray, repeats: int) -> dict[str, float]:
    size, target = data.size, np.empty_like(data)
    x, key = jnp.asarray(data), noise.raw(0)
    plan = trees.layout(codec, x)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    payload = jax.jit(lambda x: jaxcomp.encode(codec, key, x))(x)
    payloads = jax.tree.map(lambda leaf: jnp.stack([leaf] * WORKERS), payload)
    runs = {
        "encode": into_warm(lambda x: jaxcomp.encode(codec, key, x), payload, x),
        "decode": into_warm(lambda p: jaxcomp.decode(codec, key, p, like), like, payload),
        "decode_sum_8": into_warm(lambda p: decode_sum(codec, plan, key, p), like, payloads),
    }
    found: dict[str, float] = {}
    for name, run in runs.items():
        copy, took = median_times([lambda: np.copyto(target, data), run], repeats)
        found[name], found[f"{name}_ms"], found["copy_ms"] = took / copy, took * 1e3, copy * 1e3
    back = jax.jit(lambda p: jaxcomp.decode(codec, key, p, like))(payload)
    found["nmse"] = float(jnp.sum((back - x) ** 2) / jnp.sum(x * x))
    found["bits"] = 8 * jaxcomp.wire_bytes(codec, like) / size
    saved = size * (32 - found["bits"])
    found["break_even_gbps"] = saved / (found["encode_ms"] + found["decode_ms"]) / 1e6
    return found


COLUMNS = (
    "codec",
    "encode / copy",
    "decode / copy",
    "sum of 8 / copy",
    "bits",
    "error",
    "break-even Gbit/s",
)


def rows(codecs: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            *(f"{row[k]:.2f}" for k in ("encode", "decode", "decode_sum_8")),
            f"{row['bits']:.3f}",
            f"{row['nmse']:.3g}",
            f"{row['break_even_gbps']:.1f}",
        )
        for name, row in codecs.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=25_000_000, help="floats in the array")
    parser.add_argument("--repeats", type=int, default=11, help="runs a median is taken over")
    parser.add_argument("--codec", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/bench"))
    options = parser.parse_args()
    if options.size < 1 or options.repeats < 1:
        parser.error("--size and --repeats must be positive")
    data = np.random.default_rng(0).standard_normal(options.size).astype(np.float32)
    picked = track(options.codec, "codecs", console=Console(), transient=True)
    codecs = {name: measure(CODECS[name], data, options.repeats) for name in picked}
    results = {"size": options.size, "codecs": codecs}
    title = f"{options.size:,} floats, as multiples of a copy"
    show(title, COLUMNS, rows(codecs), results, options.out / "codecs.md")


if __name__ == "__main__":
    main()

"""Compares every kernel on a GPU with the reference, bit for bit, and times it beside a copy.

    python benchmarks/gpu.py --out benchmarks/results/gpu

First each operation runs as a kernel, as compiled by XLA on the GPU, and as compiled by XLA on the
CPU, on buckets of every sort: all must give the same bits. Then each is timed as a kernel and by
XLA, in turns. The bytes that it must move (input once, output once) are compared with the bandwidth
that a copy of the same array reaches. Then every codec is timed as users call it.
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import reporting
import timing
from cases import CODECS
from kernels import Operation
from rich.progress import track

import jaxcomp
from jaxcomp.numerics import noise

DTYPES, BLOCKS = (jnp.float32, jnp.bfloat16), (512, 4096, 8192)
WAYS = {"kernel": "gpu", "xla": "reference"}
"""Implementations, by the names that results have."""
LAUNCHES = 10


def operations(n: int) -> Iterator[Operation]:
    yield from kernels.packing(n)
    yield from kernels.coding(n, DTYPES)
    yield from kernels.rotations(n * 512, BLOCKS)


def check(one: Operation) -> None:
    """Stops unless the kernel, XLA on the GPU and XLA on the CPU agree bit for bit."""
    cpu, gpu, args = jax.devices("cpu")[0], jax.devices()[0], one.inputs()

    def result(how: str, device: Any) -> list[np.ndarray]:
        run = jax.jit(functools.partial(one.run, implementation=how))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(run(*jax.device_put(args, device)))]

    want = result("reference", cpu)
    for place, how in (("the reference", "reference"), ("the kernel", "gpu")):
        for got, other in zip(result(how, gpu), want, strict=True):
            unsigned = f"uint{8 * got.dtype.itemsize}"
            bad = got.view(unsigned) != other.view(unsigned)
            if jnp.issubdtype(got.dtype, jnp.floating):  # All NaN are equal.
                bad &= ~(np.isnan(got.astype(np.float32)) & np.isnan(other.astype(np.float32)))
            if bad.any():
                raise SystemExit(f"{one.name}: {bad.sum()} of {bad.size} differ on {place}")


def medians(runs: dict[str, timing.Run], repeats: int) -> dict[str, float]:
    """Seconds of one launch of each."""
    return {name: took.median / LAUNCHES for name, took in timing.in_turns(runs, repeats).items()}


def moved(run: Any, args: tuple[Any, ...]) -> int:
    """Minimal traffic in bytes: every input once, every output once."""
    leaves = [*jax.tree.leaves(args), *jax.tree.leaves(jax.eval_shape(run, *args))]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def measure(one: Operation, bandwidth: float, repeats: int) -> dict[str, Any]:
    args = jax.device_put(one.inputs())
    ways = {how: functools.partial(one.run, implementation=name) for how, name in WAYS.items()}
    size = moved(ways["kernel"], args)
    runs = {how: timing.into_warm(run, *args, launches=LAUNCHES) for how, run in ways.items()}
    took = medians(runs, repeats)
    share = {how: size / spent / bandwidth for how, spent in took.items()}
    return {"bytes": size, "seconds": took, "share_of_copy_bandwidth": share}


def measure_codec(codec: Any, x: jax.Array) -> dict[str, float]:
    like, key = jax.ShapeDtypeStruct(x.shape, x.dtype), noise.raw(kernels.KEY)
    encode = functools.partial(jaxcomp.encode, codec, key)
    payload = jax.jit(encode)(x)
    runs = {
        "encode_s": timing.into_warm(encode, x, launches=LAUNCHES),
        "decode_s": timing.into_warm(
            lambda p: jaxcomp.decode(codec, key, p, like), payload, launches=LAUNCHES
        ),
    }
    bits = 8 * jaxcomp.wire_bytes(codec, like) / x.size
    found = {"bits": bits, **medians(runs, 3)}
    spent = found["encode_s"] + found["decode_s"]
    return {**found, "break_even_gbps": x.size * (32 - bits) / spent / 1e9}


COLUMNS = (
    "operation {name} | kernel µs {seconds[kernel]:.0f} | XLA µs {seconds[xla]:.0f} | "
    "kernel / copy {share_of_copy_bandwidth[kernel]:.0%} | "
    "XLA / copy {share_of_copy_bandwidth[xla]:.0%} | faster {faster}"
)
CODEC_COLUMNS = (
    "codec {name} | bits {bits:.3f} | encode s {encode_s:.2e} | decode s {decode_s:.2e} | "
    "pays below, Gbit/s {break_even_gbps:.0f}"
)


def record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    times = {how: 1e6 * spent for how, spent in found["seconds"].items()}
    faster = "kernel" if times["kernel"] < times["xla"] else "XLA"
    return {**found, "name": name, "seconds": times, "faster": faster}


def main() -> None:
    options = reporting.options(
        __doc__,
        "out/gpu",
        size=(100_000_000, "floats in a timed array"),
        repeats=(11, "runs that a median is taken over"),
    )
    if jax.devices()[0].platform not in ("gpu", "cuda"):
        raise SystemExit(f"this needs a GPU, and JAX has {jax.devices()[0].platform} devices here")
    start = time.perf_counter()
    for one in track([*operations(70)], "bits"):
        check(one)
    print(f"all bits agree ({time.perf_counter() - start:.0f} s)")
    copy = timing.into_warm(lambda x: x + 1, jnp.ones(options.size), launches=LAUNCHES)
    bandwidth = 8 * options.size / medians({"copy": copy}, options.repeats)["copy"]
    todo = track([*operations(options.size // 512)], "kernels")
    found = {one.name: measure(one, bandwidth, options.repeats) for one in todo}
    x = jnp.asarray(np.random.default_rng(0).standard_normal(options.size, np.float32))
    codecs = {name: measure_codec(codec, x) for name, codec in track(CODECS.items(), "codecs")}
    records = [{**row, "name": name} for name, row in codecs.items()]
    reporting.Table("Codecs as users call them", CODEC_COLUMNS, records).print()
    results = {
        "size": options.size,
        "copy_bytes_per_second": bandwidth,
        "driver": getattr(jax.devices()[0].client, "platform_version", "unknown"),
        "kernels": found,
        "codecs": codecs,
    }
    title = f"{options.size:,} elements; a copy reaches {bandwidth / 1e9:.0f} GB/s"
    table = reporting.Table(title, COLUMNS, [record(name, row) for name, row in found.items()])
    reporting.show(table, results, options.out / "kernels.md")
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()

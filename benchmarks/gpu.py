"""Compares every kernel on a GPU with the reference, bit for bit, and times it beside a copy.

    python benchmarks/gpu.py --out benchmarks/results/gpu

First each operation runs as a kernel, as compiled by XLA on the GPU, and as compiled by XLA on the
CPU, on buckets of every sort: all must give the same bits. Collectives and their gradients run on
the GPU and the CPU. Then each operation is timed as a kernel and by
XLA, in turns. The bytes that it must move (input once, output once) are compared with the bandwidth
that a copy of the same array reaches. Then every codec is timed as users call it. Last, codecs that
are far from a copy are timed whole and in parts (`gpu_parts.py`), with the launches of each
program, how often these read or write the array, and the time of each by JAX's profiler.

An operation that differs or fails is listed, the others are still measured, and the program ends
with status 1. Results are written after each stage.
"""

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_collectives
import gpu_parts
import jax
import jax.numpy as jnp
import kernels
import launches
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
    yield from kernels.rotations(max(n * 512, 8 * max(BLOCKS)), BLOCKS)


def check(one: Operation) -> list[str]:
    """Where the kernel, XLA on the GPU and XLA on the CPU do not agree bit for bit."""
    cpu, gpu, args = jax.devices("cpu")[0], jax.devices()[0], one.inputs()

    def result(how: str, device: Any) -> list[np.ndarray]:
        run = jax.jit(functools.partial(one.run, implementation=how))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(run(*jax.device_put(args, device)))]

    want, faults = result("reference", cpu), []
    for place, how in (("XLA on the GPU", "reference"), ("the kernel", "gpu")):
        for got, other in zip(result(how, gpu), want, strict=True):
            unsigned = f"uint{8 * got.dtype.itemsize}"
            bad = got.view(unsigned) != other.view(unsigned)
            if jnp.issubdtype(got.dtype, jnp.floating):  # All NaN are equal.
                bad &= ~(np.isnan(got.astype(np.float32)) & np.isnan(other.astype(np.float32)))
            if bad.any():
                first = np.argwhere(bad)[0].tolist()
                faults.append(f"{bad.sum()} of {bad.size} differ with {place}, first at {first}")
    return faults


def medians(runs: dict[str, timing.Run], repeats: int) -> dict[str, float]:
    """Seconds of one launch of each."""
    return {name: took.median / LAUNCHES for name, took in timing.in_turns(runs, repeats).items()}


def moved(run: Any, args: tuple[Any, ...]) -> int:
    """Minimal traffic in bytes: every input once, every output once."""
    leaves = [*jax.tree.leaves(args), *jax.tree.leaves(jax.eval_shape(run, *args))]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def ready(one: Operation) -> tuple[int, dict[str, timing.Run]]:
    """The traffic of an operation, and its two ways, compiled."""
    args = jax.device_put(one.inputs())
    ways = {how: functools.partial(one.run, implementation=name) for how, name in WAYS.items()}
    runs = {how: timing.into_warm(run, *args, launches=LAUNCHES) for how, run in ways.items()}
    for run in runs.values():
        run()
    return moved(ways["kernel"], args), runs


def measure(prepared: Any, bandwidth: float, repeats: int) -> dict[str, Any]:
    size, runs = prepared
    took = medians(runs, repeats)
    share = {how: size / spent / bandwidth for how, spent in took.items()}
    return {"bytes": size, "seconds": took, "share_of_copy_bandwidth": share}


def ready_codec(codec: Any, x: jax.Array) -> tuple[float, dict[str, timing.Run]]:
    """The bits per element of a codec, and its two directions, compiled."""
    like, key = jax.ShapeDtypeStruct(x.shape, x.dtype), noise.raw(kernels.KEY)
    encode = functools.partial(jaxcomp.encode, codec, key)
    payload = jax.jit(encode)(x)
    runs = {
        "encode_s": timing.into_warm(encode, x, launches=LAUNCHES),
        "decode_s": timing.into_warm(
            lambda p: jaxcomp.decode(codec, key, p, like), payload, launches=LAUNCHES
        ),
    }
    for run in runs.values():
        run()
    return 8 * jaxcomp.wire_bytes(codec, like) / x.size, runs


def measure_codec(prepared: Any, size: int, repeats: int) -> dict[str, float]:
    bits, runs = prepared
    found = {"bits": bits, **medians(runs, repeats)}
    spent = found["encode_s"] + found["decode_s"]
    return {**found, "break_even_gbps": size * (32 - bits) / spent / 1e9}


def ready_part(part: gpu_parts.Part) -> tuple[int, dict[str, Any], timing.Run]:
    """The bytes of its array, the launches of a program as the compiler made them, and it."""
    args = jax.device_put(part.inputs())
    text = jax.jit(part.run).lower(*args).compile().as_text() or ""
    run = timing.into_warm(part.run, *args, launches=LAUNCHES)
    run()
    return part.bytes, launches.record(text, part.bytes), run


def measure_part(prepared: Any, bandwidth: float, repeats: int) -> dict[str, Any]:
    size, counted, run = prepared
    seconds = medians({"run": run}, repeats)["run"]
    each = {name: time / LAUNCHES for name, time in gpu_parts.kernel_times(run).items()}
    longest = dict(list(each.items())[:8])
    copies = seconds * bandwidth / (2 * size)
    return {**counted, "µs": 1e6 * seconds, "copies": copies, "kernels, µs": longest}


def each(work: Callable[..., Any], given: Iterable[Any], title: str) -> list[Any]:
    """The results in order, or errors in one line: one failure does not end a run.

    XLA compiles in several threads at once.
    """

    def attempt(one: Any) -> Any:
        try:
            return work(one)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    todo = list(given)
    with ThreadPoolExecutor(8) as threads:
        return list(track(threads.map(attempt, todo), title, len(todo)))


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


COLUMNS = (
    "operation {name} | kernel µs {seconds[kernel]:.0f} | XLA µs {seconds[xla]:.0f} | "
    "kernel / copy {share_of_copy_bandwidth[kernel]:.0%} | "
    "XLA / copy {share_of_copy_bandwidth[xla]:.0%} | faster {faster}"
)
CODEC_COLUMNS = (
    "codec {name} | bits {bits:.3f} | encode s {encode_s:.2e} | decode s {decode_s:.2e} | "
    "pays below, Gbit/s {break_even_gbps:.0f}"
)
PART_COLUMNS = (
    "program {name} | µs {µs:.0f} | copies of the array {copies:.2f} | "
    "arrays read and written {passes:.2f} | kernels {kernel} | other launches {other}"
)


def record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    if "launches" in found:
        kernel, every = found["launches"].get("kernel", 0), sum(found["launches"].values())
        return {**found, "name": name, "kernel": kernel, "other": every - kernel}
    if "seconds" not in found:  # A codec.
        return {**found, "name": name}
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
    every = [*operations(70)]
    differ = zip(every, each(check, every, "bits"), strict=True)
    faults = {one.name: [*np.ravel(found)] for one, found in differ if found}
    for name, found in faults.items():
        print(f"{name}: {'; '.join(found)}")
    print(
        f"bits: {len(faults)} operations differ ({time.perf_counter() - start:.0f} s)", flush=True
    )
    apart = dict(gpu_collectives.differences())
    far = {name: found for name, found in apart.items() if not found <= gpu_collectives.TOLERANCE}
    faults |= {name: [f"differs by {found:.2g} from the CPU's"] for name, found in far.items()}
    exact = sum(not found for found in apart.values())
    print(f"collectives: {exact} of {len(apart)} have the CPU's bits, {far or 'all'} are close")
    copy = timing.into_warm(lambda x: x + 1, jnp.ones(options.size), launches=LAUNCHES)
    bandwidth = 8 * options.size / medians({"copy": copy}, options.repeats)["copy"]
    common = {
        "collectives": apart,
        "size": options.size,
        "copy_bytes_per_second": bandwidth,
        "driver": driver(),
        "runtime": getattr(jax.devices()[0].client, "platform_version", "unknown"),
    }

    def keep(
        stage: str, title: str, columns: str, names: list[str], prepared: list[Any], work: Any
    ) -> None:
        """Measures what could be prepared, one after another; prints and writes it."""
        usable, failed = {}, {}
        for name, one in zip(names, prepared, strict=True):
            (failed if isinstance(one, str) else usable)[name] = one
        faults.update({name: [error] for name, error in failed.items()})
        done = {name: work(one) for name, one in track(usable.items(), f"{stage}, in turns")}
        records = [record(name, found) for name, found in done.items()]
        results = {**common, "faults": faults, stage: done}
        reporting.show(
            reporting.Table(title, columns, records), results, options.out / f"{stage}.md"
        )
        print(f"{stage}: {failed or 'all ran'} ({time.perf_counter() - start:.0f} s)", flush=True)

    todo = [*operations(options.size // 512)]
    keep(
        "kernels",
        f"{options.size:,} elements; a copy reaches {bandwidth / 1e9:.0f} GB/s",
        COLUMNS,
        [one.name for one in todo],
        each(ready, todo, "kernels, compiled"),
        lambda one: measure(one, bandwidth, options.repeats),
    )
    x = jnp.asarray(np.random.default_rng(0).standard_normal(options.size, np.float32))
    keep(
        "codecs",
        "Codecs as users call them",
        CODEC_COLUMNS,
        [*CODECS],
        each(lambda codec: ready_codec(codec, x), CODECS.values(), "codecs, compiled"),
        lambda one: measure_codec(one, x.size, options.repeats),
    )
    del x
    parts = [*gpu_parts.parts(options.size)]
    keep(
        "parts",
        "Where the time goes",
        PART_COLUMNS,
        [part.name for part in parts],
        each(ready_part, parts, "parts, compiled"),
        lambda one: measure_part(one, bandwidth, options.repeats),
    )
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

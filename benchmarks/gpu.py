"""Every kernel on a GPU: its bits against the reference, then its speed against a copy.

    python benchmarks/gpu.py --out benchmarks/results/gpu

First each operation runs as a kernel and as compiled by XLA on the GPU, and as compiled by XLA on
the CPU, on buckets of every sort: all must give the same bits. Then each is timed as a kernel and
by XLA, and counted by the bytes that it must move (input once, output once) against the bandwidth
that a copy of the same array reaches; then every codec as users call it.
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import CODECS, KERNEL_CODECS, WORKERS, show
from rich.console import Console
from rich.progress import track

import jaxcomp
from jaxcomp import bits
from jaxcomp.numerics import noise
from jaxcomp.rotate import hadamard

KEY = noise.raw(3)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 1.6)
BLOCKS = (512, 4096, 8192)
LAUNCHES = 10


def inputs(n: int, size: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Gaussian buckets after some of every other sort, and their counts."""
    x = np.random.default_rng(0).standard_normal((n, size), np.float32)
    x[0], x[1, 3], x[4, size // 2 :], x[5, 7], x[6, 1] = 0, np.nan, 0, 1e4, -1e-40
    with np.errstate(under="ignore"):
        x[2], x[3] = x[2] * np.float32(1e30), x[3] * np.float32(1e-40)
    return jnp.asarray(x).astype(dtype), jnp.full(n, size).at[4].set(size // 2)


def operations(n: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each operation as a function of `implementation` and arrays, and the arrays."""
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for width in WIDTHS:
        size = 640 if width == 1.6 else 512
        top = 3 if width == 1.6 else 2 ** int(width)
        codes = np.random.default_rng(1).integers(0, top, (n, size)).astype(np.uint32)
        words = bits.pack(jnp.asarray(codes), bits=width)
        found[f"pack {width}"] = (functools.partial(_pack, width), (codes,))
        found[f"unpack {width}"] = (functools.partial(_unpack, width, size), (words,))
    for name, codec in KERNEL_CODECS.items():
        for dtype in (jnp.float32, jnp.bfloat16):
            x, count = inputs(n, codec.bucket_size or 0, dtype)
            encoded = bits.encode(codec, x, count, KEY, jnp.uint32(0), implementation="reference")
            payloads = [jnp.stack([part] * WORKERS) for part in encoded]
            label = f"{name}, {jnp.dtype(dtype).name}"
            found[f"encode {label}"] = (functools.partial(_encode, codec), (x, count))
            add = functools.partial(_add, codec, jax.ShapeDtypeStruct(x.shape, dtype))
            found[f"sum of 8, {label}"] = (add, (*payloads,))
    for block in BLOCKS:
        buckets = n * 512 // block
        # Without the smallest elements: those below the normal ones a CPU counts as zero.
        x = inputs(buckets, block, jnp.float32)[0].at[3].set(0).at[6, 1].set(0)
        args = (x, *noise.seeds(KEY, jnp.uint32(0), buckets))
        for turn in (hadamard.rotate, hadamard.unrotate):
            run = functools.partial(_turn, turn, block)
            found[f"{turn.__name__}, blocks of {block}"] = (run, args)
    return found


def _pack(width, implementation, codes):
    return bits.pack(codes, bits=width, implementation=implementation)


def _unpack(width, size, implementation, words):
    return bits.unpack(words, bits=width, size=size, implementation=implementation)


def _encode(codec, implementation, x, count):
    return bits.encode(codec, x, count, KEY, jnp.uint32(0), implementation=implementation)


def _add(codec, like, implementation, words, steps):
    return bits.decode_sum(codec, words, steps, like, implementation=implementation)


def _turn(turn, block, implementation, x, high, low):
    scaled = {"down": 1 / block, "up": 8.0}
    return turn(x, high, low, block, **scaled, implementation=implementation)


def check(name: str, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Stops unless the kernel, XLA on the GPU and XLA on the CPU agree bit for bit."""
    cpu = jax.devices("cpu")[0]
    found = {}
    for place, implementation, device in (
        ("the reference on the CPU", "reference", cpu),
        ("the reference on the GPU", "reference", jax.devices()[0]),
        ("the kernel on the GPU", "gpu", jax.devices()[0]),
    ):
        there = jax.device_put(args, device)
        result = jax.jit(functools.partial(run, implementation))(*there)
        found[place] = [np.asarray(leaf) for leaf in jax.tree.leaves(result)]
    want = found.pop("the reference on the CPU")
    for place, got in found.items():
        for one, other in zip(got, want, strict=True):
            unsigned = f"uint{8 * one.dtype.itemsize}"
            bad = one.view(unsigned) != other.view(unsigned)
            if jnp.issubdtype(one.dtype, jnp.floating):  # Any NaN will do.
                nans = np.isnan(one.astype(np.float32)) & np.isnan(other.astype(np.float32))
                bad &= ~nans
            if bad.any():
                raise SystemExit(f"{name}: {bad.sum()} of {bad.size} differ on {place}")


def seconds(run: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> float:
    """Median seconds of one launch, into the buffers of the one before."""
    compiled = jax.jit(lambda held, *rest: run(*rest), donate_argnums=0, keep_unused=True)
    held = jax.block_until_ready(compiled(run(*args), *args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            held = compiled(held, *args)
        jax.block_until_ready(held)
        times.append((time.perf_counter() - start) / LAUNCHES)
    return statistics.median(times)


def moved(run: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Bytes that must move: every input once, every output once."""
    leaves = [*jax.tree.leaves(args), *jax.tree.leaves(jax.eval_shape(run, *args))]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def copy_bandwidth(size: int, repeats: int) -> float:
    x = jnp.ones(size, jnp.float32)
    return 8 * size / seconds(lambda x: x + 1, (x,), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=100_000_000, help="floats in a timed array")
    parser.add_argument("--repeats", type=int, default=11, help="runs a median is taken over")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/gpu"))
    options = parser.parse_args()
    if jax.devices()[0].platform not in ("gpu", "cuda"):
        parser.error(f"this needs a GPU, and JAX has {jax.devices()[0].platform} devices here")
    console, start = Console(), time.perf_counter()
    for name, (run, args) in track(operations(70).items(), "bits", console=console):
        check(name, run, args)
    console.print(f"all bits agree ({time.perf_counter() - start:.0f} s)")

    bandwidth = copy_bandwidth(options.size, options.repeats)
    n = options.size // 512
    rows, kernels = [], {}
    for name, (run, args) in track(operations(n).items(), "kernels", console=console):
        there = jax.device_put(args)
        size = moved(functools.partial(run, "gpu"), there)
        took = {
            how: seconds(functools.partial(run, implementation), there, options.repeats)
            for how, implementation in (("kernel", "gpu"), ("xla", "reference"))
        }
        share = {how: size / spent / bandwidth for how, spent in took.items()}
        kernels[name] = {"bytes": size, "seconds": took, "share_of_copy_bandwidth": share}
        times = [f"{1e6 * took[how]:.0f}" for how in took]
        shares = [f"{100 * share[how]:.0f} %" for how in share]
        rows.append((name, *times, *shares, "kernel" if took["kernel"] < took["xla"] else "XLA"))
    columns = ("operation", "kernel µs", "XLA µs", "kernel / copy", "XLA / copy", "faster")
    title = f"{options.size:,} elements; a copy reaches {bandwidth / 1e9:.0f} GB/s"

    x = jnp.asarray(np.random.default_rng(0).standard_normal(options.size, np.float32))
    like, codecs = jax.ShapeDtypeStruct(x.shape, x.dtype), {}
    for name, codec in track(CODECS.items(), "codecs", console=console):
        encode = functools.partial(jaxcomp.encode, codec, KEY)
        payload = jax.jit(encode)(x)
        decode = functools.partial(lambda c, p: jaxcomp.decode(c, KEY, p, like), codec)
        codecs[name] = {
            "bits": 8 * jaxcomp.wire_bytes(codec, like) / options.size,
            "encode_s": seconds(encode, (x,), 3),
            "decode_s": seconds(decode, (payload,), 3),
        }
        found = codecs[name]
        even = options.size * (32 - found["bits"]) / (found["encode_s"] + found["decode_s"]) / 1e9
        found["break_even_gbps"] = even
        console.print(
            f"{name}: encode {1e3 * found['encode_s']:.2f} ms, decode "
            f"{1e3 * found['decode_s']:.2f} ms, pays below {even:.0f} Gbit/s"
        )
    results = {
        "size": options.size,
        "copy_bytes_per_second": bandwidth,
        "driver": getattr(jax.devices()[0].client, "platform_version", "unknown"),
        "kernels": kernels,
        "codecs": codecs,
    }
    show(title, columns, rows, results, options.out / "kernels.md")
    console.print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()

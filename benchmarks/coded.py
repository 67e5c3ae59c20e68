"""What entropy coding costs and saves beside the same codes at fixed width, on this machine.

    python benchmarks/coded.py

For each pair: encode and decode as multiples of a numpy copy and of the codec of fixed width (in
turns, medians, into warm buffers), bits an element on the wire, and the link speed below which the
bits that are saved take longer than the coding, from one worker to another with nothing else to do.
The input is Gaussian. A capacity leaves some room above the entropy; what did not fit is counted.
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import ours
from harness import median_times, show
from rich.console import Console
from rich.progress import track

import jaxcomp
from jaxcomp.layout import trees
from jaxcomp.numerics import noise
from jaxcomp.transforms.stats import coders_spent

SIZE = 25_000_000
BUCKET = 8192
INF, SHORT = jaxcomp.qsgd_inf(bits=4, bucket_size=BUCKET), jaxcomp.qsgd(bits=4)


def coded(codec: Any, coder: Any, capacity: float) -> Any:
    return jaxcomp.codecs.Coded(codec=codec, coder=coder, capacity=capacity)


PAIRS: dict[str, tuple[Any, Any]] = {
    "qsgd_inf 4-bit, rANS": (INF, coded(INF, jaxcomp.codecs.Rans(), 2.97)),
    "qsgd_inf 4-bit, Huffman": (INF, coded(INF, jaxcomp.codecs.Huffman(), 3.02)),
    "qsgd 4-bit, Elias omega": (SHORT, coded(SHORT, jaxcomp.codecs.Elias(), 2.2)),
    "qsgd 4-bit, Elias omega of gaps": (
        SHORT,
        coded(SHORT, jaxcomp.codecs.Elias(sparse=True), 2.2),
    ),
    "qsgd 4-bit, Rice": (SHORT, coded(SHORT, jaxcomp.codecs.Rice(), 1.6)),
    "nuqsgd 4-bit, Huffman": (
        jaxcomp.nuqsgd(bits=4),
        coded(jaxcomp.nuqsgd(bits=4), jaxcomp.codecs.Huffman(), 3.2),
    ),
    "eden 4-bit, ecsq 3.75 bits": (jaxcomp.eden(bits=4), jaxcomp.ecsq(bits=3.75)),
}
"""Of a name: the codec of fixed width, and the coded one."""


def lost(codec: Any, x: jax.Array) -> tuple[float, float]:
    """Bits an element that stayed empty, and the share of the elements that did not fit."""
    plan = trees.layout(codec, x)

    def spent(x: jax.Array) -> Any:
        stacks, _ = trees.stacks(plan, x)
        found = []
        for number, (batch, rows) in enumerate(zip(plan.batches, stacks, strict=True)):
            key = trees.batch_key(noise.raw(0), number, 0)
            state = batch.codec.init(batch.like)
            found.append(batch.codec.encode(key, rows, batch.counts(), state)[1])
        return coders_spent(found)

    spare, left = jax.jit(spent)(x)
    return 8 * float(spare) / x.size, float(left) / x.size


def measure(fixed: Any, other: Any, data: np.ndarray, repeats: int) -> dict[str, Any]:
    target = np.empty_like(data)
    plain, entropy = ours(fixed)(data), ours(other)(data)
    found: dict[str, Any] = {"bits": entropy.bits, "fixed_bits": plain.bits}
    extra = 0.0
    for name in ("encode", "decode"):
        runs = [lambda: np.copyto(target, data), plain.runs[name], entropy.runs[name]]
        copy, before, after = median_times(runs, repeats)
        found |= {name: after / copy, f"{name}_fixed": before / copy, f"{name}_s": after}
        extra += after - before
    found["spare"], found["lost"] = lost(other, jnp.asarray(data))
    saved = (plain.bits - entropy.bits) * data.size
    found["pays_below_mbps"] = saved / extra / 1e6
    return found


COLUMNS = (
    "codec",
    "bits",
    "bits at fixed width",
    "room left",
    "did not fit",
    "encode / copy",
    "fixed",
    "decode / copy",
    "fixed",
    "ns a float, both ways",
    "pays below, Mbit/s",
)


def row(name: str, found: dict[str, Any], size: int) -> tuple[str, ...]:
    return (
        name,
        f"{found['bits']:.3f}",
        f"{found['fixed_bits']:.3f}",
        f"{found['spare']:.3f}",
        f"{found['lost']:.2g}",
        f"{found['encode']:.1f}",
        f"{found['encode_fixed']:.2f}",
        f"{found['decode']:.1f}",
        f"{found['decode_fixed']:.2f}",
        f"{1e9 * (found['encode_s'] + found['decode_s']) / size:.1f}",
        f"{found['pays_below_mbps']:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=SIZE, help="floats")
    parser.add_argument("--repeats", type=int, default=5, help="runs a median is taken over")
    parser.add_argument("--codec", nargs="+", choices=PAIRS, default=list(PAIRS), metavar="NAME")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/coded"))
    options = parser.parse_args()
    if min(options.size, options.repeats) < 1:
        parser.error("--size and --repeats must be positive")
    data = np.random.default_rng(0).standard_normal(options.size, np.float32)
    console, results = Console(), {}
    for name in track(options.codec, "pairs", console=console, transient=True):
        results[name] = measure(*PAIRS[name], data, options.repeats)
    rows = [row(name, found, options.size) for name, found in results.items()]
    title = f"{options.size:,} Gaussian floats, coded and at fixed width"
    show(title, COLUMNS, rows, {"pairs": results}, options.out / "coded.md")


if __name__ == "__main__":
    main()

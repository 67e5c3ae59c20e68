"""Compares entropy coding with the same codes at fixed width, in time and in bits.

    python benchmarks/coded.py

For each pair the program times encode and decode as multiples of a numpy copy, in turns with the
codec of fixed width, into warm buffers. It counts bits an element on the wire, and the link speed
below which the saved bits take longer than the coding, from one worker to another that have nothing
else to do. The input is Gaussian. A capacity leaves some room above the entropy; elements that did
not fit are counted.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
import timing
from contenders import ours
from rich.progress import track

import jaxcomp
from jaxcomp import codecs
from jaxcomp.layout import batches as batches_, trees
from jaxcomp.numerics import noise
from jaxcomp.transforms.stats import coders_spent

SIZE = 25_000_000
BUCKET = 8192
INF, SHORT = jaxcomp.qsgd_inf(bits=4, bucket_size=BUCKET), jaxcomp.qsgd(bits=4)


def coded(codec: Any, coder: Any, capacity: float) -> Any:
    return codecs.Coded(codec=codec, coder=coder, capacity=capacity)


NON_UNIFORM = jaxcomp.nuqsgd(bits=4)
PAIRS: dict[str, tuple[Any, Any]] = {
    "qsgd_inf 4-bit, rANS": (INF, coded(INF, codecs.Rans(), 2.97)),
    "qsgd_inf 4-bit, Huffman": (INF, coded(INF, codecs.Huffman(), 3.02)),
    "qsgd 4-bit, Elias omega": (SHORT, coded(SHORT, codecs.Elias(), 2.2)),
    "qsgd 4-bit, Elias omega of gaps": (SHORT, coded(SHORT, codecs.Elias(sparse=True), 2.2)),
    "qsgd 4-bit, Rice": (SHORT, coded(SHORT, codecs.Rice(), 1.6)),
    "nuqsgd 4-bit, Huffman": (NON_UNIFORM, coded(NON_UNIFORM, codecs.Huffman(), 3.2)),
    "eden 4-bit, ecsq 3.75 bits": (jaxcomp.eden(bits=4), jaxcomp.ecsq(bits=3.75)),
}
"""Of a name: the codec of fixed width, and the coded one."""


def lost(codec: Any, x: jax.Array) -> tuple[float, float]:
    """Unused bits an element, and the fraction of the elements that did not fit."""
    plan = trees.layout(codec, x)

    def spent(x: jax.Array) -> Any:
        stacks, _ = trees.stacks(plan, x)
        found = []
        for number, (batch, rows) in enumerate(zip(plan.batches, stacks, strict=True)):
            key = batches_.batch_key(noise.raw(0), number, 0)
            state = batch.codec.init(batch.like)
            found.append(batch.codec.encode(key, rows, batch.counts(), state)[1])
        return coders_spent(found)

    spare, left = jax.jit(spent)(x)
    return 8 * float(spare) / x.size, float(left) / x.size


def measure(fixed: Any, other: Any, data: np.ndarray, repeats: int) -> dict[str, Any]:
    plain, entropy = ours(fixed)(data), ours(other)(data)
    found: dict[str, Any] = {"bits": entropy.bits, "fixed_bits": plain.bits}
    extra = 0.0
    for name in ("encode", "decode"):
        runs = {"fixed": plain.runs[name], "coded": entropy.runs[name]}
        took = timing.in_turns({"copy": timing.copy_of(data), **runs}, repeats)
        copy, before, after = (seconds.median for seconds in took.values())
        found |= {name: after / copy, f"{name}_fixed": before / copy, f"{name}_s": after}
        extra += after - before
    found["spare"], found["lost"] = lost(other, jnp.asarray(data))
    found["pays_below_mbps"] = (plain.bits - entropy.bits) * data.size / extra / 1e6
    return found


COLUMNS = (
    "codec {name} | bits {bits:.3f} | bits at fixed width {fixed_bits:.3f} | "
    "room left {spare:.3f} | did not fit {lost:.2g} | encode / copy {encode:.1f} | "
    "fixed {encode_fixed:.2f} | decode / copy {decode:.1f} | fixed {decode_fixed:.2f} | "
    "ns a float, both ways {each:.1f} | pays below, Mbit/s {pays_below_mbps:.0f}"
)


def main() -> None:
    options = reporting.options(
        __doc__,
        "out/coded",
        size=(SIZE, "floats"),
        repeats=(5, "runs that a median is taken over"),
        codec=(PAIRS, "some of the pairs"),
    )
    data = np.random.default_rng(0).standard_normal(options.size, np.float32)
    chosen = track(options.codec, "pairs", transient=True)
    results = {name: measure(*PAIRS[name], data, options.repeats) for name in chosen}
    records = [
        {**found, "name": name, "each": 1e9 * (found["encode_s"] + found["decode_s"]) / data.size}
        for name, found in results.items()
    ]
    title = f"{options.size:,} Gaussian floats, coded and at fixed width"
    reporting.show(
        reporting.Table(title, COLUMNS, records), {"pairs": results}, options.out / "coded.md"
    )


if __name__ == "__main__":
    main()

"""Draws up to which link speed compressing pays, for 8 to 4,096 workers: a picture for the docs.

    python benchmarks/network/beyond.py --out docs/break_even.png

On the left codecs take as long as they do on this machine. On the right stands what an accelerator
would make of it whose kernels run at 80 % of a memory bandwidth of 3.35 TB/s, an H100's: every
element is read and its code written once to encode, and the other way round to decode. That is an
assumption: nothing was timed there.
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import jaxcomp
from jaxcomp import measuring, planning
from jaxcomp.theory import cost

WORKERS = [2**k for k in range(3, 13)]
SIDE = 5000
LATENCY = 20e-6
BANDWIDTH = 0.8 * 3.35e12
SPEEDS = (1, 10, 100, 400)
Q4, SIGN = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4)), jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
Q8 = jaxcomp.Link(jaxcomp.qsgd_inf(bits=8))
WAYS: dict[str, Any] = {
    "8 bits, two shots": jaxcomp.TwoShot(Q8, Q8),
    "4 bits, two shots": jaxcomp.TwoShot(Q4, Q4),
    "sign, two shots": jaxcomp.TwoShot(SIGN, SIGN),
    "4 bits, gathered": jaxcomp.Gather(Q4),
    "sign, gathered": jaxcomp.Gather(SIGN),
    "top_k 1 %, gathered": jaxcomp.Cheapest(jaxcomp.top_k(fraction=0.01)),
    "sidco 0.1 %, gathered": jaxcomp.Cheapest(jaxcomp.sidco(fraction=0.001)),
}


def accelerator(way: Any) -> measuring.Measured:
    """What the memory of an accelerator allows, an element; a residual is read and written too."""
    if isinstance(way, jaxcomp.Dense):
        both = 2 * (4 + 2) / BANDWIDTH if way.dtype else 0.0
        return measuring.Measured(1, both, 0.0, 0.0, 0.0)
    code = jaxcomp.wire_bytes(way.codec, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)) / SIDE**2
    memory = 12 if isinstance(way.feedback, jaxcomp.Residual) else 0
    encode, decode = ((4 + code + extra) / BANDWIDTH for extra in (memory, 0))
    return measuring.Measured(1, encode + decode, decode, code / BANDWIDTH, 0.0)


def edges(clock: planning.Clock) -> dict[str, list[float]]:
    """By way, the break-even speed against bfloat16 for each number of workers, in bits."""
    like = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for n in WORKERS:
        dense, _ = planning.price(jaxcomp.Dense("bfloat16"), like, (n,), clock)
        for name, way in WAYS.items():
            price, _ = planning.price(way, like, (n,), clock)
            found[name].append(8 * cost.break_even(dense, price, latency=LATENCY))
    return found


def draw(axes: Any, found: dict[str, list[float]], title: str) -> None:
    for name, speeds in found.items():
        known = [(n, speed) for n, speed in zip(WORKERS, speeds, strict=True) if speed > 0]
        if not known:
            axes.loglog([], [], marker="x", label=f"{name}: never")
            continue
        line = axes.loglog(*zip(*known, strict=True), marker="o", markersize=3, label=name)
        if len(known) < len(WORKERS):  # From there on it sends more than bfloat16 does.
            axes.plot(*known[-1], marker="x", markersize=9, color=line[0].get_color())
    for gbit in SPEEDS:
        axes.axhline(1e9 * gbit, color="grey", linewidth=0.7, linestyle=":")
        axes.text(
            WORKERS[-1], 1.05e9 * gbit, f"{gbit} Gbit/s", ha="right", color="grey", fontsize=8
        )
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("workers")
    axes.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/break_even.png"))
    path = parser.parse_args().out
    here = edges(lambda way: measuring.measure(way, SIDE**2))
    there = edges(accelerator)
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    draw(left, here, "two CPU cores, as measured")
    draw(right, there, "an accelerator of 3.35 TB/s, if kernels run at 80 % of it (assumed)")
    left.set_ylabel("link, bits a second, below which it beats bfloat16")
    right.legend(fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    for name in WAYS:
        print(name, [f"{speed / 1e9:.3g}" for speed in here[name]], end=" ")
        print([f"{speed / 1e9:.3g}" for speed in there[name]])


if __name__ == "__main__":
    main()

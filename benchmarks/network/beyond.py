"""Draws where compression pays, for 8 to 4,096 workers at 1 to 400 Gbit/s.

    python benchmarks/network/beyond.py

In the upper row codecs take as long as they do on this machine. The lower one is what an
accelerator would make of it whose kernels run at 80 % of a memory bandwidth of 3.35 TB/s, an
H100's: every element is read and its code written once to encode, and the other way round to
decode. That is an assumption: nothing was timed there. `beyond.json` beside `beyond.png` has the
price of each mean and the speed of a link below which it pays.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tables import reporting

import jaxcomp
from jaxcomp.planning import kept, planner, timing
from jaxcomp.theory import cost

# isort: split
import pictures  # pyright: ignore[reportMissingImports]

WORKERS = [2**k for k in range(3, 13)]
SPEEDS = np.geomspace(1e9, 400e9, 60) / 8
"""Of the link, in bytes a second."""
SIDE = 5000
LATENCY = 20e-6
BANDWIDTH = 0.8 * 3.35e12
BASE = "dense bfloat16"
Q4, SIGN = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4)), jaxcomp.Link(jaxcomp.sign(), jaxcomp.Residual())
WAYS: dict[str, Any] = {
    "4 bits, two shots": jaxcomp.TwoShot(Q4, Q4),
    "sign, two shots": jaxcomp.TwoShot(SIGN, SIGN),
    "4 bits, gathered": jaxcomp.Gather(Q4),
    "top_k 1 %, gathered": jaxcomp.top_k(fraction=0.01),
}
COLOURS = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 2, 1 / 1.1, 1.1, 2, 4, 8, 16])
"""Edges of the colours; what is within a tenth of bfloat16 is white."""


def accelerator(way: Any) -> timing.Measured:
    """Seconds an element at the memory bandwidth; a residual is read and written too."""
    if isinstance(way, jaxcomp.Dense):
        both = 2 * (4 + 2) / BANDWIDTH if way.dtype else 0.0
        return timing.Measured(1, both, 0.0, 0.0, 0.0)
    code = jaxcomp.wire_bytes(way.codec, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)) / SIDE**2
    memory = 12 if isinstance(way.feedback, jaxcomp.Residual) else 0
    encode, decode = ((4 + code + extra) / BANDWIDTH for extra in (memory, 0))
    return timing.Measured(1, encode + decode, decode, code / BANDWIDTH, 0.0)


def prices(clock: kept.Clock) -> dict[str, list[cost.Price]]:
    """By method, the cost of a mean for each number of workers."""
    like = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    ways = {BASE: jaxcomp.Dense("bfloat16"), **WAYS}
    return {
        name: [planner.price(way, like, (n,), clock)[0] for n in WORKERS]
        for name, way in ways.items()
    }


def gains(found: dict[str, list[cost.Price]], name: str) -> np.ndarray:
    """The speed of a mean relative to bfloat16, `[speeds, workers]`."""

    def seconds(name: str) -> np.ndarray:
        links = [cost.Network(float(speed), LATENCY) for speed in SPEEDS]
        return np.array([[price.seconds(link) for price in found[name]] for link in links])

    return seconds(BASE) / seconds(name)


def told(found: dict[str, list[cost.Price]], name: str) -> list[dict[str, Any]]:
    """For each number of workers, the price of a way and the link speed below which it pays.

    The speed is in bits a second, and null if the way pays at any speed.
    """
    edges = [
        8 * cost.break_even(dense, price, latency=LATENCY)
        for dense, price in zip(found[BASE], found[name], strict=True)
    ]
    return [
        {"workers": n, **dataclasses.asdict(price), "pays_below": edge if edge < math.inf else None}
        for n, price, edge in zip(WORKERS, found[name], edges, strict=True)
    ]


def read(rows: dict[str, Any]) -> dict[str, dict[str, list[cost.Price]]]:
    """The prices, from the rows of `beyond.json`."""
    return {
        label: {
            name: [cost.Price(one["bytes"], one["rounds"], one["work"]) for one in told]
            for name, told in found.items()
        }
        for label, found in rows.items()
    }


def draw(axes: Any, gain: np.ndarray) -> Any:
    style = {"cmap": "RdBu", "norm": LogNorm(1 / 16, 16), "extend": "both"}
    colours = axes.contourf(WORKERS, 8 * SPEEDS / 1e9, gain, COLOURS, **style)
    axes.contour(WORKERS, 8 * SPEEDS / 1e9, gain, [1.0], colors="black", linewidths=2)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks([16, 128, 1024], ["16", "128", "1,024"])
    axes.set_yticks([1, 10, 100, 400], ["1", "10", "100", "400"])
    axes.minorticks_off()
    axes.grid(visible=False)
    return colours


def sentence(found: dict[str, dict[str, np.ndarray]]) -> str:
    """The message: how the first way does, and for how many workers a gather pays."""
    first = next(iter(WAYS))
    least = min(gain[first].min() for gain in found.values())
    gathers = [gain[name] for gain in found.values() for name in WAYS if "gathered" in name]
    pays = [n for n, at in zip(WORKERS, np.max(gathers, axis=(0, 1)), strict=True) if at > 1]
    speed = "faster than" if least > 1 else f"at least {least:.2f} times as fast as"
    codec, _, kind = first.partition(", ")
    return (
        f"By the model {kind} of {codec} are {speed} bfloat16 at every size and speed; gathers pay "
        f"for at most {max(pays, default=0):,} workers"
    )


def picture(rows: dict[str, dict[str, list[cost.Price]]], elements: int) -> Figure:
    """A row of panels for each device, a column for each way."""
    found = {label: {name: gains(prices, name) for name in WAYS} for label, prices in rows.items()}
    detail = (
        f"A mean of {elements / 1e6:g} million elements by {WORKERS[0]} to {WORKERS[-1]:,} "
        "workers: blue is faster than dense bfloat16, red slower, black break-even. Above: "
        "codecs as on two CPU cores. Below: on an assumed accelerator, at 80 % of 3.35 TB/s."
    )
    figure, grid = pictures.page(
        sentence(found), detail, 2, len(WAYS), 4.3, sharex=True, sharey=True
    )
    colours: Any = None
    for line, (label, gain) in zip(grid, found.items(), strict=True):
        for axes, name in zip(line, WAYS, strict=True):
            colours = draw(axes, gain[name])
        line[0].set_ylabel(f"{label.partition(',')[0]}\nGbit/s of a link")
    for axes, name in zip(grid[0], WAYS, strict=True):
        axes.set_title(name)
    for axes in grid[-1]:
        axes.set_xlabel("workers")
    ticks = {2.0**k: f"1/{2**-k}" if k < 0 else f"{2**k}" for k in range(-4, 5)}
    label = "times as fast as bfloat16"
    bar = figure.colorbar(
        colours, ax=grid, ticks=list(ticks), label=label, location="bottom", aspect=60, pad=0.02
    )
    bar.ax.set_xticklabels(list(ticks.values()))
    return figure


def main() -> None:
    options = reporting.options(__doc__, "out/network", side=(SIDE, "of the matrix"))
    elements = options.side**2
    rows = {
        "two CPU cores, as measured": prices(lambda way: timing.measure(way, elements)),
        "an accelerator of 3.35 TB/s, kernels at 80 % of it (assumed)": prices(accelerator),
    }
    pictures.save(picture(rows, elements), options.out / "beyond.png")
    where = reporting.environment()
    results = {
        "environment": {name: where[name] for name in ("jaxcomp", "jax", "device", "cores")},
        "elements": elements,
        "latency": LATENCY,
        "rows": {
            label: {name: told(found, name) for name in found} for label, found in rows.items()
        },
    }
    reporting.keep(options.out / "beyond.json", results)


if __name__ == "__main__":
    main()

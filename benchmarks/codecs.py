"""How fast the codecs are on this machine, against a copy of the same array in the same run.

    make bench

For each codec, and for the peers that are installed (`pip install 'jaxcomp[peers]'`): encode,
decode, decode and sum of eight payloads, as ratios to a numpy copy, all into warm buffers (medians,
taken in turns with the copy); the sum as a ratio to writing an array of zeros too, without which no
sum of sparse payloads can be, both into warm memory and both into memory that is mapped anew; bits
an element as they would be sent; relative squared error; and the link speed below which sending the
payload beats sending float32 from one worker to another, had they nothing else to do. The input is
Gaussian, or Gaussian in blocks of 4,096 whose scales are lognormal (σ = 1.5), as layers of a
network differ.

`--codec eighths` measures sums of payloads of 0.125 %, and `--codec buckets` top-k in buckets
beside `lax.top_k`.
"""

import argparse
import gc
import pathlib
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from codecs_plot import plot
from contenders import GROUPS, Contender, Prepared, contenders, into_fresh, into_warm
from harness import median_times, show
from rich.console import Console
from rich.progress import track

MAIN = 25_000_000
SIZES = (1_000_000, MAIN, 100_000_000)
LAWS = ("gaussian", "blocks")
BLOCK = 4096


def draw(law: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    scale = rng.lognormal(0, 1.5, -(-size // BLOCK)).astype(np.float32)
    data = rng.standard_normal(size, np.float32)
    if law == "blocks":
        data *= np.repeat(scale, BLOCK)[:size]
    return data


def measure(prepared: Prepared, data: np.ndarray, repeats: int) -> dict[str, Any]:
    target = np.empty_like(data)

    def zeros() -> Any:
        return jnp.zeros(data.shape, data.dtype)

    blanks = {"decode_sum_8": into_warm(zeros, data), "fresh_sum_8": into_fresh(zeros)}
    found: dict[str, Any] = {"bits": prepared.bits}
    for name, run in prepared.runs.items():
        run()
        start = time.perf_counter()
        run()
        # What takes seconds need not be run often: a copy beside it takes milliseconds.
        turns = max(3, min(repeats, int(5 / (time.perf_counter() - start))))
        beside = [blanks[name]] if name in blanks else []
        runs = [lambda: np.copyto(target, data), run, *beside]
        copy, took, *blank = median_times(runs, turns)
        if blank:
            found[f"{name}_zeros"], found[f"{name}_zeros_ms"] = took / blank[0], blank[0] * 1e3
        found[name], found[f"{name}_ms"], found["copy_ms"] = took / copy, took * 1e3, copy * 1e3
    error = prepared.decoded() - data
    found["nmse"] = float(np.vdot(error, error) / np.vdot(data, data))
    saved = data.size * (32 - prepared.bits)
    spent = found["encode_ms"] + found.get("decode_ms", 0)
    found["break_even_gbps"] = saved / spent / 1e6
    return found


def run(
    named: dict[str, Contender], laws: list[str], sizes: list[int], repeats: int
) -> dict[str, Any]:
    """`results[law][size][name]`; laws differ in the error alone, so other sizes take one."""
    results: dict[str, Any] = {law: {} for law in LAWS}
    todo = [(law, size) for size in sizes for law in laws if law == LAWS[0] or size == MAIN]
    console = Console()
    for law, size in todo:
        data = draw(law, size)
        rows = results[law][str(size)] = {}
        for name in track(named, f"{law}, {size:,} floats", console=console, transient=True):
            rows[name] = measure(named[name](data), data, repeats)
            gc.collect()
        console.print(f"{law}, {size:,} floats: done")
    return results


COLUMNS = (
    "codec",
    "encode / copy",
    "decode / copy",
    "sum of 8 / copy",
    "sum of 8 / zeros",
    "both mapped anew",
    "encode, ns a float",
    "bits",
    "error, Gaussian",
    "error, blocks",
    "break-even Gbit/s",
)


TIMES = ("encode", "decode", "decode_sum_8", "decode_sum_8_zeros", "fresh_sum_8_zeros")


def table(results: dict[str, Any], sizes: list[int]) -> list[tuple[str, ...]]:
    main = str(MAIN if MAIN in sizes else sizes[-1])
    gaussian = results["gaussian"]
    rows = []
    for name, row in gaussian[main].items():
        times = [f"{row[time]:.2f}" if time in row else "" for time in TIMES]
        each = [1e6 * gaussian[size][name]["encode_ms"] / int(size) for size in gaussian]
        blocks = results["blocks"].get(main, {}).get(name)
        even = f"{row['break_even_gbps']:.1f}" if row["bits"] < 32 else "never"
        rows.append(
            (
                name,
                *times,
                " / ".join(f"{nanoseconds:.2f}" for nanoseconds in each),
                f"{row['bits']:.3f}",
                f"{row['nmse']:.3g}",
                f"{blocks['nmse']:.3g}" if blocks else "",
                even,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, nargs="+", default=list(SIZES), help="floats")
    parser.add_argument("--law", nargs="+", choices=LAWS, default=list(LAWS), help="of the input")
    parser.add_argument("--repeats", type=int, default=11, help="runs a median is taken over")
    parser.add_argument("--codec", nargs="+", metavar="NAME", help="some of them, or a group")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/bench"))
    options = parser.parse_args()
    if min(options.size) < 1 or options.repeats < 1:
        parser.error("--size and --repeats must be positive")
    named, missing = contenders()
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}")
    groups = GROUPS | {name: {name: contender} for name, contender in named.items()}
    for name in options.codec or ():
        if name not in groups:
            parser.error(f"argument --codec: must be one of {', '.join(groups)}, got {name!r}")
    some = [groups[name] for name in options.codec or named]
    named = {name: contender for group in some for name, contender in group.items()}
    results = run(named, options.law, options.size, options.repeats)
    main_size = MAIN if MAIN in options.size else options.size[-1]
    sizes = " / ".join(f"{size:,}" for size in options.size)
    title = f"{main_size:,} floats, as multiples of a copy; nanoseconds a float at {sizes}"
    path = options.out / "codecs.md"
    show(title, COLUMNS, table(results, options.size), {"laws": results}, path)
    plot(results, str(main_size), path.with_suffix(".png"))
    print(f"drawn to {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()

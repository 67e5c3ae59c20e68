"""Times the codecs on this machine beside a copy of the same array in the same run.

    make bench

The program takes every codec and the peers that are installed (`pip install 'jaxcomp[peers]'`). It
times encode, decode, and decode and sum of eight payloads as ratios to a numpy copy, in turns with
it, into warm buffers. A sum of sparse payloads has to write an array of zeros first: the sum is
compared with that too, into warm memory and into memory that is mapped anew. The other columns are
bits an element as sent, relative squared error, and the link speed below which sending the payload
beats sending float32 from one worker to another that have nothing else to do. The input is
Gaussian, or Gaussian in blocks of 4,096 whose scales are lognormal (σ = 1.5), as layers differ.

`--codec eighths` measures sums of payloads of 0.125 %, `--codec buckets` top-k in buckets beside
`lax.top_k`. `--runs 9` measures everything nine times and writes how much the runs scatter.
"""

import gc
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import reporting
import timing
from codecs_plot import plot
from contenders import GROUPS, Contender, Prepared, contenders
from rich.console import Console
from rich.progress import track

MAIN = 25_000_000
SIZES = [1_000_000, MAIN, 100_000_000]
BLOCK, SECONDS = 4096, 5.0
LAWS = {"gaussian": "Gaussian", "blocks": "in blocks"}
Rows = dict[str, dict[str, Any]]


def draw(law: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    scale = rng.lognormal(0, 1.5, -(-size // BLOCK)).astype(np.float32)
    data = rng.standard_normal(size, np.float32)
    if law == "blocks":
        data *= np.repeat(scale, BLOCK)[:size]
    return data


def measure(prepared: Prepared, data: np.ndarray, repeats: int) -> dict[str, Any]:
    def zeros() -> Any:
        return jnp.zeros(data.shape, data.dtype)

    blanks = {"decode_sum_8": timing.into_warm(zeros), "fresh_sum_8": timing.into_fresh(zeros)}
    found: dict[str, Any] = {"bits": prepared.bits}
    for name, run in prepared.runs.items():
        # Slow work is timed less often: a copy next to it takes milliseconds.
        turns = {"copy": timing.copy_of(data), "run": run}
        turns |= {"zeros": blanks[name]} if name in blanks else {}
        took = timing.in_turns(turns, repeats, within=SECONDS)
        copy, own = took["copy"].median, took["run"]
        if "zeros" in took:
            found[f"{name}_zeros"] = own.median / took["zeros"].median
            found[f"{name}_zeros_ms"] = 1e3 * took["zeros"].median
        found |= {name: own.median / copy, f"{name}_ms": 1e3 * own.median, "copy_ms": 1e3 * copy}
        found[f"{name}_range_ms"] = [1e3 * own.least, 1e3 * own.most]
    error = prepared.decoded() - data
    found["nmse"] = float(np.vdot(error, error) / np.vdot(data, data))
    spent = found["encode_ms"] + found.get("decode_ms", 0)
    found["break_even_gbps"] = data.size * (32 - prepared.bits) / spent / 1e6
    return found


def run(named: dict[str, Contender], laws: list[str], sizes: list[int], repeats: int) -> Any:
    """`results[law][size][name]`; laws differ only in the error, so other sizes have one law."""
    results: dict[str, Any] = {law: {} for law in LAWS}
    console = Console()
    for law, size in [(law, s) for s in sizes for law in laws if law == "gaussian" or s == MAIN]:
        data = draw(law, size)
        rows = results[law][str(size)] = {}
        for name in track(named, f"{law}, {size:,} floats", console=console, transient=True):
            rows[name] = measure(named[name](data), data, repeats)
            gc.collect()
    return results


COLUMNS = (
    "codec {name} | encode / copy {encode:.2f} | decode / copy {decode:.2f} | "
    "sum of 8 / copy {decode_sum_8:.2f} | sum of 8 / zeros {decode_sum_8_zeros:.2f} | "
    "both mapped anew {fresh_sum_8_zeros:.2f} | encode, ns a float {each} | bits {bits:.3f} | "
    "error, Gaussian {nmse:.3g} | error, blocks {blocks[nmse]:.3g} | break-even Gbit/s {even}"
)


def records(results: Any, main: str) -> list[dict[str, Any]]:
    gaussian, blocks = results["gaussian"], results["blocks"].get(main, {})
    return [
        {
            **row,
            "name": name,
            "each": " / ".join(
                f"{1e6 * gaussian[size][name]['encode_ms'] / int(size):.2f}" for size in gaussian
            ),
            "even": f"{row['break_even_gbps']:.1f}" if row["bits"] < 32 else "never",
            **({"blocks": blocks[name]} if name in blocks else {}),
        }
        for name, row in gaussian[main].items()
    ]


SCATTER = (
    "codec {name} | runs {runs} | "
    "encode, median run {encode[0]:.2f} | from {encode[1]:.2f} | to {encode[2]:.2f} | "
    "decode, median run {decode[0]:.2f} | from {decode[1]:.2f} | to {decode[2]:.2f}"
)
KEPT = [
    "encode",
    "decode",
    "encode_ms",
    "decode_ms",
    "copy_ms",
    "fresh_sum_8_ms",
    "fresh_sum_8_zeros_ms",
]


def scatter(several: list[Rows], size: int, repeats: int, path: pathlib.Path) -> None:
    """Writes how ratios differ from run to run."""
    runs = {
        name: [{key: rows[name][key] for key in KEPT if key in rows[name]} for rows in several]
        for name in several[0]
    }
    records = []
    for name, some in runs.items():
        row: dict[str, Any] = {"name": name, "runs": len(some)}
        for key in ("encode", "decode"):
            found = [one[key] for one in some if key in one]
            row |= {key: timing.spread(found)} if found else {}
        records.append(row)
    title = f"{size:,} floats, as multiples of a copy: {len(several)} runs, medians of {repeats}"
    results = {"elements": size, "repeats": repeats, "runs": runs}
    reporting.show(reporting.Table(title, SCATTER, records), results, path)


def main() -> None:
    named, missing = contenders()
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}")
    groups = {name: {name: contender} for name, contender in named.items()} | GROUPS
    options = reporting.options(
        __doc__,
        "out/bench",
        size=(SIZES, "floats"),
        law=(LAWS, "of the input"),
        repeats=(11, "runs that a median is taken over"),
        runs=(1, "times that everything is measured"),
        codec=(groups, "some of them, or a group (default: all but the groups)"),
    )
    chosen = named if options.codec == list(groups) else options.codec
    named = {name: one for group in chosen for name, one in groups[group].items()}
    several = [run(named, options.law, options.size, options.repeats) for _ in range(options.runs)]
    results, main = several[-1], MAIN if MAIN in options.size else options.size[-1]
    sizes = " / ".join(f"{size:,}" for size in options.size)
    title = f"{main:,} floats, as multiples of a copy; nanoseconds a float at {sizes}"
    table = reporting.Table(title, COLUMNS, records(results, str(main)))
    reporting.show(table, {"laws": results}, options.out / "codecs.md")
    plot(results, str(main), options.out / "codecs.png")
    if options.runs > 1:
        rows = [each["gaussian"][str(main)] for each in several]
        scatter(rows, main, options.repeats, options.out / "scatter.md")


if __name__ == "__main__":
    main()

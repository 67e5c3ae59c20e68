"""What the benchmarks share: the codecs, the clock and the environment."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import jaxcomp

WORKERS = 8
CODECS = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf 8-bit": jaxcomp.qsgd_inf(bits=8),
    "qsgd 4-bit": jaxcomp.qsgd(bits=4),
    "blockwise 4-bit": jaxcomp.blockwise(bits=4),
    "blockwise 8-bit": jaxcomp.blockwise(bits=8),
    "qsgd_inf 4-bit, subtractive": jaxcomp.qsgd_inf(bits=4, levels="midrise", subtractive=True),
    "nuqsgd 4-bit": jaxcomp.nuqsgd(bits=4),
    "natural_dithering 4-bit": jaxcomp.natural_dithering(bits=4),
    "natural 9-bit": jaxcomp.natural(),
    "alq 4-bit": jaxcomp.alq(bits=4),
    "mxfp4": jaxcomp.mx("mxfp4"),
    "nvfp4": jaxcomp.mx("nvfp4"),
    "eden 4-bit": jaxcomp.eden(bits=4),
    "drive": jaxcomp.drive(),
    "ndsc 4-bit": jaxcomp.ndsc(bits=4),
    "sign": jaxcomp.sign(),
    "terngrad": jaxcomp.terngrad(),
    "threshold_ternary, heuristic": jaxcomp.threshold_ternary("heuristic"),
    "random_k 10 %": jaxcomp.random_k(fraction=0.1),
    "cast bfloat16": jaxcomp.cast("bfloat16"),
    "cast float8_e4m3fn": jaxcomp.cast("float8_e4m3fn"),
    "top_k 1 %": jaxcomp.top_k(fraction=0.01),
    "top_k 0.1 %": jaxcomp.top_k(fraction=0.001),
    "top_k 1 %, 4-bit values": jaxcomp.top_k(
        fraction=0.01, values=jaxcomp.qsgd_inf(bits=4, bucket_size=128)
    ),
    "sidco 1 %": jaxcomp.sidco(fraction=0.01),
    "sidco 0.1 %": jaxcomp.sidco(fraction=0.001),
    "sidco 0.1 %, pareto": jaxcomp.sidco(fraction=0.001, law="pareto"),
    "dgc 1 %": jaxcomp.dgc(fraction=0.01),
    "dgc 0.1 %": jaxcomp.dgc(fraction=0.001),
    "threshold 2.6": jaxcomp.threshold(2.6, fraction=0.012),
}

KERNEL_CODECS = {
    "qsgd_inf 4-bit": jaxcomp.qsgd_inf(bits=4),
    "qsgd_inf 8-bit": jaxcomp.qsgd_inf(bits=8),
    "qsgd 3-bit": jaxcomp.qsgd(bits=3),
    "nuqsgd 4-bit": jaxcomp.nuqsgd(bits=4),
    "qsgd_inf 3-bit, mid-rise": jaxcomp.qsgd_inf(bits=3, levels="midrise"),
    "sign": jaxcomp.sign(),
    "terngrad, buckets of 640": jaxcomp.terngrad(bucket_size=640),
}
"""One for each scale, rounding, and way of packing."""


def median_times(runs: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Seconds of each, in turns, so that whatever slows the machine down slows all of them."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 2):
        for run, found in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if turn >= 2:  # The first two warm up: pages are mapped, programs compiled.
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def environment() -> dict[str, Any]:
    """Where a result comes from; `malloc` if JAX's buffers lie in huge pages, as numpy's do."""
    device = jax.devices()[0]
    tuned = [part for part in os.environ.get("GLIBC_TUNABLES", "").split(":") if "malloc" in part]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind,
        "platform": device.platform,
        "cores": os.cpu_count(),
        "jaxcomp": jaxcomp.__version__,
        **({"malloc": ", ".join(tuned)} if tuned else {}),
    }


def show(
    title: str,
    columns: tuple[str, ...],
    rows: list[tuple[str, ...]],
    results: dict[str, Any],
    path: Path,
) -> None:
    """Prints a table, and writes it as Markdown, with everything measured as JSON beside it."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    needed = Console(width=1000).measure(table).maximum  # In less, cells are cut.
    console = Console(width=max(needed, Console().width))
    console.print(table)
    where = ", ".join(f"{name} {value}" for name, value in environment().items())
    lines = [f"# {title}", "", f"{where}.", "", "| " + " | ".join(columns) + " |"]
    lines.append("|---" + "|---:" * (len(columns) - 1) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    everything = {"environment": environment(), **results}
    path.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    console.print(f"written to {path} and {path.with_suffix('.json')}")

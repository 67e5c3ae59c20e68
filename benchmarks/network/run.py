"""Compressed means and training over a slow wire, beside the dense ones and PyTorch's.

    sudo .venv/bin/python benchmarks/network/run.py
    sudo .venv/bin/python benchmarks/network/run.py --rates 100mbit --processes 4 --only mean

Workers are processes in network namespaces of their own, which a bridge connects: each link is held
to a rate in both directions. It needs root, `ip`, `tc` and `unshare`, and says so where one is
missing. All processes share the cores of this machine, so what they compute takes longer than it
would on a machine each: at 100 Mbit/s the wire decides, at higher rates more and more the cores.

The two jobs of PyTorch need `pip install -e '.[peers]'`; `--only mean train` leaves them out.

Results are in the `--out` folder: `mean.json` and `train.json` are added to group by group, so a
run may be cut into several; tables and pictures are drawn from them.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

import namespaces
import plots
import tables
from launch import HERE, LaunchError, launch, threads
from tables import reporting

UNSHAPED = "unshaped"
JOBS = {
    "mean": ("mean", "mean.py"),
    "train": ("train", "train.py"),
    "local": ("local", "local.py"),
    "overlap": ("overlap", "overlapped.py"),
    "sharded": ("sharded", "fsdp.py"),
    "gossip": ("gossip", "gossiping.py"),
    "gossip-train": ("gossip-train", "gossip_train.py"),
    "torch-mean": ("mean", "torch_ddp.py"),
    "torch-train": ("train", "torch_ddp.py"),
}
TRAINING = ("train", "local", "gossip-train")
GOSSIP = ("gossip", "gossip-train")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    rates = ["100mbit", "1gbit", UNSHAPED]
    add("--rates", nargs="+", default=rates, help=f"as tc writes them, or {UNSHAPED}")
    add("--processes", nargs="+", type=int, default=[2, 4])
    usual = [job for job in JOBS if job not in GOSSIP]
    add("--only", nargs="+", choices=JOBS, default=usual, help=f"{', '.join(usual)}, if not given")
    add("--shape", choices=namespaces.SHAPES, default="switch", help="of the links, for gossip")
    add("--slow", metavar="RATE", help="of one of the links, for gossip")
    add("--delay", type=float, default=0.0, metavar="MS", help="of packets on a switch, for gossip")
    models = ("0.7 million", "0.08 million")
    add("--model", choices=models, default=models[0], help="parameters, for gossip-train")
    add("--methods", nargs="+", metavar="NAME", help="some of them, by name")
    add("--elements", type=int, default=25_000_000, help="of the mean; made a matrix")
    add("--repeats", type=int, default=5, help="of each mean and each training")
    add("--steps", type=int, default=200, help="of training at most, and of its schedule")
    add("--target", type=float, default=4.0, help="bits a byte to train to")
    add("--every", type=int, default=5, help="steps from score to score")
    add("--limit", type=float, default=3600, help="seconds for one program")
    add("--out", type=pathlib.Path, default=pathlib.Path("out/network"))
    options = parser.parse_args()
    for rate in filter(None, (*options.rates, options.slow)):
        try:
            namespaces.bytes_a_second(rate)
        except ValueError as error:
            parser.error(f"argument --rates or --slow: {error}")
    if min(options.processes) < 2 or min(options.repeats, options.every, options.steps) < 1:
        parser.error("--processes must be at least 2; --repeats, --every and --steps positive")
    trains = {"train", "torch-train"} & set(options.only)
    if trains and any(4 % n for n in options.processes):
        parser.error("--processes must be 2 or 4 to train, so that all have equal parts of a batch")
    other = options.slow or options.shape != "switch"
    if (other or options.delay) and not set(options.only) <= set(GOSSIP):
        parser.error(
            "--shape, --slow and --delay are for gossip: use them with --only gossip gossip-train"
        )
    if options.delay and other:
        parser.error("--delay must be without --shape and --slow")
    return options


def environment() -> dict[str, Any]:
    packages = ("jax", "jaxlib", "optax", "flax", "torch", "numpy")
    found = {name: _version(name) for name in ("jaxcomp", *packages)}
    return {
        **found,
        "commit": commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "shaper": "tbf " + " ".join(namespaces.BUCKET),
        "congestion": namespaces.CONGESTION,
    }


def commit() -> str | None:
    """The commit of the code; None outside of a checkout."""
    # The checkout is rarely root's own, and git reads no others by default.
    git = ("git", "-C", str(HERE), "-c", "safe.directory=*")
    try:
        found = subprocess.check_output(
            (*git, "rev-parse", "--short", "HEAD"), text=True, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.strip()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def slowest(found: list[Any]) -> Any:
    """The results of all ranks as one: the largest of every number."""
    first = found[0]
    if isinstance(first, dict):
        return {key: slowest([one[key] for one in found]) for key in first}
    if isinstance(first, list):
        return [slowest(list(each)) for each in zip(*found, strict=True)]
    return first if isinstance(first, str) else max(found)


def middle(found: dict[str, Any], target: float) -> dict[str, Any]:
    """The results with the curve of the median race only.

    Of all races, by their seeds: the seconds, and the steps, bits a byte and bytes sent at the end.
    """
    curves = found.pop("curves")
    curve = sorted(curves, key=lambda curve: curve[-1][1])[(len(curves) - 1) // 2]
    seconds = [each[-1][1] for each in curves]
    ends = [(steps, bits, sent) for steps, _, bits, sent in (each[-1] for each in curves)]
    reached = all(bits <= target for _, bits, _ in ends)
    return {**found, "curve": curve, "reached": reached, "seconds": seconds, "ends": ends}


def keep(path: pathlib.Path, cell: dict[str, Any], found: dict[str, Any], started: str) -> None:
    """Adds the results of a program to the cell of its rate and number of processes.

    Slow links come first. A file has the environment and the start of its first results; results
    from another environment name the differences.
    """
    now = environment()
    new: dict[str, Any] = {"cells": [], "environment": now, "measured": started}
    book = json.loads(path.read_text()) if path.exists() else new
    other = {name: value for name, value in now.items() if book["environment"].get(name) != value}
    if other:
        found["methods"] = {
            name: {**method, "environment": other} for name, method in found["methods"].items()
        }
    for held in book["cells"]:
        if all(held[key] == value for key, value in cell.items()):
            break
    else:
        book["cells"].append(held := {**cell, "methods": {}})
    held["methods"].update(found.pop("methods"))
    held.update(found)
    book["cells"].sort(
        key=lambda held: (namespaces.bytes_a_second(held["rate"]) or math.inf, held["processes"])
    )
    path.write_text(json.dumps(book, indent=1) + "\n")


def measured(path: pathlib.Path, processes: int) -> bool:
    """Whether the file has times of codecs, which do not depend on the wire."""
    book = json.loads(path.read_text()) if path.exists() else {"cells": []}
    return any("work" in cell for cell in book["cells"] if cell["processes"] == processes)


def run(options: argparse.Namespace, rate: str, processes: int, job: str) -> bool:
    """Whether the program of the job came to an end."""
    asked = ("methods", "elements", "repeats", "steps", "target", "every", "shape", "slow", "model")
    settings = {name: getattr(options, name) for name in asked}
    settings["delay"] = options.delay / 1e3
    shaped = None if rate == UNSHAPED else rate
    settings["rate"] = shaped
    settings["work"] = not measured(options.out / "mean.json", processes)
    what, program = JOBS[job]
    where = links(rate, options)
    title = f"{where}, {processes} processes: {what} by {program}"
    print(title, flush=True)
    label = re.sub(r"[^\w.]+", "-", f"{where} {processes} {program.removesuffix('.py')} {what}")
    folder = options.out / "logs" / label
    start, started = time.monotonic(), reporting.now()
    try:
        delay = options.delay / 1e3
        with namespaces.network(processes, shaped, options.shape, options.slow, delay) as net:
            found = launch(net, program, {**settings, "what": what}, folder, options.limit)
    except LaunchError as error:
        print(f"{title}: failed, and left out. {error}", file=sys.stderr)
        return False
    cell = {"rate": rate, "processes": processes, "threads": threads(processes)}
    cell |= {"links": where} if what in GOSSIP else {}
    whole = slowest(found)
    if what in TRAINING:
        cell |= {"target": options.target}
        cell |= {"steps": options.steps} if what != "local" else {}
        of = {name: middle(one, options.target) for name, one in whole["methods"].items()}
        whole["methods"] = of
    keep(options.out / f"{what}.json", cell, whole, started)
    print(f"    took {time.monotonic() - start:.0f} s", flush=True)
    return True


def links(rate: str, options: argparse.Namespace) -> str:
    """The links in words."""
    shape = "" if options.shape == "switch" else f", {options.shape}"
    delay = f", {options.delay:g} ms" if options.delay else ""
    return f"{rate}{shape}{delay}" + (f", one link {options.slow}" if options.slow else "")


def main() -> None:
    options = parse()
    try:
        why = namespaces.missing()
    except RuntimeError as error:
        sys.exit(f"not begun: {error}")
    if why is not None:
        print(f"skipped: {why}")
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # So that the network is removed.
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores this signal.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    options.out.mkdir(parents=True, exist_ok=True)
    cells = [(rate, n) for rate in options.rates for n in options.processes]
    good = [run(options, *cell, job) for cell in cells for job in options.only]
    tables.write(options.out)
    plots.draw(options.out)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()

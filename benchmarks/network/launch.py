"""Runs a worker program on every host of a network, and collects the results."""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from namespaces import Network, address

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PORT = 29500


class LaunchError(Exception):
    """A worker ended with an error, or the run took too long."""


def threads(processes: int) -> int:
    """Threads of each process: together the processes use no more than there are cores."""
    return max(1, (os.cpu_count() or 1) // processes)


def launch(
    net: Network, program: str, settings: dict[str, Any], folder: pathlib.Path, limit: float
) -> list[dict[str, Any]]:
    """The results of all ranks, in order; rank 0 prints to this terminal.

    Args:
        net: where to run.
        program: a file beside this one, which is given one argument: its place and `settings`, as
            JSON.
        settings: for the program.
        folder: for logs and results.
        limit: seconds.

    Raises:
        LaunchError: if a worker ends with an error, or the time is over.
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = {"processes": net.processes, "address": address(0), "port": PORT, **settings}
    workers, logs = [], []
    try:
        for rank in range(net.processes):
            own = {**place, "rank": rank, "out": str(folder / f"{rank}.json")}
            pathlib.Path(own["out"]).unlink(missing_ok=True)
            logs.append((folder / f"{rank}.log").open("w"))
            argv = [sys.executable, "-W", "ignore", str(HERE / program), json.dumps(own)]
            out = None if rank == 0 else logs[-1]
            environment = _environment(net.processes, folder.parent / "programs")
            workers.append(net.start(rank, argv, env=environment, stdout=out, stderr=logs[-1]))
        _wait(workers, folder, limit)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        for log in logs:
            log.close()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(net.processes)]


def _environment(processes: int, programs: pathlib.Path) -> dict[str, str]:
    number = str(threads(processes))
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "PJRT_NPROC": number,  # XLA's threads; torch has its own function for this.
        "OMP_NUM_THREADS": number,
        "GLOO_SOCKET_IFNAME": "eth0",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(programs.absolute()),  # Shared by all rates.
        # Keep freed memory: otherwise large arrays would be returned to the system and mapped again
        # page by page in every step, which takes as long as the computation.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**26),
    }


def _wait(workers: list[subprocess.Popen], folder: pathlib.Path, limit: float) -> None:
    end = time.monotonic() + limit
    while True:
        codes = [worker.poll() for worker in workers]
        bad = [rank for rank, code in enumerate(codes) if code]
        if bad:
            time.sleep(1)  # The error may come from another worker, which reports it at its end.
            raise LaunchError("\n".join(_tail(folder, rank, codes[rank]) for rank in bad))
        if None not in codes:
            return
        if time.monotonic() > end:
            raise LaunchError(f"not done after {limit:.0f} s. {_tail(folder, 0, None)}")
        time.sleep(0.1)


def _tail(folder: pathlib.Path, rank: int, code: int | None) -> str:
    lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()[-15:]
    return "\n  ".join([f"rank {rank} (exit code {code}) said last:", *lines])

"""Helpers of worker programs: their place in the group, a clock, and counts of bytes sent."""

import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomp

AXIS = "data"


def place() -> dict[str, Any]:
    """The rank of this worker, the number of workers, and the settings of the program."""
    return json.loads(sys.argv[1])


def chosen(own: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The selected methods, or all."""
    return [name for name in names if name in (own["methods"] or names)]


def matrix(elements: int) -> tuple[int, int]:
    """The gradient's shape, nearly square, so that low rank applies too; rows as real ones are."""
    columns = max(1, round(elements**0.5 / 1024)) * 1024
    return round(elements / columns), columns


def finish(own: dict[str, Any], results: dict[str, Any]) -> None:
    pathlib.Path(own["out"]).write_text(json.dumps(results))


def say(own: dict[str, Any], *words: str) -> None:
    if own["rank"] == 0:
        print("   ", *words, flush=True)


def join(own: dict[str, Any], devices: int = 1) -> Mesh:
    """Brings the processes together: a mesh of the first of each one's devices."""
    jax.config.update("jax_num_cpu_devices", devices)
    at = f"{own['address']}:{own['port']}"
    jax.distributed.initialize(at, own["processes"], own["rank"])
    first = jax.devices()[::devices]
    shape, kinds = (own["processes"],), (AxisType.Auto,)
    return jax.make_mesh(shape, (AXIS,), axis_types=kinds, devices=first)


def spread(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """This worker's rows as its shard of a global array."""
    where = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.make_array_from_process_local_data(where, rows)


def meeting(mesh: Mesh) -> Callable[..., float]:
    """A function that returns, to all at the same time, the mean of all workers' values."""
    mean = jaxcomp.data_parallel(lambda x: lax.pmean(x.sum(), AXIS), mesh, AXIS)

    def meet(value: float = 0.0) -> float:
        return float(mean(spread(mesh, np.array([value], np.float32))))

    return meet


def timed(
    run: Callable[[], Any], meet: Callable[[], Any], repeats: int, warm: int = 1
) -> dict[str, Any]:
    """Seconds of each repetition, and the cost of one on this worker.

    All workers begin a repetition together. The cost is the bytes sent, processor seconds in user
    and in kernel code, and the pages of memory that were mapped.
    """
    seconds: list[float] = []
    for _ in range(warm):
        run()
    meet()
    before = _spent()
    for _ in range(repeats):
        meet()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    meet()  # All queued bytes have left now.
    each = {name: (now - before[name]) / repeats for name, now in _spent().items()}
    return {"seconds": seconds, **each}


def _spent() -> dict[str, float]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {"sent": sent(), "user": own.ru_utime, "system": own.ru_stime, "pages": own.ru_minflt}


def sent() -> int:
    """Bytes that this host has sent so far, including headers and what it has passed on."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    devices = dict(line.strip().split(":", 1) for line in lines)
    return sum(int(fields.split()[8]) for name, fields in devices.items() if name != "lo")

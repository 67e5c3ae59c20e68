"""Rounds of ten thousand clients with a residual each: seconds, memory, and the same bits.

    python benchmarks/federated.py

Every client takes part in every round, takes two local steps on a network of 100,000 parameters,
and keeps a residual in a memory-mapped table. Each case is a process of its own; its anonymous
memory is read every 20 ms, which leaves out the mapped table. The digest is that of the parameters
after all rounds. Tables and `federated.json` are in the `--out` folder.
"""

import hashlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import reporting
from reporting import Table

COLUMNS = (
    "codec {codec} | chunk {chunk} | devices {devices} | seconds a round {seconds:.1f} | "
    "first round {first:.1f} | peak memory, GB {memory:.2f} | table, GB {table:.1f} | "
    "bits a parameter {bits:.2f} | parameters {digest}"
)
CASES = [
    ("blockwise", 16, 1),
    ("blockwise", 1, 1),
    ("blockwise", 64, 1),
    ("blockwise", 16, 2),
    ("blockwise", 16, 8),
    ("top_k", 16, 1),
    ("top_k", 16, 2),
    ("sign", 16, 1),
]
"""Codec, clients at once on a device, devices."""
WIDTHS = (64, 256, 315, 10)


def case(codec: str, chunk: int, devices: int, clients: int, rounds: int) -> dict[str, Any]:
    """Runs one case in this process."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxcomp
    from jaxcomp import federated

    jax.config.update("jax_num_cpu_devices", devices)
    draw = np.random.default_rng(0)
    shapes = list(itertools.pairwise(WIDTHS))
    params = [jnp.asarray(draw.normal(size=s) / s[0] ** 0.5, jnp.float32) for s in shapes]
    images = draw.normal(size=(2_000, 8, WIDTHS[0])).astype(np.float32)
    labels = (images @ draw.normal(size=(WIDTHS[0], WIDTHS[-1]))).argmax(-1).astype(np.int32)

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        for kernel in params[:-1]:
            x = jax.nn.relu(x @ kernel)
        logits = jax.nn.log_softmax(x @ params[-1])
        return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))

    def batches(numbers: Any, round: int) -> Any:
        own = (numbers[:, None] * 7 + np.arange(2) + round) % len(images)
        return images[own], labels[own]

    codecs = {
        "blockwise": jaxcomp.blockwise(bits=4),
        "top_k": jaxcomp.top_k(fraction=0.01),
        "sign": jaxcomp.sign(),
    }
    link = jaxcomp.Link(codecs[codec], jaxcomp.Residual())
    work = federated.LocalSteps(loss, optax.sgd(0.1))
    mesh = jax.make_mesh((devices,), ("clients",)) if devices > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        sim = federated.Simulation(
            federated.Method(work, link),
            params,
            clients,
            batches,
            chunk=chunk,
            mesh=mesh,
            table=folder,
            faults=federated.Faults(lost=0.1),
        )
        peak, stop = [0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(peak, stop))
        watcher.start()
        seconds = []
        for _ in range(rounds):
            began = time.perf_counter()
            report = sim.round()
            seconds.append(time.perf_counter() - began)
        stop.set()
        watcher.join()
        leaves = b"".join(np.asarray(leaf).tobytes() for leaf in sim.params)
        size = sum(leaf.size for leaf in params)
        return {
            "codec": codec,
            "chunk": chunk,
            "devices": devices,
            "clients": clients,
            "parameters": size,
            "accepted": report.accepted,
            "seconds": statistics.median(seconds[1:]),
            "first": seconds[0],
            "memory": peak[0] / 1e6,
            "table": sum(array.nbytes for array in sim.table.arrays()) / 1e9,
            "bits": 8 * report.up / report.accepted / size,
            "digest": hashlib.sha256(leaves).hexdigest()[:16],
        }


def _watch(peak: list[int], stop: threading.Event) -> None:
    """Reads the anonymous memory of this process, in kilobytes, until it is told to stop."""
    while not stop.wait(0.02):
        text = pathlib.Path("/proc/self/status").read_text()
        peak[0] = max(peak[0], int(text.partition("RssAnon:")[2].split()[0]))


def main() -> None:
    args = reporting.options(
        __doc__,
        "out/federated_scale",
        clients=(10_000, "how many take part in each round"),
        rounds=(4, "of which the first, with the compilation, is not in the median"),
        only=(0, "the number of one case, from 1; 0 for all, each in a process"),
    )
    if args.only:
        codec, chunk, devices = CASES[args.only - 1]
        found = case(codec, chunk, devices, args.clients, args.rounds)
        print(json.dumps(found))
        return
    records = []
    for number in range(1, len(CASES) + 1):
        command = [sys.executable, __file__, "--only", number, "--clients", args.clients]
        done = subprocess.run(
            [*map(str, command), "--rounds", str(args.rounds)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        records.append(json.loads(done.stdout.splitlines()[-1]))
        print(records[-1], flush=True)
    for codec in {record["codec"] for record in records}:
        digests = {record["digest"] for record in records if record["codec"] == codec}
        assert len(digests) == 1, f"{codec}: {digests}"
    title = f"{args.clients:,} clients a round, with a residual each"
    reporting.show(Table(title, COLUMNS, records), {"records": records}, args.out / "federated.md")


if __name__ == "__main__":
    main()

"""Rounds of ten thousand clients with a residual each: seconds, memory, and the same bits.

    python benchmarks/federated.py

Every client takes part in every round, takes two local steps on a network of 100,000 parameters,
and keeps a residual in a memory-mapped table. Three of ten messages are lost. Each case is a
process of its own; its anonymous memory is read every 20 ms, which leaves out the mapped table. The
digest is that of the parameters after all rounds. In the case "integers" the updates are integers,
and all that clients gave is compared with all that the server added and residuals hold. Tables and
`federated.json` are in the `--out` folder.
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
    "bits a parameter {bits:.2f} | parameters {digest} | units lost {missing:.0f}"
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
    ("integers", 16, 1),
]
"""Codec, clients at once on a device, devices."""
LOST = 0.3
WIDTHS = (64, 256, 315, 10)


def network() -> tuple[Any, Any, Any]:
    """The parameters, their loss, and the data of clients."""
    import jax
    import jax.numpy as jnp
    import numpy as np

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

    return params, loss, batches


def integers() -> tuple[Any, Any, Any]:
    """Parameters of the same shapes, whose gradient is the data of a client: integers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    params = jax.tree.map(jnp.zeros_like, network()[0])
    draw = np.random.default_rng(1)
    data = [draw.integers(-50, 50, (101, 1, *p.shape)).astype(np.float32) for p in params]

    def loss(params: Any, batch: Any) -> Any:
        return sum(jnp.vdot(p, x) for p, x in zip(params, batch, strict=True))

    def batches(numbers: Any, round: int) -> Any:
        return [x[(numbers * 7 + round) % len(x)] for x in data]

    return params, loss, batches


def case(codec: str, chunk: int, devices: int, clients: int, rounds: int) -> dict[str, Any]:
    """Runs one case in this process."""
    import jax
    import numpy as np
    import optax

    import jaxcomp
    from jaxcomp import federated

    jax.config.update("jax_num_cpu_devices", devices)
    codecs = {
        "blockwise": jaxcomp.blockwise(bits=4),
        "top_k": jaxcomp.top_k(fraction=0.01),
        "sign": jaxcomp.sign(),
        "integers": jaxcomp.top_k(fraction=0.01),
    }
    exact = codec == "integers"
    params, loss, batches = integers() if exact else network()
    link = jaxcomp.Link(codecs[codec], jaxcomp.Residual())
    work = federated.LocalSteps(loss, optax.sgd(1.0 if exact else 0.1))
    method = federated.Method(work, link, server=optax.sgd(0.0 if exact else 1.0))
    mesh = jax.make_mesh((devices,), ("clients",)) if devices > 1 else None
    with tempfile.TemporaryDirectory() as folder:
        sim = federated.Simulation(
            method,
            params,
            clients,
            batches,
            chunk=chunk,
            mesh=mesh,
            table=folder,
            faults=federated.Faults(lost=LOST),
        )
        totals = _totals()
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
        missing = _missing(sim, totals, batches, rounds) if exact else {}
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
            **missing,
        }


def _totals() -> list[Any]:
    """What the server adds in every round from now on."""
    import jax
    import numpy as np

    from jaxcomp.federated import server

    step, found = server.step, []

    def kept(method: Any, key: Any, state: Any, total: Any, weights: Any) -> Any:
        found.append(jax.tree.map(lambda x: np.asarray(x, np.float64), total))
        return step(method, key, state, total, weights)

    server.step = kept
    return found


def _missing(sim: Any, totals: list[Any], batches: Any, rounds: int) -> dict[str, float]:
    """The units that clients gave, and those that neither the server nor a residual has."""
    import jax
    import numpy as np

    from jaxcomp.layout import trees

    given = [np.zeros(p.shape) for p in sim.params]
    for number in range(rounds):
        for start in range(0, sim.clients, 100):
            some = batches(np.arange(start, min(start + 100, sim.clients)), number)
            for total, x in zip(given, some, strict=True):
                total += x.sum((0, 1), dtype=np.float64)
    rows = jax.tree.structure(sim.table.read(np.arange(1)))
    memory = jax.tree.unflatten(rows, sim.table.arrays()).memory
    held = [
        jax.tree.map(lambda x: x.sum(0, dtype=np.float64), part)
        for part in (memory.feedback, memory.dense)
    ]
    added = jax.tree.map(lambda *xs: sum(xs), *totals)
    plan = trees.layout(sim.method.uplink.policy, sim.params)
    kept = trees.assemble(plan, added.stacks, added.dense)
    left = trees.assemble(plan, held[0].residual, held[1].residual)
    missing = [
        np.abs(np.asarray(k, np.float64) + np.asarray(r, np.float64) - g).sum()
        for k, r, g in zip(kept, left, given, strict=True)
    ]
    return {
        "missing": float(sum(missing)),
        "given": float(sum(np.abs(g).sum() for g in given)),
        "held": float(sum(np.abs(np.asarray(r)).sum() for r in left)),
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
        rounds=(3, "of which the first, with the compilation, is not in the median"),
        case=(list(range(1, len(CASES) + 1)), "some of the cases, by number, each in a process"),
        here=(False, "run the case in this process, and print its record"),
        update=(False, "keep records that --out has of cases not measured now"),
    )
    if args.here:
        codec, chunk, devices = CASES[args.case[0] - 1]
        found = case(codec, chunk, devices, args.clients, args.rounds)
        print(json.dumps(found))
        return
    path = args.out / "federated.md"
    records = reporting.read(path.with_suffix(".json"))["records"] if args.update else {}
    for number in args.case:
        command = [sys.executable, __file__, "--here", "--case", number]
        command += ["--clients", args.clients, "--rounds", args.rounds]
        done = subprocess.run(
            list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True
        )
        records[str(number)] = json.loads(done.stdout.splitlines()[-1])
        print(records[str(number)], flush=True)
    records = {name: records[name] for name in sorted(records, key=int)}
    title = f"{args.clients:,} clients a round, with a residual each"
    table = Table(title, COLUMNS, list(records.values()))
    reporting.show(table, {"records": records}, path)
    for codec in {record["codec"] for record in records.values()}:
        digests = {one["digest"] for one in records.values() if one["codec"] == codec}
        if len(digests) > 1:
            sys.exit(f"the parameters of {codec} differ between cases: {sorted(digests)}")


if __name__ == "__main__":
    main()

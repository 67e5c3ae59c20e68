"""Rounds between sites of models of 0.08, 5, 19 and 101 million parameters, by parts.

    python benchmarks/site_sizes.py

The runs are those of `examples/sites.py`, over 50 ms and 20 Mbit/s each way, or down and 2 Mbit/s
up. What sites and nodes say of their rounds gives the parts, and the peak of each process's memory
is read every half second. The forecast is that of `jaxcomp plan --sites` for the steps as sites
report them; the seconds in which nothing is sent or computed are those of the smallest model.
Memory is what a process has more than with the smallest model, in parameters of four bytes or in
MB. The first message to a site has the parameters, 406 MB of the largest model, and each further
one 99 MB. This model has two sites, since three do not fit into 24 GB beside their server.
"""

import json
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np
import reporting
import site_rounds

# isort: split
import sites_network  # pyright: ignore[reportMissingImports]

sys.path.append(str(sites_network.APP))
from byte_sites.task import BATCH, CONTEXT, Task as ByteTask  # pyright: ignore[reportMissingImports]

import jaxcomp
from jaxcomp import federated
from jaxcomp.planning import Network, plan_sites
from jaxcomp.theory.site_rounds import TRIPS

SIZES = {
    "0.08 million": (1, 64, 3),
    "5 million": (6, 256, 3),
    "19 million": (6, 512, 3),
    "101 million": (8, 1024, 2),
}
"""Layers, width and sites."""
LINKS = {
    "20 Mbit/s": (20e6, 20e6),
    "20 down, 2 up": (2e6, 20e6),
}
"""Bits a second, up and down."""
STEPS, DELAY, SMALL = 2, 0.025, "0.08 million"
WEIGHT_OF = federated.tokens_squared_per_step
COLUMNS = (
    "model {size} | link {link} | sites {sites} | MB up {up:.2f} | MB down {down:.2f} | "
    "a round, s {round_s:.1f} | steps {steps_s:.1f} | message received {received_s:.1f} | "
    "sent {sent_s:.1f} | "
    "rest of a site {rest_s:.1f} | server and waiting {server_s:.1f} | "
    "forecast, s {forecast:.1f} | "
    "÷ forecast {ratio:.2f} | server, models {server:.1f} | site, models {site:.1f} | "
    "node, MB {node:.0f} | SuperLink, MB {link_mb:.0f}"
)


class Task(ByteTask):
    """The example's, of which nobody asks the loss."""

    def score(self, params: Any) -> float:
        del params
        return 0.0


def _peak(pid: int | None) -> float:
    """Bytes of a process's memory at its peak."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * float(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    except (OSError, StopIteration):
        return 0.0


def run(size: str, link: str, rounds: int, folder: pathlib.Path) -> dict[str, Any]:
    """A run; medians of its rounds but the first two, in which sites compile and get all."""
    layers, width, sites = SIZES[size]
    peaks: dict[str, float] = {}

    def happens(net: sites_network.Network, done: int) -> None:
        del done
        pids: dict[str, int | None] = {name: net.pid(name) for name in ("site0", "node0", "link")}
        pids["server"] = net.server
        for name, pid in pids.items():
            peaks[name] = max(peaks.get(name, 0.0), _peak(pid))

    config = {"task": "site_sizes", "rounds": rounds, "steps": STEPS, "seed": 0, "quorum": sites}
    config |= {"layers": layers, "width": width, "deadline": 600.0}
    relay = {"delay": DELAY, "rate": LINKS[link]}
    site_rounds.trained(config, relay, happens, 3000, folder, sites=sites)
    text = (folder / "server" / "checkpoint" / "rounds.jsonl").read_text().splitlines()
    lines = [line for line in map(json.loads, text) if line["kind"] == "round"][2:]
    seconds = np.median(np.diff([line["time"] for line in lines]))
    sent = np.median(np.diff([[line["up"], line["down"]] for line in lines], axis=0), axis=0)
    steps = np.median([np.mean(line["accepted"]["seconds"]) for line in lines])
    parts = site_rounds.parts_of(folder)
    answered = parts["answered_s"]
    return {
        "round_s": float(seconds),
        "sites": sites,
        "up": float(sent[0]) / sites / 1e6,
        "down": float(sent[1]) / sites / 1e6,
        "steps_s": float(steps),
        **parts,
        "rest_s": answered - float(steps),
        "server_s": float(seconds) - answered - parts["received_s"] - parts["sent_s"],
        "peaks": peaks,
    }


def table_of(found: dict[str, Any]) -> reporting.Table:
    """The table of all runs, with the forecast of each."""
    small, rows = found[f"{SMALL}, 20 Mbit/s"], []
    idle = small["round_s"] - small["steps_s"] - TRIPS * 2 * DELAY
    idle -= (small["up"] + small["down"]) * 8 / 20
    codec = jaxcomp.Link(jaxcomp.blockwise(bits=4), jaxcomp.Residual())
    for name, one in found.items():
        size, _, link = name.partition(", ")
        like = jax.eval_shape(Task("diloco", 0, *SIZES[size][:2], STEPS).params)
        up, down = (Network(rate / 8, DELAY) for rate in LINKS[link])
        step = one["steps_s"] / STEPS
        ways = {"up": codec, "down": jaxcomp.qsgd_inf(bits=8), "upload": up}
        plan = plan_sites(like, down, steps=STEPS, step=step, idle=max(idle, 0.0), **ways)
        model = 4 * sum(leaf.size for leaf in jax.tree.leaves(like))
        memory = {
            name: (one["peaks"][key] - small["peaks"][key]) / (unit or model)
            for name, (key, unit) in _PEAKS.items()
        }
        more = {"forecast": plan.seconds, "ratio": one["round_s"] / plan.seconds, **memory}
        rows.append({"size": size, "link": link, **one, **more})
    title = f"Rounds of {STEPS} steps of {BATCH * CONTEXT} bytes between sites"
    return reporting.Table(title, COLUMNS, rows)


_PEAKS = {
    "server": ("server", 0),
    "site": ("site0", 0),
    "node": ("node0", 1e6),
    "link_mb": ("link", 1e6),
}
"""The process of each column, and its unit in bytes; 0 for the model's size."""


def main() -> None:
    options = reporting.options(
        __doc__,
        reporting.RESULTS / "sites" / "sizes",
        size=(SIZES, "some of them"),
        link=(LINKS, "some of them"),
        rounds=(6, "rounds of a run"),
    )
    file = options.out / "sizes.json"
    found: dict[str, Any] = json.loads(file.read_text())["sizes"] if file.exists() else {}
    for size in options.size:
        for link in options.link:
            if f"{size}, {link}" in found:
                continue
            with tempfile.TemporaryDirectory() as place:
                found[f"{size}, {link}"] = run(size, link, options.rounds, pathlib.Path(place))
            print(size, link, found[f"{size}, {link}"], flush=True)
            reporting.keep(file, {"environment": reporting.environment(), "sizes": found})
    reporting.show(table_of(found), {"sizes": found}, options.out / "sizes.md")


if __name__ == "__main__":
    main()

"""Measures the codecs that plans compare by default, for plans on machines that have not yet.

    python benchmarks/plan_times.py

The times go into `jaxcomp/planning/times.json`, with the time of a copy on this machine, by which
plans scale them. Run it on an idle machine.
"""

import dataclasses
import json
import warnings

import jax
import rich.progress

import jaxcomp
from jaxcomp.planning import Network, fsdp, kept, planner, timing

PARAMS, NETWORK = 1_000_000, Network(bandwidth=1.25e8, latency=50e-6)


def asked() -> dict[str, object]:
    """All that default plans time, by name."""
    found: dict[str, object] = {}

    def note(way: object) -> timing.Measured:
        found.setdefault(kept.name_of(way), way)
        return timing.Measured(1, 1.0, 0.5, 0.1, 0.0)

    planner.plan(PARAMS, 16, NETWORK, rounds=True, clock=note)
    planner.plan(PARAMS, (4, 8), NETWORK, fast=NETWORK, clock=note)
    fsdp.plan_fsdp(PARAMS, 16, NETWORK, clock=note)
    return found


def main() -> None:
    """Times each codec, and writes the table."""
    times = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, way in rich.progress.track(asked().items(), "codecs"):
            took = timing.measure(way, kept.ELEMENTS, repeats=15)
            times[name] = {
                key: float(f"{value:.4g}") if isinstance(value, float) else value
                for key, value in dataclasses.asdict(took).items()
            }
    table = {
        "machine": kept.machine(),
        "versions": f"jaxcomp {jaxcomp.__version__}, jax {jax.__version__}",
        "copy": float(f"{timing.copy(repeats=25):.4g}"),
        "times": times,
    }
    kept.TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""The server: a strategy for the method, and a report."""

import hashlib
import json
import pathlib

import jax
import numpy as np
from flwr.app import MetricRecord
from flwr.serverapp import ServerApp

from jaxcomp.adapters import flower

from . import task

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    strategy = flower.CompressedFedAvg(
        task.METHOD,
        task.params(),
        clients=config["clients"],
        key=config["seed"],
        min_available_nodes=config["clients"],
    )

    def evaluate(round, arrays):
        params = flower.params_of(arrays, task.params())
        return MetricRecord({"accuracy": task.accuracy_of(params)})

    strategy.start(grid, num_rounds=config["rounds"], evaluate_fn=evaluate)
    if config["report"]:
        report = {
            "sha256": sha256(strategy.params),
            "accuracy": task.accuracy_of(strategy.params),
            "rounds": [report._asdict() for report in strategy.reports],
            "refused": dict(strategy.refused),
            "up": strategy.up,
            "down": strategy.down,
        }
        pathlib.Path(config["report"]).write_text(json.dumps(report))


def sha256(params):
    """The hash of all bits of the parameters."""
    leaves = jax.tree.leaves(params)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()

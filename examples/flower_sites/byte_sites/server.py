"""The server: rounds that end at a quorum or a deadline, and a line of a report for each."""

import importlib
import json
import logging
import pathlib
import time

from flwr.app import MetricRecord
from flwr.serverapp import ServerApp

from jaxcomp.adapters import flower

app = ServerApp()


@app.main()
def main(grid, context):
    config, folder = context.run_config, pathlib.Path(context.run_config["folder"])
    module = importlib.import_module(config["task"])
    task = module.Task.of(config)
    logging.getLogger("flwr").addHandler(logging.FileHandler(folder / "server.log"))
    params = task.params()
    strategy = flower.CompressedFedAvg(
        task.build(),
        params,
        clients=config["sites"],
        key=config["seed"],
        weight_of=module.WEIGHT_OF,
        quorum=flower.Quorum(config["quorum"], config["deadline"], patience=config["patience"]),
        min_available_nodes=1,
        checkpoint=folder / "checkpoint",
    )
    strategy.restore(folder / "checkpoint", missing_ok=True)

    def evaluate(round, arrays):
        """A line for each round: when it ended, the loss, and the bytes so far."""
        score = task.score(flower.params_of(arrays, params))
        last = strategy.reports[-1] if strategy.reports else None
        line = {
            "time": time.time(),
            "round": int(strategy.state.round),
            "score": score,
            "accepted": last.accepted if last else 0,
            "sampled": last.sampled if last else 0,
            "late": {str(age): count for age, count in strategy.late.items()},
            "refused": dict(strategy.refused),
            "up": strategy.up,
            "down": strategy.down,
        }
        with (folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return MetricRecord({"score": score})

    left = config["rounds"] - int(strategy.state.round)
    if left > 0:
        strategy.start(grid, num_rounds=left, evaluate_fn=evaluate)
    (folder / "ended").touch()

"""Flower over real sockets: a client that dies, one that lies, and lost messages."""

import importlib
import json
import shutil

import jax
import numpy as np
import pytest
from helpers.paths import ROOT

from jaxcomp import federated

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"
CLIENTS, ROUNDS, HOSTILE = 4, 3, 3
CLIENT = """
import os
import pathlib

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from jaxcomp import federated
from jaxcomp.adapters import flower

from . import task


def batches(context, number, round):
    return task.batches(number, context.run_config["clients"], round)


honest = flower.client_app(
    task.METHOD, task.params(), batches, faults=federated.Faults(lost=0.3)
)
app = ClientApp()


@app.train()
def train(message, context):
    given = message.content["jaxcomp.instruction"]
    with pathlib.Path(context.run_config["report"]).with_name("pids").open("a") as file:
        file.write(f"{given['client']} {os.getpid()}\\n")
    if given["client"] != 3:
        return honest(message, context)
    if given["round"] == 0:
        os._exit(1)
    if given["round"] == 1:
        raise RuntimeError("boom")
    config = {"round": 2, "client": 3, "status": "sent", "upon": -1, "loss": 1e30}
    data = bytes(range(256)) * 100
    array = Array(dtype="uint8", shape=(len(data),), stype="jaxcomp.payload/1", data=data)
    content = {
        "jaxcomp.answer": ConfigRecord(config),
        "jaxcomp.payload": ArrayRecord({"0": array}),
    }
    return Message(RecordDict(content), reply_to=message)
"""


class Mixed(federated.Faults):
    """Some messages are lost, and all of the hostile client."""

    def draw(self, key, numbers, known):
        arrives, ages = super().draw(key, numbers, known)
        return arrives & (np.asarray(numbers) != HOSTILE), ages


@pytest.fixture
def example(monkeypatch):
    """The script that starts the processes, and the app's modules."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES / "flower_digits")
    return [
        importlib.import_module(n) for n in ("federated_flower", "digits.task", "digits.server")
    ]


@pytest.mark.slow
def test_the_bits_are_those_of_the_simulation(example, tmp_path):
    script, task, server = example
    app = shutil.copytree(EXAMPLES / "flower_digits", tmp_path / "app")
    (app / "digits" / "client.py").write_text(CLIENT)
    config = {"clients": CLIENTS, "rounds": ROUNDS, "seed": 1}
    ran = script.run(app, CLIENTS, {**config, "report": str(tmp_path / "report.json")}, 500)
    assert (tmp_path / "report.json").exists(), ran.said
    report = json.loads((tmp_path / "report.json").read_text())

    def batches(numbers, round):
        rows = [task.batches(int(number), CLIENTS, round) for number in numbers]
        return jax.tree.map(lambda *parts: np.stack(parts), *rows)

    sim = federated.Simulation(
        task.METHOD, task.params(), CLIENTS, batches, key=1, faults=Mixed(lost=0.3), messages=1_000
    )
    sim.run(ROUNDS)
    assert report["sha256"] == server.sha256(sim.params)
    assert report["up"] == sim.ledger.up
    lost = CLIENTS * ROUNDS - ROUNDS - sum(row["accepted"] for row in report["rounds"])
    assert report["refused"]["lost"] == lost > 0
    assert report["refused"]["failed"] + report["refused"]["malformed"] == ROUNDS
    assert ran.up > report["up"]
    assert ran.down > report["down"]
    calls = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
    assert len({pid for _, pid in calls}) == len(calls) == CLIENTS * ROUNDS  # Each a new process.

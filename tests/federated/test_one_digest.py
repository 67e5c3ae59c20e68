"""One bit-string: the same parameters by every way to run clients, and over Flower's sockets."""

import importlib
import json
import pathlib
import shutil

import jax
import pytest
from helpers import clients as world
from helpers.paths import ROOT

pytest.importorskip("flwr")

EXAMPLES = ROOT / "examples"
TASK = """
from . import clients as world

METHOD, params = world.FEW_METHOD, world.params


def batches(number, parts, round):
    del parts
    x, y = world.batches([number], round)
    return x[0], y[0]


def accuracy_of(params):
    return 0.0
"""
CLIENT = """
import pathlib

from flwr.clientapp import ClientApp

from jaxcomp.adapters import flower

from . import clients as world, task


def batches(context, number, round):
    return task.batches(number, None, round)


work = flower.client_app(task.METHOD, task.params(), batches, faults=world.FAULTS)
app = ClientApp()


@app.train()
def train(message, context):
    reply = work(message, context)
    given = message.content["jaxcomp.instruction"]
    folder = pathlib.Path(context.run_config["report"]).parent
    for name, data in reply.content["jaxcomp.payload"].items():
        (folder / f"{given['round']}.{given['client']}.{name}.sent").write_bytes(data.data)
    return reply
"""


class Tapped:
    """A socket whose bytes are kept as they are read."""

    def __init__(self, source, kept):
        self.source, self.kept = source, kept

    def recv(self, size):
        data = self.source.recv(size)
        self.kept += data
        return data

    def __getattr__(self, name):
        return getattr(self.source, name)


def over_sockets(rounds, folder, monkeypatch):
    """The server's report of a Flower run, the clients' messages, and all bytes they sent."""
    monkeypatch.syspath_prepend(EXAMPLES)
    script, streams = importlib.import_module("federated_flower"), []

    class Counter(script.Counter):
        def _pass(self, source, sink, name):
            if name == "up":
                streams.append(bytearray())
                source = Tapped(source, streams[-1])
            super()._pass(source, sink, name)

    monkeypatch.setattr(script, "Counter", Counter)
    app = shutil.copytree(EXAMPLES / "flower_digits", folder / "app")
    shutil.copy(pathlib.Path(world.__file__), app / "digits" / "clients.py")
    (app / "digits" / "task.py").write_text(TASK)
    (app / "digits" / "client.py").write_text(CLIENT)
    config = {"clients": world.FEW, "rounds": rounds, "report": str(folder / "report.json")}
    ran = script.run(app, world.FEW, config, 300 + 30 * rounds)
    assert (folder / "report.json").exists(), ran.said
    report = json.loads((folder / "report.json").read_text())
    sent = [file.read_bytes() for file in folder.glob("*.sent")]
    return report, sent, streams, ran


def with_program(mode):
    sim = world.few(chunk=8, messages=0)
    sim._program = world.Spread(sim, mode)
    return sim


def elsewhere(rounds):
    """The digests of the other ways to run clients; fast tests compare each of them by itself."""
    meshes = [jax.make_mesh((n,), ("clients",), devices=jax.devices()[:n]) for n in (2, 8)]
    others = [*map(with_program, ("vmap", "pmap")), *(world.few(mesh=mesh) for mesh in meshes)]
    for sim in others:
        sim.run(rounds)
        yield world.digest(sim.params)
    yield from world.in_two_processes(rounds, "few")


@pytest.mark.full
@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_one_bit_string(rounds, tmp_path, monkeypatch):
    alone = world.few()
    reports = alone.run(rounds)
    assert sum(r.accepted for r in reports) < 2 * rounds  # Some messages are lost.
    digest = world.digest(alone.params)
    if rounds > 2:
        assert list(elsewhere(rounds)) == [digest] * 6

    report, sent, streams, ran = over_sockets(rounds, tmp_path, monkeypatch)
    assert report["sha256"] == digest
    assert report["refused"] == {"lost": 2 * rounds - sum(r.accepted for r in reports)}
    # The ledger's bytes are those on the sockets: every message is in them once, and as it is.
    assert sum(map(len, sent)) == report["up"] == alone.ledger.up
    assert report["down"] == alone.ledger.down
    for message in sent:
        assert sum(stream.count(message) for stream in streams) == 1
    requests = [part for stream in streams for part in stream.split(b"POST ")]
    carriers = [part for part in requests if any(message in part for message in sent)]
    framing = (sum(map(len, carriers)) - report["up"]) / len(sent)
    print(f"{report['up']:,} bytes of {len(sent)} messages, {framing:,.0f} more for each request,")
    print(f"and {ran.up:,} bytes in all, with what Flower asks for and reports")

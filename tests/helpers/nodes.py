"""Nodes of Flower without its sockets, and the task that they train."""

import hashlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import (
    Context,
    Error,
    Message,
    RecordDict,
)

from jaxcomp.adapters import flower

logging.getLogger("flwr").setLevel(logging.ERROR)
CLIENTS, STEPS = 5, 3


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """From some version on, a message has the run and node of its process."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def params():
    draw = np.random.default_rng(0)
    return {"w": jnp.asarray(draw.normal(size=(64, 32)) / 8, jnp.float32), "b": jnp.zeros(32)}


def loss(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def data(numbers, round):
    rows = [np.random.default_rng([int(n), round]) for n in numbers]
    x = np.stack([row.normal(size=(STEPS, 4, 64)).astype(np.float32) for row in rows])
    return x, np.tanh(x[..., :32])


def batches(context, number, round):
    return jax.tree.map(lambda x: x[0], data([number], round))


def method(**given):
    given = {"up": jaxcomp.top_k(fraction=0.25), "down": jaxcomp.qsgd_inf(bits=8), **given}
    return federated.Method(
        federated.LocalSteps(loss, optax.sgd(0.1, momentum=0.9), keep=True), **given
    )


class Grid:
    """Flower's grid without its sockets: the nodes' apps are called, each with its own context."""

    def __init__(self, apps):
        self.apps = apps
        self.contexts = {node: context_of(node) for node in apps}
        self.spoil = list
        self.away = set()

    def get_node_ids(self):
        return [node for node in self.apps if node not in self.away]

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            try:
                reply = self.apps[node]()(message, self.contexts[node])
            except ValueError as error:
                reply = Message(Error(0, str(error)), reply_to=message)
            replies.append(reply)
        return self.spoil(replies[::-1]) if replies else []


class SlowGrid(Grid):
    """Nodes that answer in a later round, or never.

    Attributes:
        due: the round in which an answer is there, by round and node; None for never.
        told: which node has been asked in which round.
        asked_away: nodes whose answer was asked for while they were away.
    """

    def __init__(self, apps, due):
        super().__init__(apps)
        self.due, self.told, self.asked_away, self.now = due, [], [], -1
        self._answers = {}

    def push_messages(self, messages):
        self.now += 1
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            self.told.append((self.now, node))
            due = self.due(self.now, node)
            ids.append(f"{self.now} {node}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            try:
                reply = self.apps[node]()(message, self.contexts[node])
            except ValueError as error:
                reply = Message(Error(0, str(error)), reply_to=message)
            self._answers[ids[-1]] = due, reply
        return ids

    def pull_messages(self, message_ids):
        (one,) = message_ids
        node = int(one.split()[1])
        if node in self.away:
            self.asked_away.append(node)
        due, reply = self._answers[one]
        return [] if due is None or due > self.now else [reply]


class AtOnce:
    """A thread that has run when it is started."""

    def __init__(self, target, args, daemon):
        self.start = lambda: target(*args)


def context_of(node):
    return Context(1, node, {}, RecordDict(), {})


def grid_of(method, faults=federated.Faults(), nodes=CLIENTS, **given):
    def app():  # A new one for each message, as Flower starts a process for each.
        return flower.client_app(method, params(), batches, faults=faults, **given)

    return Grid({100 + node: app for node in range(nodes)})


def strategy_of(method, **given):
    given = {"min_available_nodes": CLIENTS, **given}
    return flower.CompressedFedAvg(method, params(), CLIENTS, **given)


def sha(tree):
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    ).hexdigest()


class Silent(federated.Faults):
    """Messages of these clients never arrive."""

    def draw(self, key, numbers, known):
        arrives = np.array([n not in self.clients for n in numbers])
        return arrives, np.zeros(len(numbers), np.int32)


def silent(*clients):
    faults = Silent()
    object.__setattr__(faults, "clients", clients)
    return faults


def simulated(method, rounds, faults=federated.Faults()):
    sim = federated.Simulation(method, params(), CLIENTS, data, faults=faults, messages=1_000)
    sim.run(rounds)
    return sim

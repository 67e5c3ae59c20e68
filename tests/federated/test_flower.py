"""Flower's adapters have the simulation's bits, and refuse what is not a client's answer."""

import hashlib
import itertools
import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import ROOT

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    RecordDict,
)

from jaxcomp.federated import flower

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


METHODS = {
    "top_k": {"sampling": federated.Exactly(3)},
    "qsgd": {"up": jaxcomp.qsgd_inf(bits=4), "down": None},
    "shift": {
        "up": jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(step=0.25)),
        "mean": "all",
        "sampling": federated.Independently(0.6),
        "server": optax.adam(0.1),
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_the_bits_and_bytes_are_those_of_the_simulation(name):
    given, faults, weights = method(**METHODS[name]), federated.Faults(lost=0.25), range(1, 6)
    sim = federated.Simulation(
        given, params(), CLIENTS, data, key=3, weights=weights, faults=faults, messages=1_000
    )
    expected = sim.run(6)
    assert 0 < sum(r.accepted for r in expected) < sum(r.sampled for r in expected)
    strategy = strategy_of(given, key=3, weights=weights)
    strategy.start(grid_of(given, faults), num_rounds=6)
    assert sha(strategy.params) == sha(sim.params)
    assert sha(strategy.state) == sha(sim.state)
    got = strategy.reports
    assert [r._replace(loss=0) for r in got] == [r._replace(loss=0) for r in expected]
    assert (strategy.up, strategy.down) == (sim.ledger.up, sim.ledger.down)


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


def answer_with(reply, payload=None, stype="jaxcomp.payload/1", dtype="uint8", **changed):
    """A copy of an answer, with something else in it."""
    was = reply.content["jaxcomp.answer"]
    config = {**was, **changed}
    found = reply.content["jaxcomp.payload"]
    data = found["0"].data if payload is None and found else payload
    array = Array(dtype=dtype, shape=(len(data or b""),), stype=stype, data=data or b"")
    return message_of(reply.metadata.src_node_id, config, {"0": array})


def message_of(node, config, arrays):
    content = RecordDict(
        {"jaxcomp.answer": ConfigRecord(config), "jaxcomp.payload": ArrayRecord(arrays)}
    )
    return from_node(content, node)


def from_node(content, node):
    asked = Message(RecordDict(), dst_node_id=node, message_type="train")
    return Message(content, reply_to=asked)


def hostile(replies, old, count, seed):
    """So many answers of all kinds that no client gives, made of good answers of both rounds."""
    draw = np.random.default_rng(seed)
    kinds = [
        lambda r, o: answer_with(o),  # Of another round.
        lambda r, o: answer_with(r, payload=o.content["jaxcomp.payload"]["0"].data),  # Replayed.
        lambda r, o: answer_with(r, payload=bytes_flipped(r, draw)),
        lambda r, o: answer_with(r, payload=r.content["jaxcomp.payload"]["0"].data[:-5]),
        lambda r, o: answer_with(r, payload=draw.bytes(50)),
        lambda r, o: answer_with(r, payload=b"\0" * 10**5),
        lambda r, o: answer_with(r, client=int(draw.integers(-9, 2**40))),
        lambda r, o: answer_with(r, round=int(draw.integers(7, 2**62))),
        lambda r, o: answer_with(r, upon=7),
        lambda r, o: answer_with(r, round="0"),
        lambda r, o: answer_with(r, loss=[1.0]),
        lambda r, o: answer_with(r, status="won"),
        lambda r, o: answer_with(r, status="lost"),  # With a message all the same.
        lambda r, o: answer_with(r, stype="numpy.ndarray"),
        lambda r, o: answer_with(r, dtype="float32"),
        lambda r, o: from_node(RecordDict(), r.metadata.src_node_id),
        lambda r, o: from_node(r.content, 666),
        lambda r, o: from_node(Error(0, "x" * 9999), r.metadata.src_node_id),
    ]
    for _ in range(count):
        pick = draw.integers(len(kinds)), draw.integers(len(replies)), draw.integers(len(old))
        yield kinds[pick[0]](replies[pick[1]], old[pick[2]])


def memory():
    """The bytes of this process that belong to it alone."""
    text = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def bytes_flipped(reply, draw):
    data = bytearray(reply.content["jaxcomp.payload"]["0"].data)
    data[draw.integers(len(data))] ^= 1 << draw.integers(8)
    return bytes(data)


@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_hostile_answers_change_no_bit_of_the_result(count):
    given, rounds = method(), 4
    grid, strategy = grid_of(given), strategy_of(given)
    first, used = [], []

    def spoil(replies):
        if not first:
            first.extend(replies)
            return replies
        bad = hostile(replies, first, count // (rounds - 1), len(strategy.reports))
        used.append(memory())
        return itertools.chain(bad, replies, replies)  # And every answer twice.

    grid.spoil = spoil
    strategy.start(grid, num_rounds=rounds)
    used.append(memory())
    assert used[-1] - used[0] < 50e6
    expected = simulated(given, rounds)
    assert sha(strategy.state) == sha(expected.state)
    assert (strategy.up, strategy.down) == (expected.ledger.up, expected.ledger.down)
    assert strategy.refused.total() >= count - rounds
    kinds = {"wrong round", "wrong client", "malformed", "oversize", "wrong memory", "not asked"}
    assert kinds | {"repeated", "failed"} == set(strategy.refused)


def test_a_client_that_sends_what_is_not_finite_is_as_good_as_silent():
    given = method(up=jaxcomp.qsgd_inf(bits=4))
    grid, strategy = grid_of(given), strategy_of(given, largest=1e6)

    def spoil(replies):
        evil = {1: jnp.nan, 3: 1e7}
        return [spoiled(strategy, r, evil.get(r.metadata.src_node_id - 100)) for r in replies]

    grid.spoil = spoil
    strategy.start(grid, num_rounds=3)
    assert sha(strategy.params) == sha(simulated(given, 3, silent(1, 3)).params)
    assert strategy.refused == {"not finite": 6}


def test_the_influence_of_a_client_is_bounded_by_norm_and_weight():
    """It sends a huge update, and says that it is worth many clients."""
    norm = 0.05
    given = method(
        up=jaxcomp.qsgd_inf(bits=4), down=None, aggregate=jaxcomp.aggregates.ClippedMean(norm)
    )

    def ended(value):
        grid, strategy = grid_of(given), strategy_of(given)

        def spoil(replies):
            evil = {1: value}
            return [
                answer_with(
                    spoiled(strategy, r, evil.get(r.metadata.src_node_id - 100)),
                    **{"weight": 1e9, "num-examples": 10**9},
                )
                for r in replies
            ]

        grid.spoil = spoil
        strategy.start(grid, num_rounds=1)
        assert strategy.reports[0].accepted == CLIENTS
        return strategy.params

    honest, moved = ended(None), ended(1e7)
    assert sha(honest) == sha(simulated(given, 1).params)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, honest, moved))
    assert 0.1 * norm / CLIENTS < difference <= 2 * norm / CLIENTS * 1.001


def spoiled(strategy, reply, value):
    """The answer of a client that knows everything, with a message of this value."""
    if value is None:
        return reply
    like = jax.tree.map(lambda x: jnp.full(x.shape, value), params())
    up, config = strategy.method.uplink.policy, reply.content["jaxcomp.answer"]
    secret = flower.records.secret_of(None, strategy._run, config["round"], config["client"])
    payload = jaxcomp.to_bytes(up, jaxcomp.encode(up, 0, like), like, secret=secret)
    return answer_with(reply, payload=payload)


def test_clients_that_fail_or_stay_away_are_left_out():
    given, grid = method(), grid_of(method())
    strategy = strategy_of(given, min_available_nodes=2)
    grid.spoil = lambda replies: [r for r in replies if r.metadata.src_node_id != 101]
    grid.away = {103}
    strategy.start(grid, num_rounds=1)  # A node that is not there has no number yet.
    assert [r.accepted for r in strategy.reports] == [3]
    grid.spoil, grid.away = list, {100, 101, 102}
    broken = grid.apps[104]
    grid.apps[104] = lambda: lambda message, context: Message(Error(1, "boom"), reply_to=message)
    strategy.start(grid, num_rounds=1)
    grid.away, grid.apps[104] = set(), broken
    strategy.start(grid, num_rounds=1)
    assert [r.accepted for r in strategy.reports] == [3, 1, 5]
    assert strategy.refused == {"failed": 1}


def test_an_answer_that_is_lost_on_the_way_is_a_refused_message():
    given = method(down=None)
    grid, strategy = grid_of(given), strategy_of(given)
    grid.spoil = lambda replies: [r for r in replies if r.metadata.src_node_id != 102]
    strategy.start(grid, num_rounds=4)
    assert sha(strategy.state) == sha(simulated(given, 4, silent(2)).state)


def test_a_restarted_node_gets_the_whole_model_and_begins_with_a_new_memory():
    given = method(up=jaxcomp.qsgd_inf(bits=4))  # Without a memory, but that of its optimizer.
    grid, strategy = grid_of(given), strategy_of(given)
    strategy.start(grid, num_rounds=2)
    grid.contexts[104] = context_of(104)
    strategy.start(grid, num_rounds=2)
    assert [r.accepted for r in strategy.reports] == [5, 5, 4, 5]
    assert strategy.refused == {"behind": 1}
    whole = sum(x.nbytes for x in jax.tree.leaves(params()))
    assert strategy.reports[0].down == CLIENTS * whole
    assert strategy.reports[3].down > whole > strategy.reports[2].down / CLIENTS


def test_a_restarted_node_is_refused_if_the_server_mirrors_its_memory():
    given = method(**METHODS["shift"])
    grid, strategy = grid_of(given), strategy_of(given)
    strategy.start(grid, num_rounds=4)
    grid.contexts[100] = context_of(100)
    strategy.start(grid, num_rounds=4)
    assert set(strategy.refused) == {"behind", "memory lost"}


def test_only_who_knows_the_secret_is_a_client():
    given = method()

    def secret(number):
        return hashlib.sha256(bytes([number])).digest()

    def build(client_secret, **more):
        grid = grid_of(given, secret=client_secret)
        numbers = {100 + n: n for n in range(CLIENTS)}
        return grid, strategy_of(given, numbers=numbers, secrets=secret, **more)

    grid, strategy = build(lambda context: secret(context.node_id - 100))
    strategy.start(grid, num_rounds=3)
    assert sha(strategy.state) == sha(simulated(given, 3).state)
    other = strategy_of(given, numbers={100 + n: n for n in range(CLIENTS)})
    other.start(grid, num_rounds=1)
    assert other.refused == {"failed": CLIENTS}  # They do not follow a server without it.
    grid, strategy = build(None)
    strategy.start(grid, num_rounds=1)
    assert strategy.refused == {"malformed": CLIENTS}


def test_nodes_have_the_numbers_that_are_given():
    given = method()
    grid = grid_of(given, nodes=CLIENTS + 2)
    strategy = strategy_of(given)
    strategy.start(grid, num_rounds=1)
    assert strategy.reports[0].accepted == CLIENTS  # Two more have no place.
    numbers = {106 - n: n for n in range(CLIENTS)}
    strategy = strategy_of(given, numbers=numbers)
    strategy.start(grid, num_rounds=2)
    assert sha(strategy.params) == sha(simulated(given, 2).params)


def test_an_app_of_ones_own_trains_behind_the_mod():
    given = method()
    work = given.work

    def app():
        app = flower.extra.ClientApp()

        @app.train(mods=[flower.compress_mod(elsewhere, params())])
        def train(message, context):
            assert message.content["config"]["server-round"] > 0
            start = flower.params_of(message.content["arrays"], params())
            number = context.node_id - 100
            round_ = message.content["config"]["server-round"] - 1
            end, _, losses = jax.jit(work.run)(
                start, work.init(start), batches(None, number, round_), STEPS
            )
            metrics = flower.extra.MetricRecord({"loss": float(losses[0]), "num-examples": 9})
            content = RecordDict({"arrays": flower.arrays_of(end), "metrics": metrics})
            return Message(content, reply_to=message)

        return app

    elsewhere = federated.Method(flower.ELSEWHERE, given.up, down=given.down)
    strategy = flower.CompressedFedAvg(elsewhere, params(), CLIENTS, min_available_nodes=CLIENTS)
    strategy.start(Grid({100 + node: app for node in range(CLIENTS)}), num_rounds=3)
    plain = federated.Method(
        federated.LocalSteps(loss, optax.sgd(0.1, momentum=0.9)), given.up, down=given.down
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
        strategy.params,
        simulated(plain, 3).params,
    )
    assert all(0 < r.loss < 2 for r in strategy.reports)


def test_the_programs_of_the_page_train(capsys):
    """`docs/flower.md`: a task, a client and a server; and an app of one's own."""
    page = re.sub(r"from \.task .*", "", (ROOT / "docs" / "flower.md").read_text())
    task, client, server, own = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict = {}
    exec(task + client, names)
    app = names["app"]
    exec(server, names)
    names["main"](Grid({100: lambda: app, 101: lambda: app}), None)
    said = capsys.readouterr().out
    assert "Report(round=4, sampled=2, accepted=2" in said
    assert said.rstrip().endswith("{}")
    exec(own, names)
    start = names["params"]()
    strategy = flower.CompressedFedAvg(names["METHOD"], start, 2)
    strategy.start(Grid({100: lambda: names["app"], 101: lambda: names["app"]}), num_rounds=2)
    assert [report.accepted for report in strategy.reports] == [2, 2]
    moved = np.asarray(strategy.params["hidden"] != start["hidden"])
    assert moved.mean() == pytest.approx(0.1, abs=0.02)  # 5 % in each of two rounds.


WRONG = {
    "faults": lambda: grid_of(method(), federated.Faults(old=0.5, longest=2)).apps[100](),
    "method": lambda: flower.CompressedFedAvg(None, params(), 2),
    "clients": lambda: flower.CompressedFedAvg(method(), params(), 0),
    "min_available_nodes": lambda: strategy_of(method(), min_available_nodes=9),
    "largest": lambda: strategy_of(method(), largest=-1.0),
    "numbers": lambda: strategy_of(method(), secrets=lambda number: b"0" * 16),
    "weights": lambda: strategy_of(method(), weights=[1, 2]),
    "replies": lambda: strategy_of(method()).aggregate_train(1, []),
    "arrays": lambda: flower.params_of(flower.arrays_of(params()), {"w": params()["w"]}),
    "data": lambda: flower.raw.read(b"123", params()),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_an_error_that_names_the_argument(name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        WRONG[name]()


def test_what_a_server_sends_is_checked():
    app = grid_of(method()).apps[100]()
    with pytest.raises(ValueError, match="must come from jaxcomp"):
        app(Message(RecordDict(), dst_node_id=100, message_type="train"), context_of(100))

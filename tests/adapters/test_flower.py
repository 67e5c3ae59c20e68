"""Flower's adapters have the simulation's bits, whoever fails, stays away or begins again."""

import dataclasses
import hashlib
import re

import jax
import numpy as np
import optax
import pytest
from helpers.nodes import (
    CLIENTS,
    STEPS,
    Grid,
    batches,
    context_of,
    data,
    grid_of,
    identity,  # noqa: F401
    loss,
    method,
    params,
    sha,
    silent,
    simulated,
    strategy_of,
)
from helpers.paths import ROOT

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    RecordDict,
)

from jaxcomp.adapters import flower

METHODS = {
    "top_k": {"sampling": federated.Exactly(3)},
    "qsgd": {"up": jaxcomp.qsgd_inf(bits=4), "down": None},
    "shift": {
        "up": jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(step=0.25)),
        "mean": "all",
        "sampling": federated.Independently(0.6),
        "server": optax.adam(0.1),
    },
    "predictors": {
        "up": federated.Uplink(
            jaxcomp.Policy(jaxcomp.codecs.BestOf(rate=0.1), min_size=64, min_ndim=0),
            federated.Predictors(),
        ),
        "down": None,
        "sampling": federated.Exactly(3),
    },
    "trimmed": {
        "up": jaxcomp.qsgd_inf(bits=8),
        "sampling": federated.Independently(0.8),
        "aggregate": jaxcomp.aggregates.TrimmedMean(0.2),
    },
}


@pytest.mark.core("qsgd")
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


def forged(reply):
    """The answer of somebody in the name of a client: that it could not follow."""
    said = {**reply.content["jaxcomp.answer"], "status": "behind"}
    content = {"jaxcomp.answer": ConfigRecord(said), "jaxcomp.payload": ArrayRecord()}
    node = reply.metadata.src_node_id
    asked = Message(RecordDict(), dst_node_id=node, message_type="train")
    return Message(RecordDict(content), reply_to=asked)


def test_only_who_knows_the_secret_is_a_client():
    given = method()

    def secret(number):
        return hashlib.sha256(bytes([number])).digest()

    def build(client_secret, **more):
        grid = grid_of(given, secret=client_secret)
        numbers = {100 + n: n for n in range(CLIENTS)}
        return grid, strategy_of(given, numbers=numbers, secrets=secret, **more)

    grid, strategy = build(lambda context: secret(context.node_id - 100))
    grid.spoil = lambda replies: [*map(forged, replies), *replies]
    strategy.start(grid, num_rounds=3)
    assert sha(strategy.state) == sha(simulated(given, 3).state)
    assert strategy.refused == {"malformed": 3 * CLIENTS}
    grid.spoil = list
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


@pytest.mark.full
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
    strategy = flower.CompressedFedAvg(
        elsewhere,
        params(),
        CLIENTS,
        min_available_nodes=CLIENTS,
        weighted_by_key="num-examples",  # Who does not report it is refused.
    )
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


def test_counters_of_an_app_are_sent_as_they_are():
    """A codec of all leaves, a policy's `rest`, and Adam on the server do not touch them."""
    start = {"w": np.ones((4, 8), np.float32), "norm": {"[0]": np.int64(7)}}
    policy = jaxcomp.Policy(jaxcomp.sign(), min_size=0, min_ndim=0, rest=jaxcomp.sign())
    given = federated.Method(flower.ELSEWHERE, policy, optax.adam(0.1), down=jaxcomp.sign())
    seen = []

    def app():
        app = flower.extra.ClientApp()

        @app.train(mods=[flower.compress_mod(given, start)])
        def train(message, context):
            arrays = flower.params_of(message.content["arrays"], start)
            seen.append(arrays["norm"]["[0]"])
            steps = 2 if context.node_id == 100 else 5
            end = {"w": arrays["w"] * 0.9, "norm": {"[0]": np.int32(seen[-1] + steps)}}
            return Message(RecordDict({"arrays": flower.arrays_of(end)}), reply_to=message)

        return app

    strategy = flower.CompressedFedAvg(given, start, 2)
    strategy.start(Grid({100: app, 101: app}), num_rounds=2)
    assert [report.accepted for report in strategy.reports] == [2, 2]
    assert all(count.dtype == np.int64 for count in seen)
    # Means of 2 and 5 are not rounded from round to round: 7, 10.5, 14.
    assert sorted(map(int, seen)) == [7, 7, 10, 10]
    count = strategy.params["norm"]["[0]"]
    assert (count.dtype, int(count)) == (np.int64, 14)
    np.testing.assert_allclose(strategy.params["w"], 0.8, atol=0.01)  # Two steps of Adam.

    with pytest.raises(ValueError, match=r"`like` must have no integers.*norm/\[0\].*compress_mod"):
        flower.client_app(given, start, batches)
    with pytest.raises(ValueError, match=r"at most 16,777,216, got 'norm/\[0\]'"):
        flower.CompressedFedAvg(given, {**start, "norm": {"[0]": np.int64(2**24 + 1)}}, 2)
    other = dataclasses.replace(given, signal=lambda start, end: end)
    with pytest.raises(ValueError, match="`signal` must be the default with integers"):
        flower.compress_mod(other, start)


@pytest.mark.full
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

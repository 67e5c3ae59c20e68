"""The server on Flower: who is drawn, what outlives it, and what clients report."""

import dataclasses
import math
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from helpers.nodes import (
    CLIENTS,
    context_of,
    data,
    grid_of,
    identity,  # noqa: F401
    method,
    params,
    sha,
    simulated,
    strategy_of,
)

import jaxcomp
from jaxcomp import federated
from jaxcomp.numerics import noise

pytest.importorskip("flwr")
from flwr.app import Error, Message, MetricRecord, RecordDict

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower.seats import Seats

SHIFT = {
    "up": jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(step=0.25)),
    "mean": "all",
    "sampling": federated.Independently(0.6),
}


@pytest.mark.parametrize(
    "sampling",
    [federated.Everyone(), federated.Exactly(7), federated.Independently(0.3)],
    ids=["everyone", "exactly", "independently"],
)
def test_a_draw_from_all_clients_is_the_simulations_and_one_from_some_is_among_them(sampling):
    everyone, some = np.arange(100), np.arange(3, 100, 9)
    for number in range(20):
        key = noise.fold(noise.raw(1), number)
        cohort = sampling.cohort(key, 100)
        np.testing.assert_array_equal(sampling.among(key, 100, everyone), cohort)
        drawn = sampling.among(key, 100, some)
        assert set(drawn) <= set(some)
        assert set(cohort) & set(some) <= set(drawn)
        if isinstance(sampling, federated.Exactly):
            assert len(drawn) == 7
            assert set(sampling.among(key, 100, some[:4])) == set(some[:4])


@dataclasses.dataclass(frozen=True)
class Same(federated.Sampling):
    """In each round the clients that took part in another training."""

    rounds: list = dataclasses.field(compare=False)

    def cohort(self, key, clients):
        return np.array(self.rounds.pop(0))

    def expected(self, clients):
        return 3.0


def test_clients_are_drawn_from_those_that_are_connected():
    """Five of 16 are there: a draw of three from all would mostly find nobody or one."""
    given, drawn = method(sampling=federated.Exactly(3)), []
    grid = grid_of(given)
    strategy = flower.CompressedFedAvg(given, params(), 16, min_available_nodes=1)

    def listen(replies):
        drawn.append(sorted(r.metadata.src_node_id - 100 for r in replies))
        return replies

    grid.spoil = listen
    strategy.start(grid, num_rounds=5)
    assert [(r.sampled, r.accepted) for r in strategy.reports] == [(3, 3)] * 5
    assert len(set(map(tuple, drawn))) > 2
    same = dataclasses.replace(given, sampling=Same(drawn))
    sim = federated.Simulation(same, params(), 16, data, messages=1_000)
    sim.run(5)
    assert sha(strategy.state) == sha(sim.state)


def test_a_node_keeps_its_number_and_the_one_that_is_away_longest_loses_it():
    seats = Seats(3)
    assert seats.seat([10, 11, 12]) == {0: 10, 1: 11, 2: 12}
    assert seats.seat([12, 10]) == {0: 10, 2: 12}
    assert seats.seat([12]) == {2: 12}
    assert seats.seat([11, 12]) == {1: 11, 2: 12}
    assert seats.seat([12, 13]) == {0: 13, 2: 12}
    moved = Seats(3)
    moved.take(seats.save())
    assert moved.seat([10, 12]) == {1: 10, 2: 12}  # 13 was there later than 11.
    lasting = Seats(2, lasting=True)
    assert lasting.seat([10, 11]) == {0: 10, 1: 11}
    assert lasting.seat([12, 11]) == {1: 11}


def dies(replies):
    """The server ends in the middle of a round, when the clients have done their work."""
    yield replies[0]
    raise ConnectionError("the server dies")


@pytest.mark.core("residual")
@pytest.mark.parametrize("name", ["residual", "shift"])
def test_a_server_goes_on_from_its_checkpoint_bit_for_bit(name, tmp_path):
    """With a shift in another run of Flower, whose contexts are new: the memory is in files."""
    given = method(**SHIFT) if name == "shift" else method()
    files = {"memory": lambda context: tmp_path / f"{context.node_id}"} if name == "shift" else {}
    metrics = {"metrics": lambda context, number, round: {"x": math.inf, "many": [0.5, 2.0]}}
    grid = grid_of(given, **files, **metrics)
    first = strategy_of(given, key=4, checkpoint=tmp_path / "server")
    first.restore(tmp_path / "server", missing_ok=True)
    first.start(grid, num_rounds=2)
    grid.spoil = dies
    with pytest.raises(ConnectionError):
        first.start(grid, num_rounds=1)
    grid.spoil = list
    if files:
        assert not any(context.state for context in grid.contexts.values())
        grid.contexts = {node: context_of(node) for node in grid.contexts}
    with pytest.raises(AttributeError):
        first.state = first.state
    second = strategy_of(given, checkpoint=tmp_path / "server")  # The key is the checkpoint's.
    with pytest.raises(ValueError, match="would be overwritten"):
        second.start(grid, num_rounds=1)
    second.restore(tmp_path / "server", missing_ok=True)
    second.start(grid, num_rounds=3)
    assert second.refused == {}
    sim = federated.Simulation(given, params(), CLIENTS, data, key=4, messages=1_000)
    sim.run(5)
    assert sha(second.state) == sha(sim.state)
    assert second.up == sim.ledger.up


def test_a_round_that_failed_is_repeated_with_the_same_messages():
    given = method()
    grid, strategy = grid_of(given), strategy_of(given)
    strategy.start(grid, num_rounds=1)
    grid.spoil = dies
    for _ in range(2):
        with pytest.raises(ConnectionError):
            strategy.start(grid, num_rounds=1)
    grid.spoil = list
    strategy.start(grid, num_rounds=2)
    assert sha(strategy.state) == sha(simulated(given, 3).state)


def test_an_old_instruction_does_not_destroy_a_later_memory():
    """Flower delivers a message as long as it lives, also after those of later rounds."""
    given = method()
    grid, strategy, old = grid_of(given), strategy_of(given), []
    plain = grid.send_and_receive

    def send_and_receive(messages, *, timeout=None):
        if not messages:  # To evaluate.
            return []
        replies = plain(messages)
        late = plain(old)
        assert len(late) == len(old)
        assert all("older" in reply.error.reason for reply in late)
        old.extend(messages)
        return replies

    grid.send_and_receive = send_and_receive
    strategy.start(grid, num_rounds=3)
    assert sha(strategy.state) == sha(simulated(given, 3).state)


def test_clients_with_a_later_memory_than_the_server_begin_anew_or_are_refused(tmp_path):
    for given, kinds in ((method(), set()), (method(**SHIFT), {"memory lost"})):
        grid, first = grid_of(given), strategy_of(given)
        first.start(grid, num_rounds=1)
        first.save(tmp_path / "old")
        first.start(grid, num_rounds=2)
        second = strategy_of(given)
        second.restore(tmp_path / "old")
        second.start(grid, num_rounds=2)
        assert set(second.refused) == kinds
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(second.params))


def test_clients_report_metrics_and_if_asked_their_weight():
    given = method(up=jaxcomp.qsgd_inf(bits=4))
    weights = np.arange(1, CLIENTS + 1)

    def metrics(context, number, round):
        return {"num-examples": int(weights[number]), "tokens": 2.0 * number, "accepted": 99}

    grid = grid_of(given, metrics=metrics)
    strategy = strategy_of(given, weighted_by_key="num-examples")
    result = strategy.start(grid, num_rounds=2)
    sim = federated.Simulation(given, params(), CLIENTS, data, weights=weights, messages=1_000)
    sim.run(2)
    assert sha(strategy.params) == sha(sim.params)
    found = result.train_metrics_clientapp[2]
    assert found["tokens"] == pytest.approx(2 * np.average(range(CLIENTS), weights=weights))
    assert "num-examples" not in found
    assert found["accepted"] == CLIENTS

    def most(contents, key):
        assert key == "num-examples"
        return MetricRecord({"most": max(c["metrics"]["tokens"] for c in contents)})

    other = strategy_of(given, train_metrics_aggr_fn=most)
    assert other.start(grid, num_rounds=1).train_metrics_clientapp[1]["most"] == 8.0
    sim = federated.Simulation(given, params(), CLIENTS, data, messages=1_000)
    sim.run(1)
    assert sha(other.params) == sha(sim.params)  # No say without `weighted_by_key`.


@pytest.mark.parametrize(
    "said", [{}, {"examples": -1.0}, {"examples": [1.0]}, {"many": [0.0] * 2000}]
)
def test_what_a_client_reports_is_checked(said):
    given = method(up=jaxcomp.qsgd_inf(bits=4))

    def metrics(context, number, round):
        return said if number == 2 else {"examples": 1}

    strategy = strategy_of(given, weighted_by_key="examples")
    strategy.start(grid_of(given, metrics=metrics), num_rounds=1)
    assert strategy.refused == {"malformed": 1}
    assert strategy.reports[0].accepted == CLIENTS - 1


def test_a_node_that_is_killed_is_called_unavailable():
    """Flower's SuperLink then answers as itself, to the message that had no answer."""
    given = method(up=jaxcomp.qsgd_inf(bits=4))
    grid, strategy = grid_of(given), strategy_of(given)
    link = Message(RecordDict(), dst_node_id=1, message_type="train")
    plain = grid.send_and_receive

    def send_and_receive(messages, *, timeout=None):
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message {number}"
        gone = Message(Error(5, "node unavailable"), reply_to=link)
        gone.metadata.__dict__["_reply_to_message_id"] = "message 3"
        return [*list(plain(messages))[2:], gone]

    grid.send_and_receive = send_and_receive
    strategy.start(grid, num_rounds=1)
    assert strategy.refused == {"unavailable": 1}
    assert strategy.reports[0].accepted == CLIENTS - 2


HOLDER = """
import os, sys, time
from jaxcomp_files.versions import Versions
held = Versions(sys.argv[1], "federated", patience=9.0)
held.own()
print("held", flush=True)
time.sleep(60 if os.fork() else 15)  # The lock ends with the process, not with its children.
"""


def test_two_servers_do_not_train_with_one_checkpoint(tmp_path):
    """The second waits for the end of the first, such as one that was killed and lives on."""
    folder = tmp_path / "server"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            strategy = strategy_of(method(), checkpoint=folder)
            strategy._checkpoints._patience = 0.5
            says = f"`checkpoint` must be a folder with .* owner is process {other.pid}"
            for use in (strategy.restore, strategy.save):
                with pytest.raises(ValueError, match=says):
                    use(folder)
            threading.Timer(0.5, other.kill).start()
            strategy._checkpoints._patience = 5.0
            strategy.start(grid_of(method()), num_rounds=1)
            assert other.poll() is not None
        finally:
            other.kill()
    again = strategy_of(method(), checkpoint=folder)
    again.restore(folder)  # The lock is that of a process.
    assert sha(again.params) == sha(strategy.params)
    with pytest.raises(ValueError, match=r"which process .* has taken over"):
        strategy.start(grid_of(method()), num_rounds=1)


def test_a_server_that_is_killed_in_its_first_round_goes_on_with_it(tmp_path):
    """What its clients did in that round is of its training, and none of them works twice."""
    given, worked = method(), []

    def metrics(context, number, round):
        worked.append((number, round))
        return {}

    memory = {"memory": lambda context: tmp_path / f"{context.node_id}"}
    grid = grid_of(given, metrics=metrics, **memory)
    grid.spoil = dies
    for _ in range(2):
        strategy = strategy_of(given, key=4, checkpoint=tmp_path / "server")
        strategy.restore(tmp_path / "server", missing_ok=True)
        with pytest.raises(ConnectionError):
            strategy.start(grid, num_rounds=1)
    grid.spoil = list
    strategy = strategy_of(given, key=4, checkpoint=tmp_path / "server")
    strategy.restore(tmp_path / "server")
    strategy.start(grid, num_rounds=2)
    assert sorted(worked) == [(number, round) for number in range(CLIENTS) for round in range(2)]
    sim = federated.Simulation(given, params(), CLIENTS, data, key=4)
    sim.run(2)
    assert sha(strategy.state) == sha(sim.state)

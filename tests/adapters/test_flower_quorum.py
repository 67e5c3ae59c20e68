"""Rounds that end at a quorum or a deadline: late messages, and where every update is."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.nodes import Grid, identity, params, strategy_of  # noqa: F401

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import Error, Message

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import closing, raw, records
from jaxcomp.federated import block
from jaxcomp_site import polling

SITES, FEATURES = 4, 96
WORK = federated.LocalSteps(lambda w, x: -jnp.sum(w * x), optax.sgd(1.0))
CODEC = jaxcomp.Link(
    jaxcomp.Policy(jaxcomp.top_k(fraction=0.25), min_size=0, min_ndim=1), jaxcomp.Residual()
)
METHOD = federated.Method(WORK, CODEC, mean="all", staleness=0.0)
"""A site's update is the sum of its data, in whole numbers; the server takes a quarter of a sum."""


def given(number, round):
    return np.random.default_rng([number, round]).integers(-9, 10, (2, FEATURES))


def batches(context, number, round):
    del context
    return given(number, round).astype(np.float32)


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


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(polling, "SOONEST", 0.01)
    monkeypatch.setattr(closing, "Thread", AtOnce)


def grid_of(method, due, nodes=SITES):
    def app():
        return flower.client_app(method, np.zeros(FEATURES, np.float32), batches)

    return SlowGrid({100 + node: app for node in range(nodes)}, due)


def trained(due, rounds, method=METHOD, nodes=SITES, **settings):
    """The strategy and the grid after these rounds."""
    grid = grid_of(method, due, nodes)
    quorum = flower.Quorum(**{"messages": SITES, "deadline": 60.0, **settings})
    strategy = flower.CompressedFedAvg(
        method, np.zeros(FEATURES, np.float32), SITES, quorum=quorum, min_available_nodes=1
    )
    strategy.start(grid, num_rounds=rounds)
    return strategy, grid


def residual_of(strategy, grid, client):
    """What a site's residual holds, given what the server has accepted, and its last round."""
    state = grid.contexts[100 + client].state
    if "jaxcomp.state" not in state:
        return np.zeros(FEATURES), -1
    kept = state["jaxcomp.state"]
    taken = kept["round"] == strategy._seats.accepted[client]
    tree = records.bytes_of(
        state["jaxcomp.memory"]["accepted" if taken else "refused"], records.MEMORY
    )
    like = jax.eval_shape(lambda p: block.init(METHOD, p).memory, np.zeros(FEATURES, np.float32))
    found = raw.read(tree, like)
    return np.asarray(sum(jax.tree.leaves(found.feedback))).reshape(-1), kept["round"]


def check_balance(strategy, grid):
    """What all sites gave is what the centre got and what residuals hold, in whole numbers."""
    gave = sum(given(node - 100, round).sum(0) for round, node in grid.told)
    got = SITES * np.asarray(strategy.params, np.float64)
    held = sum(residual_of(strategy, grid, client)[0] for client in range(SITES))
    # A site sends what it moves against, as a gradient.
    np.testing.assert_array_equal(got - held, gave)


def test_a_round_without_late_sites_is_that_without_a_quorum():
    on_time, _ = trained(lambda round, node: round, 3)
    plain = flower.CompressedFedAvg(METHOD, np.zeros(FEATURES, np.float32), SITES)
    plain.start(grid_of(METHOD, None), num_rounds=3)
    np.testing.assert_array_equal(on_time.params, plain.params)
    assert not on_time.late
    assert [report.accepted for report in on_time.reports] == [SITES] * 3


def test_a_quorum_ends_a_round_and_late_messages_count_in_a_later_one():
    """One of four is late by one round: it is not asked again before it has answered."""
    slow = 103
    strategy, grid = trained(lambda round, node: round + (node == slow), 4, messages=3)
    asked = [round for round, node in grid.told if node == slow]
    assert asked == [0, 2]
    assert dict(strategy.late) == {1: 2}
    assert [report.accepted for report in strategy.reports] == [3, 4, 3, 4]
    check_balance(strategy, grid)


def test_late_messages_weigh_less():
    """The first message of one site arrives two rounds later, alone of its kind."""
    method = dataclasses.replace(
        METHOD, up=jaxcomp.Policy(None), mean="participants", staleness=0.5
    )
    strategy, _ = trained(lambda round, node: round + 2 * (node == 103), 3, method, messages=3)
    whole = [sum(given(n, r).sum(0) for n in range(3)) for r in range(3)]
    late, weight = given(3, 0).sum(0), 3**-0.5
    want = whole[0] / 3 + whole[1] / 3 + (whole[2] + weight * late) / (3 + weight)
    np.testing.assert_allclose(strategy.params, want, rtol=1e-5, atol=1e-5)


def test_too_late_messages_are_refused_by_name_and_stay_in_the_residual():
    strategy, grid = trained(
        lambda round, node: round + 2 * (node == 103 and round == 0), 4, messages=3, oldest=1
    )
    assert strategy.refused["late"] == 1
    assert not strategy.late
    check_balance(strategy, grid)


def test_a_site_that_never_answers_is_asked_anew_after_the_patience():
    start = time.monotonic()
    strategy, grid = trained(
        lambda round, node: None if (round, node) == (0, 101) else round,
        8,
        messages=SITES,
        deadline=0.05,
        patience=0.12,
    )
    rounds = [round for round, node in grid.told if node == 101]
    assert rounds[0] == 0
    assert 2 <= rounds[1] <= 6
    assert time.monotonic() - start < 5
    check_balance(strategy, grid)


def test_the_answer_of_a_node_that_is_away_is_not_asked_for():
    """The SuperLink would delete it. The node comes back, and its message counts."""
    grid = grid_of(METHOD, lambda round, node: round + (node == 102))
    strategy = flower.CompressedFedAvg(
        METHOD,
        np.zeros(FEATURES, np.float32),
        SITES,
        quorum=flower.Quorum(3, 60.0),
        min_available_nodes=1,
    )
    for away in (set(), {102}, set()):
        grid.away = away
        strategy.start(grid, num_rounds=1)
    assert not grid.asked_away
    check_balance(strategy, grid)


def test_what_sites_give_is_what_the_centre_gets_and_residuals_hold(monkeypatch):
    """Sixty rounds of random delays and losses, in whole numbers, with threads as they come."""
    monkeypatch.setattr(closing, "Thread", threading.Thread)
    draw = np.random.default_rng(5)
    delays = {}

    def due(round, node):
        if (round, node) not in delays:
            delays[round, node] = draw.choice([0, 0, 0, 1, 2, 7, None])
        delay = delays[round, node]
        return None if delay is None else round + int(delay)

    strategy, grid = trained(due, 60, messages=2, deadline=0.02, patience=0.05, oldest=3)
    assert sum(strategy.late.values()) > 5
    check_balance(strategy, grid)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: flower.Quorum(0, 1.0), "`messages`"),
        (lambda: flower.Quorum(1, 0.0), "`deadline`"),
        (lambda: flower.Quorum(1, 9.0, patience=3.0), "`patience`"),
        (lambda: flower.Quorum(1, 9.0, oldest=-1), "`oldest`"),
        (lambda: strategy_of(METHOD, quorum=3), "`quorum`"),
        (lambda: strategy_of(METHOD, weight_of=3), "`weight_of`"),
        (
            lambda: strategy_of(METHOD, weight_of=federated.tokens_squared_per_step),
            "`weight_of` must be None with a mean over",
        ),
        (
            lambda: strategy_of(
                federated.Method(WORK, jaxcomp.qsgd_inf(bits=4)),
                weight_of=len,
                weighted_by_key="n",
            ),
            "`weight_of` must be None beside",
        ),
        (
            lambda: strategy_of(
                federated.Method(
                    WORK, jaxcomp.Link(jaxcomp.qsgd_inf(bits=4), jaxcomp.Shift(0.25)), mean="all"
                ),
                quorum=flower.Quorum(3, 1.0),
            ),
            "`oldest` must be 0 with a Shift",
        ),
    ],
)
def test_wrong_settings(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_site_weighs_what_a_function_makes_of_its_numbers():
    """Tokens² / steps; a site that reports something else is refused by name."""
    reports = {0: {"tokens": 8, "steps": 2}, 1: {"tokens": 4, "steps": 4}, 2: {"tokens": 3}}
    method = federated.Method(WORK, jaxcomp.Policy(None))

    def app():
        return flower.client_app(
            method,
            np.zeros(FEATURES, np.float32),
            batches,
            metrics=lambda context, number, round: reports[number],
        )

    strategy = flower.CompressedFedAvg(
        method, np.zeros(FEATURES, np.float32), 3, weight_of=federated.tokens_squared_per_step
    )
    strategy.start(Grid({100 + node: app for node in range(3)}), num_rounds=1)
    assert strategy.refused == {"malformed": 1}
    want = (32 * given(0, 0).sum(0) + 4 * given(1, 0).sum(0)) / 36
    np.testing.assert_allclose(strategy.params, want, rtol=1e-6)


def secret_of(number):
    return bytes([number + 1]) * 16


class HostileGrid(SlowGrid):
    """The last node answers with garbage, with an old answer, in another's name, or not at all."""

    def __init__(self, lies):
        def app():
            return flower.client_app(
                METHOD,
                np.zeros(FEATURES, np.float32),
                batches,
                secret=lambda context: secret_of(context.node_id - 100),
            )

        super().__init__({100 + node: app for node in range(SITES)}, lambda round, node: round)
        self._lies, self._said = lies, {}

    def pull_messages(self, message_ids):
        (reply,) = super().pull_messages(message_ids)
        round, node = map(int, message_ids[0].split())
        self._said[round, node] = reply.content
        if node != 103:
            return [reply]
        if not self._lies:
            reply = Message(Error(0, "it says nothing"), reply_to=self.asked(message_ids[0]))
        elif round == 0:
            record = reply.content["jaxcomp.payload"]
            data = b"\xff" * len(record["0"].data)
            record["0"] = type(record["0"])("uint8", (len(data),), record["0"].stype, data)
        elif round == 1:
            reply.content = self._said[0, 100]
        elif round == 2:
            reply.content = self._said[2, 100]
        else:
            reply.content["jaxcomp.answer"]["loss"] = 0.0
        return [reply]

    def push_messages(self, messages):
        messages = list(messages)
        ids = super().push_messages(messages)
        self._asked = dict(zip(ids, messages, strict=True))
        return ids

    def asked(self, message):
        return self._asked[message]


def test_hostile_sites_are_refused_by_name_and_honest_ones_end_with_the_same_bits():
    ends, refused = [], []
    for lies in (True, False):
        strategy = flower.CompressedFedAvg(
            METHOD,
            np.zeros(FEATURES, np.float32),
            SITES,
            quorum=flower.Quorum(SITES, 60.0),
            numbers={100 + node: node for node in range(SITES)},
            secrets=secret_of,
            min_available_nodes=1,
        )
        strategy.start(HostileGrid(lies), num_rounds=4)
        ends.append(strategy.params)
        refused.append(dict(strategy.refused))
    np.testing.assert_array_equal(*ends)
    assert np.any(ends[0] != 0)
    assert refused == [{"malformed": 2, "wrong round": 1, "wrong client": 1}, {"failed": 4}]

"""Rounds that end at a quorum or a deadline: late messages, and where every update is."""

import dataclasses
import itertools
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.nodes import (
    AtOnce,
    Grid,
    SlowGrid,
    identity,  # noqa: F401
    strategy_of,
)

import jaxcomp
from jaxcomp import federated

pytest.importorskip("flwr")
from flwr.app import Error, Message

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import closing, raw, records, settings
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


def test_a_site_that_never_answers_is_asked_anew_after_the_patience(monkeypatch):
    start, ticks = time.monotonic(), itertools.count()
    # A clock that a busy machine does not hasten: each look takes a hundredth of a second.
    clock = types.SimpleNamespace(monotonic=lambda: next(ticks) / 100)
    monkeypatch.setattr(closing, "time", clock)
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


STREAMED = federated.Method(
    federated.LocalSteps(
        lambda w, x: -sum(jnp.sum(w[name] * x[name]) for name in w),
        optax.sgd(1.0),
        keep=True,
        offsets=True,
    ),
    jaxcomp.Policy(None),
    staleness=0.5,
    fragments=2,
)


def streamed_batches(context, number, round):
    del context
    draw = np.random.default_rng([number, round])
    return {name: draw.integers(-9, 10, (2, 8)).astype(np.float32) for name in "ab"}


def streamed_by_hand(due, rounds, oldest):
    """The centre in float64, with whose late messages count in the next round of their fragment."""
    names = "ab"
    centre = {name: np.zeros(8) for name in names}
    offset = {node: {name: np.zeros(8) for name in names} for node in range(SITES)}
    waits, late, working = dict.fromkeys(range(SITES)), {name: [] for name in names}, {}
    for round in range(rounds):
        for node in set(range(SITES)) - set(working):
            if waits[node] is not None:
                offset[node][waits[node]] = np.zeros(8)
            for name, x in streamed_batches(None, node, round).items():
                offset[node][name] = offset[node][name] + x.sum(0, dtype=np.float64)
            waits[node] = names[round % 2]
            working[node] = round, offset[node][waits[node]].copy()
        for node in [n for n, (asked, _) in working.items() if due(asked, 100 + n) <= round]:
            asked, moved = working.pop(node)
            age = -(-(round - asked) // 2)
            if age <= oldest:
                late[names[asked % 2]].append(((1 + age) ** -0.5, moved))
        name = names[round % 2]
        if late[name]:
            weights, moved = zip(*late[name], strict=True)
            centre[name] = centre[name] + np.average(moved, axis=0, weights=weights)
        late[name] = []
    return centre


def streamed(rounds, oldest, due, **given):
    def app():
        return flower.client_app(STREAMED, like, streamed_batches)

    like = {name: np.zeros(8, np.float32) for name in "ab"}
    quorum = flower.Quorum(messages=2, deadline=60.0, oldest=oldest)
    strategy = flower.CompressedFedAvg(
        STREAMED, like, SITES, quorum=quorum, min_available_nodes=1, **given
    )
    strategy.start(SlowGrid({100 + node: app for node in range(SITES)}, due), num_rounds=rounds)
    return strategy


def late_by_one_to_three(round, node):
    return round + {100: 0, 101: 0, 102: round % 3, 103: 1 + round % 3}[node]


@pytest.mark.parametrize("oldest", [1, 2])
def test_a_late_fragment_counts_in_the_next_round_of_its_fragment(oldest):
    strategy = streamed(9, oldest, late_by_one_to_three)
    want = streamed_by_hand(late_by_one_to_three, 9, oldest)
    for name in "ab":
        np.testing.assert_allclose(strategy.params[name], want[name], rtol=1e-6, atol=1e-5)
    assert strategy.late
    assert bool(strategy.refused["late"]) == (oldest == 1)


def test_late_fragments_that_wait_for_their_round_are_in_the_checkpoint(tmp_path):
    def due(round, node):
        return round + (node == 103)

    strategy = streamed(2, 2, due, checkpoint=tmp_path)
    waits = strategy._adder.pending
    assert [float(total.weight) for total in waits] == [pytest.approx(2**-0.5), 0.0]
    other = flower.CompressedFedAvg(
        STREAMED, strategy.params, SITES, quorum=flower.Quorum(2, 60.0, oldest=2)
    )
    other.restore(tmp_path)
    for one, two in zip(*map(jax.tree.leaves, (waits, other._adder.pending)), strict=True):
        np.testing.assert_array_equal(one, two)
    plain = flower.CompressedFedAvg(
        STREAMED, strategy.params, SITES, quorum=flower.Quorum(2, 60.0, oldest=0)
    )
    assert plain._adder.pending == ()


def test_late_messages_of_a_shift_move_shift_and_mirror_alike():
    """The mirror is the mean of what all sites have shifted by."""
    link = jaxcomp.Link(
        jaxcomp.Policy(jaxcomp.random_k(fraction=0.25), min_size=0, min_ndim=1), jaxcomp.Shift(0.5)
    )
    method = dataclasses.replace(METHOD, up=link)
    grid = grid_of(method, lambda round, node: round + (node == 103))
    strategy = flower.CompressedFedAvg(
        method,
        np.zeros(FEATURES, np.float32),
        SITES,
        quorum=flower.Quorum(messages=3, deadline=60.0),
        min_available_nodes=1,
    )
    strategy.start(grid, num_rounds=5)
    assert strategy.late
    like = jax.eval_shape(lambda p: block.init(method, p).memory, np.zeros(FEATURES, np.float32))
    shifts = []
    for client in range(SITES):
        state = grid.contexts[100 + client].state
        taken = state["jaxcomp.state"]["round"] == strategy._seats.accepted[client]
        data = state["jaxcomp.memory"]["accepted" if taken else "refused"]
        memory = raw.read(records.bytes_of(data, records.MEMORY), like)
        shifts.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(memory.feedback)]))
    mirror = np.concatenate([np.ravel(x) for x in jax.tree.leaves(strategy.state.mirror[0])])
    assert np.abs(mirror).max() > 0
    np.testing.assert_allclose(mirror, np.mean(shifts, axis=0), rtol=1e-5, atol=1e-5)


def test_late_messages_are_decoded_with_what_the_client_has_sent_before():
    """The guess of `History` stays as it is while a client has not answered."""
    codec = jaxcomp.Policy(jaxcomp.wyner_ziv(levels=256), min_size=0, min_ndim=1)
    method = dataclasses.replace(
        METHOD, up=federated.Uplink(codec, federated.History()), mean="participants"
    )
    exact = dataclasses.replace(METHOD, up=jaxcomp.Policy(None), mean="participants")
    due = lambda round, node: round + (node == 103)  # noqa: E731
    found, _ = trained(due, 5, method, messages=3)
    want, _ = trained(due, 5, exact, messages=3)
    assert found.late == want.late != {}
    np.testing.assert_allclose(found.params, want.params, atol=0.5)
    with pytest.raises(ValueError, match="`oldest` must be 0 with LastMean"):
        flower.Quorum(3, 60.0).check(
            dataclasses.replace(method, up=federated.Uplink(codec, federated.LastMean()))
        )


def test_a_method_that_would_lose_refused_messages_warns(monkeypatch, caplog):
    monkeypatch.setattr(settings.log, "propagate", True)
    quorum = flower.Quorum(3, 60.0)
    with caplog.at_level("WARNING", "flwr"):
        strategy_of(METHOD, quorum=quorum)
        strategy_of(dataclasses.replace(METHOD, up=jaxcomp.Policy(None)))
        assert "is lost" not in caplog.text
        strategy_of(dataclasses.replace(METHOD, up=jaxcomp.Policy(None)), quorum=quorum)
    assert "a message that is late or refused is lost: NoFeedback()" in caplog.text

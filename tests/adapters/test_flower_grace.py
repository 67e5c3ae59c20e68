"""A round that has its quorum and waits for one more message: while it makes fewer seconds idle."""

import threading
import time

import pytest
from helpers.nodes import Grid, identity  # noqa: F401

pytest.importorskip("flwr")
from flwr.app import MetricRecord, RecordDict

from jaxcomp.adapters import flower
from jaxcomp.adapters.flower import closing, extra, grace
from jaxcomp.adapters.flower.grace import Grace
from jaxcomp_site import polling


def after_a_round(factor, *seconds):
    """Grace of a second round, in which nobody has answered; in the first, all have."""
    arrivals = Grace(factor)
    arrivals.begin(0.0)
    for node, took in enumerate(seconds):
        arrivals.ask(node, 0.0)
        arrivals.came(node, took, sent=True)
    arrivals.begin(100.0)
    for node in range(len(seconds)):
        arrivals.ask(node, 100.0)
    return arrivals


@pytest.mark.parametrize(
    ("factor", "third", "pays"),
    [
        (1.0, 13.6, True),  # Two idle for 1.6 s each; else one for 12 - 1.6 s.
        (1.0, 15.9, True),  # 7.8 s of idleness against 8.1.
        (1.0, 16.1, False),
        (0.5, 13.6, True),
        (0.5, 15.9, False),
        (0.0, 12.0, False),
    ],
)
def test_the_idle_seconds_of_both_sides_decide(factor, third, pays):
    arrivals = after_a_round(factor, 10.0, 12.0, third)
    arrivals.came(0, 110.0, sent=True)
    arrivals.came(1, 112.0, sent=True)
    assert arrivals.pays(112.0) == pays


def test_a_node_that_stalls_is_not_waited_for_any_longer():
    arrivals = after_a_round(1.0, 10.0, 12.0, 13.0)
    arrivals.came(0, 110.0, sent=True)
    arrivals.came(1, 112.0, sent=True)
    assert arrivals.pays(114.2)
    assert not arrivals.pays(114.4)  # A tenth more than the last time.
    arrivals.came(2, 140.0, sent=True)
    arrivals.begin(140.0)
    for node in range(3):
        arrivals.ask(node, 140.0)
    arrivals.came(0, 150.0, sent=True)
    assert arrivals.pays(150.0)  # For the second node.
    arrivals.came(1, 152.0, sent=True)
    assert not arrivals.pays(152.0)  # The third has needed 40 s.


def test_nobody_is_waited_for_of_whom_nothing_is_known():
    arrivals = after_a_round(1.0, 10.0, 12.0)
    arrivals.ask(7, 100.0)
    arrivals.came(0, 110.0, sent=True)
    assert arrivals.pays(110.0)
    arrivals.came(1, 110.0, sent=False)  # An error says nothing of the next message.
    assert not arrivals.pays(110.0)
    other = after_a_round(1.0, 10.0, 12.0)
    other.came(0, 110.0, sent=True)
    other.give_up(1)
    assert not other.pays(110.0)


def test_a_site_with_steps_of_a_delay_is_not_idle():
    for works, pays in ((0.0, False), (8.0, True), (float("nan"), False), (-1.0, False)):
        arrivals = after_a_round(1.0, 10.0, 12.0, 18.0)
        arrivals.came(0, 110.0, sent=True, works=works)
        arrivals.came(1, 112.0, sent=True, works=works)
        assert arrivals.pays(112.0) == pays


class TimedGrid(Grid):
    """Nodes that answer so many seconds after they are asked."""

    def __init__(self, seconds):
        super().__init__(dict.fromkeys(seconds))
        self.seconds, self.sent = seconds, {}

    def get_node_ids(self):
        return list(self.seconds)

    def push_messages(self, messages):
        ids = [f"{len(self.sent)} {m.metadata.dst_node_id}" for m in messages]
        for id_, message in zip(ids, messages, strict=True):
            self.sent[id_] = time.monotonic(), message
        return ids

    def pull_messages(self, message_ids):
        (one,) = message_ids
        begin, message = self.sent[one]
        node = message.metadata.dst_node_id
        time.sleep(max(0.0, begin + self.seconds[node] - time.monotonic()))
        metrics = MetricRecord({"steps": 10, "seconds": self.seconds[node]})
        message.metadata.__dict__["_message_id"] = one
        return [extra.Message(RecordDict({"metrics": metrics}), reply_to=message)]


@pytest.mark.parametrize(("factor", "answers"), [(0.0, 2), (1e3, 3)])
def test_a_round_of_flower_waits_for_who_is_expected(monkeypatch, factor, answers):
    monkeypatch.setattr(polling, "SOONEST", 0.01)
    monkeypatch.setattr(grace, "_OVERDUE", 100.0)  # Machines stall, too.
    monkeypatch.setattr(closing, "Thread", threading.Thread)
    grid = TimedGrid({1: 0.5, 2: 0.5, 3: 0.7})
    quorum = flower.Quorum(messages=2, deadline=60.0, grace=factor)
    waiting = closing.Waiting(grid, quorum, delay=5)

    def one_round():
        waiting.train()
        asked = [
            extra.Message(RecordDict(), dst_node_id=node, message_type="train")
            for node in grid.get_node_ids()
        ]
        return waiting.send_and_receive(asked)

    assert len(one_round()) == 2  # Nothing is known of any.
    while waiting.busy():
        waiting._new(0.1)
    assert len(one_round()) == answers


def test_a_grace_below_zero_is_refused():
    with pytest.raises(ValueError, match="`grace`"):
        flower.Quorum(2, 9.0, grace=-0.5)

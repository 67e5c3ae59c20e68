"""A site's own node: Flower's connection, and no process for a message."""

import contextlib
import hashlib
import itertools
import sys
import threading
import tracemalloc
import types

import numpy as np
import pytest
from helpers.clients import PATIENCE

pytest.importorskip("flwr")
pytest.importorskip("flwr.supernode.fleet_http_connection")  # Not before flwr 1.42.
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.supercore.run import RunNotRunningException

from jaxcomp_site import app as site_app, courier, node, polling
from jaxcomp_site.packing import packed

RUN, NODE = 7, 100


class SuperLink:
    """The other end of a node's connection.

    Attributes:
        asked: the messages that are not asked for yet; an error in place of one is raised.
        answers: those that came.
        missing: how often an object is still on its way.
    """

    def __init__(self, *asked, missing=0):
        self.asked, self.missing = list(asked), missing
        self.answers, self.confirmed, self._came, self._objects = [], [], {}, {}

    def line(self):
        nothing = pytest.fail
        return node.Connection(
            NODE, self.receive, self.send, nothing, nothing, self.pull, self.push, self.confirm
        )

    def receive(self):
        if not self.asked:
            return None
        found = self.asked.pop(0)
        if isinstance(found, BaseException):
            raise found
        objects = get_all_nested_objects(found)
        self._objects = {id_: one.deflate() for id_, one in objects.items()}
        return types.SimpleNamespace(metadata=found.metadata), get_object_tree(found)

    def pull(self, run, id_):
        assert run == RUN
        if self.missing:
            self.missing -= 1
            raise ObjectUnavailableError(id_)
        return self._objects[id_]

    def confirm(self, run, id_):
        assert run == RUN
        self.confirmed.append(id_)

    def send(self, message, tree, seconds):
        assert seconds >= 0
        self._came = {one.object_id: None for one in [tree, *nested(tree)]}
        self._head = tree.object_id
        return set(self._came), "session"

    def push(self, run, session, id_, content):
        assert (run, session) == (RUN, "session")
        self._came[id_] = content
        if None not in self._came.values():
            self.answers.append(inflate_object_from_contents(self._head, self._came))


def nested(tree):
    return [one for child in tree.children for one in (child, *nested(child))]


def message(number, kind="train", content=None):
    numbers = ConfigRecord({"number": number, "bytes": bytes(10)})
    content = RecordDict({"given": numbers}) if content is None else content
    given = Metadata(
        run_id=RUN, message_id="", src_node_id=1, dst_node_id=NODE, reply_to_message_id="",
        group_id="", created_at=1.0, ttl=1e9, message_type=kind,
    )  # fmt: skip
    return Message(content=content, metadata=given)


def served(link, folder, count):
    node.serve(link.line(), {"site": str(folder)}, lambda: len(link.answers) == count)
    return link.answers


@pytest.fixture
def site(tmp_path):
    """The folder of a site that sends back what it gets, unless that is 13."""

    def answer(content):
        if b'"number": 13' in content:
            raise ValueError("unlucky")
        return content

    ended = threading.Event()
    serving = threading.Thread(
        target=courier.serve, args=(tmp_path, answer, ended.is_set), daemon=True
    )
    serving.start()
    yield tmp_path
    ended.set()
    with contextlib.suppress(courier.SiteError):  # It may have seen the end by itself.
        courier.ask(tmp_path, b"", 0.5)
    serving.join(PATIENCE)


def test_messages_are_answered_by_the_sites_process(site):
    link = SuperLink(message(1), RunNotRunningException(), message(2), missing=2)
    first, second = served(link, site, 2)
    for number, found in enumerate((first, second), 1):
        assert found.content["given"]["number"] == number
        assert found.metadata.reply_to_message_id == link.confirmed[number - 1]
        assert (found.metadata.src_node_id, found.metadata.dst_node_id) == (NODE, 1)
    assert link.missing == 0


def test_an_error_is_told_and_the_node_goes_on(site):
    refused, unknown, fine = served(
        SuperLink(message(13), message(1, "query"), message(2)), site, 3
    )
    assert "unlucky" in refused.error.reason
    assert unknown.has_error()
    assert fine.content["given"]["number"] == 2


def test_arrays_pass_in_pieces(tmp_path, monkeypatch):
    size, piece = 40_000_000, 5 * 2**20
    data = np.random.default_rng(0).bytes(size) + bytes(2 * piece)  # Zeros: a piece comes twice.
    sent = RecordDict({"given": ArrayRecord({"0": Array("uint8", (len(data),), "raw", data)})})
    answer = packed(sent)
    twice = hashlib.sha256(2 * answer).digest()

    def ask(folder, content):
        assert folder == tmp_path
        hashed = hashlib.sha256()
        for part in itertools.chain(content(), content()):  # The site's process has ended once.
            hashed.update(part)
        assert hashed.digest() == twice
        return answer

    def push(run, session, id_, content):
        pushed[id_] = len(content)

    monkeypatch.setattr(site_app, "ask", ask)
    link, pushed = SuperLink(message(0, content=sent)), {}
    link.push = push
    found = link.receive()
    link.receive = iter([found, None]).__next__
    tracemalloc.start()
    try:
        node.serve(link.line(), {"site": str(tmp_path)}, lambda: bool(pushed))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(pushed.values()) > size
    assert peak < 6 * piece
    assert not list(tmp_path.iterdir())


def test_a_message_that_is_not_whole_is_left_out(site):
    link = SuperLink(message(1), message(2))
    pull = link.pull

    def lost(run, id_):
        if link.asked:
            raise KeyError(id_)
        return pull(run, id_)

    link.pull = lost
    (found,) = served(link, site, 1)
    assert found.content["given"]["number"] == 2


def test_a_message_lies_for_a_tenth_of_the_time_that_a_node_has_waited():
    pace = polling.Pace()
    assert pace.pause(0.0) == polling.SOONEST
    assert pace.pause(10.0) == pytest.approx(1.0)
    assert pace.pause(1e6) == polling.LATEST == 3.0


def test_nothing_is_asked_in_most_of_the_time_that_the_last_wait_took():
    pace = polling.Pace()
    pace.came(2.0)
    assert pace.pause(0.0) == pytest.approx(1.4)
    assert pace.pause(1.3) == polling.SOONEST
    pace.came(60.0)
    assert pace.pause(0.0) == polling.LATEST


def test_flowers_own_node_takes_over_without_the_connection(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.supernode.fleet_http_connection", None)
    given = ["--superlink", "127.0.0.1:1", "--insecure", "--node-config", 'site="x"', "--port", "2"]
    monkeypatch.setattr(sys, "argv", ["node", *given])
    started = []

    def execute(name, command):
        started.append((name, command))
        raise SystemExit

    monkeypatch.setattr(node.os, "execvp", execute)
    with pytest.raises(SystemExit):
        node.main()
    assert started == [("flower-supernode", ["flower-supernode", *given])]

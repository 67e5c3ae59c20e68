"""What the server takes into memory of an answer that comes over a connection."""

import collections
import tracemalloc
import types

import numpy as np
import pytest
from helpers.nodes import identity  # noqa: F401

pytest.importorskip("flwr")
pytest.importorskip("flwr.superlink.grid.http_grid")  # Not before flwr 1.42.
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.superlink.grid.http_grid import HttpGrid

from jaxcomp.adapters.flower import limits, records
from jaxcomp.adapters.flower.records import Refused

MB = 2**20
ASKED = {"round": 0, "client": 0, "status": "sent", "upon": -1, "loss": 1.0}


class SuperLink:
    """The SuperLink's end of a connection, with answers in its store."""

    def __init__(self, *contents):
        asked = Message(RecordDict(), dst_node_id=100, message_type="train")
        self.answers = [Message(content, reply_to=asked) for content in contents]
        self.objects = {
            id_: found.deflate()
            for answer in self.answers
            for id_, found in get_all_nested_objects(answer).items()
        }
        self.trees = [get_object_tree(answer) for answer in self.answers]

    def PullMessages(self, request):
        found = []
        for tree in self.trees:
            ids = types.SimpleNamespace(message_id=tree.object_id, reply_to_message_id="")
            found.append(types.SimpleNamespace(metadata=ids))
        return types.SimpleNamespace(messages_list=found, message_object_trees=self.trees)

    def PullObject(self, request):
        content = self.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        del request


def answer_of(data, **more):
    array = Array(dtype="uint8", shape=(len(data),), stype=records.PAYLOAD, data=data)
    content = {
        "jaxcomp.answer": ConfigRecord(ASKED),
        "jaxcomp.payload": ArrayRecord({"0": array}),
        **more,
    }
    return RecordDict(content)


def pulled(link, limit):
    """The answers in a grid, and the peak of the memory that it took them."""
    grid = HttpGrid(token="none")
    grid._client, grid._run = link, types.SimpleNamespace(run_id=1)
    tracemalloc.start()
    try:
        with limits.limit_answers(grid, limit):
            found = list(grid.pull_messages(["any"]))
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        assert grid._client is link


def test_an_answer_that_is_too_large_is_not_taken_into_memory():
    draw = np.random.default_rng(0)
    honest = answer_of(draw.bytes(2 * MB))
    large = answer_of(draw.bytes(30 * MB))
    repeated = answer_of(bytes(100 * MB))  # Flower sends one piece for all 20.
    many = answer_of(b"12", more=MetricRecord({"n": [0.0] * 100_000}))
    limit = 2 * MB + limits.BESIDE
    link = SuperLink(honest, large, repeated, many)
    assert sum(map(len, link.objects.values())) < 40 * MB
    found, peak = pulled(link, limit)
    assert peak < 20 * MB
    read = records.read_answer(found[0].content, 0, 0, 2 * MB, b"", None)
    assert read.payload == honest["jaxcomp.payload"]["0"].data
    for answer in found[1:3]:
        with pytest.raises(Refused, match="more than") as error:
            records.read_answer(answer.content, 0, 0, 2 * MB, b"", None)
        assert error.value.kind == "oversize"
    assert found[3].has_error()


def test_an_array_that_flower_could_not_join_does_not_end_the_run():
    for broken in ({"shape": "x"}, {"arraychunk_ids": [7]}, {"dtype": 3}):
        link = SuperLink(answer_of(b"some bytes"))
        (id_,) = [id_ for id_, data in link.objects.items() if data.startswith(b"Array ")]
        head, _, body = link.objects[id_].partition(b"\0")
        described = {**limits.json.loads(body), **broken}
        link.objects[id_] = head + b"\0" + limits.json.dumps(described).encode()
        found, _ = pulled(link, MB)
        with pytest.raises(Refused):
            records.read_answer(found[0].content, 0, 0, MB, b"", None)


def test_an_answer_that_is_still_on_its_way_is_asked_for_again_soon(monkeypatch):
    waited = []
    monkeypatch.setattr(limits.time, "sleep", waited.append)
    link = SuperLink(answer_of(b"some bytes"))
    known, asked = link.PullObject, collections.Counter()

    def late(request):
        asked[request.object_id] += 1
        if asked[request.object_id] < 3:
            return PullObjectResponse(object_found=True)
        return known(request)

    link.PullObject = late
    (found,), _ = pulled(link, MB)
    assert found.content["jaxcomp.payload"]["0"].data == b"some bytes"
    assert set(asked.values()) == {3}
    assert len(waited) == 2 * len(asked)


def test_a_grid_of_flower_without_a_known_connection_is_named_in_the_log(monkeypatch):
    said = []
    monkeypatch.setattr(limits.log, "warning", lambda text, *given: said.append(text % given))
    grid = object.__new__(HttpGrid)  # As of a version that keeps its connection elsewhere.
    with limits.limit_answers(grid, MB):
        pass
    assert "HttpGrid" in said[0]

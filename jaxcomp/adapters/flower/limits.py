"""Limits what Flower takes into memory of one answer, before it is an answer."""

import collections
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxcomp.adapters.flower.records import CUT

log = logging.getLogger("flwr")

_CLIENTS = ("_client", "_grpc_stub")
"""Where Flower's grids keep their connection to the SuperLink: over HTTP, and over gRPC before."""

_CHUNK, _ARRAY = b"ArrayChunk ", b"Array "
"""The head of an object of Flower: its class, the ids of the objects in it, the length of
the rest, with spaces between, and a zero byte."""

BESIDE = 2**20
"""Bytes of an answer beside its message: records of numbers, and Flower's own."""

_HEAD = 2**18
"""The most bytes of an object that is no piece of an array, such as a record of numbers."""

_OBJECTS = 2**16
"""Objects of which it is known to which answer they belong: several answers are pulled at once."""

_AGAIN, _TIMES = 0.05, 20
"""Seconds after which an object is asked for again that is still on its way to the SuperLink, and
how often. Flower itself waits for a second after the first question."""

_CUT = {"dtype": "uint8", "shape": [0], "stype": CUT, "arraychunk_ids": []}
"""An array that stands for one that was too large."""


@contextlib.contextmanager
def limit_answers(grid: Any, limit: int) -> Iterator[None]:
    """Lets a grid take in at most so many bytes of an answer.

    Flower pulls an answer piece by piece, and joins the pieces three times over, before anybody can
    see how large it is. Grids without a connection have the answers in this process already. A grid
    of Flower whose connection is not found, as in a version that stores it elsewhere, is named in
    the log.
    """
    # The first use of a property connects a grid that is not connected yet.
    for property_ in ("_runtime_client", "_stub"):
        getattr(grid, property_, None)
    name = next((name for name in _CLIENTS if getattr(grid, name, None) is not None), None)
    if name is None:
        kind = type(grid)
        if kind.__module__.startswith("flwr.") and kind.__name__ != "InMemoryGrid":
            log.warning(
                "answers are not limited before they are joined: %s of this version of Flower has "
                "no connection that is known",
                kind.__name__,
            )
        yield
        return
    client = getattr(grid, name)
    setattr(grid, name, Limited(client, limit))
    try:
        yield
    finally:
        setattr(grid, name, client)


class Limited:
    """A connection to the SuperLink that passes on no more than a limit of every answer.

    An array of which more comes, or that Flower could not join, is left empty, and any other object
    that is too large is not found.

    Args:
        client: Flower's connection.
        limit: bytes of an answer.
    """

    def __init__(self, client: Any, limit: int):
        self._client, self._limit = client, limit
        self._answers: dict[str, _Answer] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any, **extra: Any) -> Any:  # noqa: N802
        """Pulls the list of new answers; their objects follow one by one."""
        response = self._client.PullMessages(request, **extra)
        while len(self._answers) > _OBJECTS:  # Of answers that were pulled long ago.
            self._answers.pop(next(iter(self._answers)), None)
        for tree in response.message_object_trees:
            answer = _Answer(self._limit)
            self._answers.update(dict.fromkeys(_ids(tree), answer))
        return response

    def PullObject(self, request: Any, **extra: Any) -> Any:  # noqa: N802
        """Pulls an object of an answer, and empties it if there are too many bytes with it."""
        response = self._client.PullObject(request, **extra)
        for _ in range(_TIMES):
            if response.object_available or not response.object_found:
                break
            time.sleep(_AGAIN)
            response = self._client.PullObject(request, **extra)
        answer = self._answers.get(request.object_id)
        content = response.object_content
        if answer is None or answer.takes(request.object_id, content):
            return response
        if content.startswith(_CHUNK):
            response.object_content = _object(_CHUNK, b"")
        elif content.startswith(_ARRAY):
            response.object_content = _object(_ARRAY, json.dumps(_CUT).encode())
        else:
            return type(response)()
        return response


class _Answer:
    """The bytes of an answer so far, as they come and as they will be once they are joined."""

    def __init__(self, limit: int):
        self._limit, self._bytes = limit, 0
        self._sizes: dict[str, int] = {}
        self._uses: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def takes(self, object_id: str, content: bytes) -> bool:
        """Whether there is room for another object; then it is counted."""
        with self._lock:
            chunk = content.startswith(_CHUNK)
            if self._bytes + len(content) > self._limit or (not chunk and len(content) > _HEAD):
                return False
            sizes, uses = dict(self._sizes), self._uses.copy()
            if chunk:
                sizes[object_id] = len(content)
            elif content.startswith(_ARRAY):
                names = _chunks(content)
                if names is None:
                    return False
                uses.update(names)  # An array may name a piece many times.
            if sum(count * sizes.get(id_, 0) for id_, count in uses.items()) > self._limit:
                return False
            self._sizes, self._uses = sizes, uses
            self._bytes += len(content)
            return True


def _chunks(content: bytes) -> list[str] | None:
    """The ids of the pieces of an array, in their order; None if Flower could not join them."""
    head, _, body = content.partition(b"\0")
    try:
        names = [name for name in head.decode().split(" ")[1].split(",") if name]
        described = json.loads(body)
        pieces = [names[index] for index in described["arraychunk_ids"]]
        texts, sizes = (described["dtype"], described["stype"]), described["shape"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    sound = all(isinstance(text, str) for text in texts) and set(pieces) == set(names)
    return pieces if sound and all(isinstance(size, int) for size in sizes) else None


def _object(kind: bytes, body: bytes) -> bytes:
    return b"%s %d\0%s" % (kind, len(body), body)


def _ids(tree: Any) -> Iterator[str]:
    yield tree.object_id
    for child in tree.children:
        yield from _ids(child)

"""A round of the server between its messages to the clients and their answers."""

import collections
import dataclasses
import functools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.adapters.flower.records import Answer, Refused
from jaxcomp.types import Array, PyTree

log = logging.getLogger("flwr")
_LINES = 8
"""How many refused messages of a round are logged, each in a line of its own."""
_LETTERS = 200
"""How much of a cause is kept; a client may have chosen the words."""


class Heard(NamedTuple):
    """An answer with a message.

    Attributes:
        answer: the answer.
        payload: its message.
        weight: the weight of the message in the mean.
        metrics: the metric records beside it.
        fresh: whether the client has begun with a new memory since its last accepted message.
    """

    answer: Answer
    payload: Any
    weight: np.float32
    metrics: Any
    fresh: bool


class Taken(NamedTuple):
    """The part of a message in the mean that its round's report needs.

    Attributes:
        loss: the mean loss of its client's local steps.
        weight: its weight.
        metrics: the metric records beside it.
        side: what the server then knows of its client.
        round: the round in which its client was asked.
    """

    loss: float
    weight: float
    metrics: Any
    side: PyTree
    round: int


class Refusal(NamedTuple):
    """An answer that the server does not use.

    Attributes:
        client: whose answer it is; None if nobody who was asked gave it.
        kind: the kind, under which it is counted.
        why: the cause, in words that may be the client's own.
    """

    client: int | None
    kind: str
    why: str


@dataclasses.dataclass
class Round:
    """A round between the messages to the clients and their answers.

    Attributes:
        number: of the round.
        key: of the round.
        nodes: the node of each client that was asked.
        sent: the metadata of the messages to them, whose ids Flower sets when it sends them.
        sizes: bytes that were sent to each client.
        oldest: the largest age, in rounds, of a message that still counts.
        waiting: the clients that have not answered.
        heard: the answers with a message, until they are added.
        refused: how many answers were refused, by kind.
        refusals: the refused answers of which the file of rounds does not know yet.
    """

    number: int
    key: Array
    nodes: dict[int, int]
    sent: dict[int, Any]
    sizes: dict[int, int]
    oldest: int = 0
    waiting: set[int] = dataclasses.field(default_factory=set)
    heard: dict[int, Heard] = dataclasses.field(default_factory=dict)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)

    @property
    def cohort(self) -> np.ndarray:
        """The clients that were drawn, in ascending order."""
        return np.array(list(self.nodes), np.int64)

    @property
    def down(self) -> int:
        """Bytes that were sent."""
        return sum(self.sizes.values())

    def __post_init__(self):
        self.waiting = set(self.nodes)

    def find_client(self, reply: Any) -> int | None:
        """The client whose answer this is, or in whose place the SuperLink answers; or None."""
        client = self._clients.get(reply.metadata.src_node_id)
        if client is None and reply.has_error():
            client = self._by_message.get(reply.metadata.reply_to_message_id)
        return client if client in self.waiting else None

    def client_of(self, reply: Any) -> int:
        """The client that answers.

        Raises:
            Refused: if it was not asked, has failed, has answered already, or if Flower's SuperLink
                answers in place of a node that is gone.
        """
        client = self._clients.get(reply.metadata.src_node_id)
        if client is None and reply.has_error():
            client = self._by_message.get(reply.metadata.reply_to_message_id)
            if client is not None:
                raise Refused(
                    "unavailable",
                    f"node {self.nodes[client]} has not answered: {_reason(reply)}",
                )
        if client is None:
            raise Refused("not asked", "it was not asked in this round")
        if reply.has_error():
            raise Refused("failed", f"its app failed: {_reason(reply)}")
        if client in self.heard:
            raise Refused("repeated", "it has already answered in this round")
        return client

    def refuse(self, node: int, client: int | None, kind: str, why: Any) -> None:
        """Counts a refused answer, and logs the first ones."""
        self.refused[kind] += 1
        self.refusals.append(Refusal(client, kind, str(why)[:_LETTERS]))
        if self.refused.total() <= _LINES:
            log.warning("\t> node %d is refused: %s", node, why)

    def log_late(self, rounds: Iterable[int]) -> list[int]:
        """Logs which of the rounds' clients have no part in the mean; the ages of late messages.

        Args:
            rounds: the rounds in which the clients of the accepted messages were asked.
        """
        ages = [self.number - asked for asked in rounds]
        late = [age for age in ages if age]
        if late:
            log.info("\t> %d late messages, the oldest of %d rounds before", len(late), max(late))
        self._log_dropouts(len(ages) - len(late))
        return late

    def _log_dropouts(self, accepted: int) -> None:
        """Logs how many clients have no part in the mean, and why."""
        missing = len(self.nodes) - accepted
        if self.refused.total() > _LINES or missing:
            counts = ", ".join(f"{count} {kind}" for kind, count in self.refused.most_common())
            log.info("\t> %d clients have no part; refused: %s", missing, counts or "none")

    @functools.cached_property
    def _clients(self) -> dict[int, int]:
        return {node: client for client, node in self.nodes.items()}

    @functools.cached_property
    def _by_message(self) -> dict[str, int]:
        """The client of each message, by the id that Flower has given it."""
        ids = ((sent.message_id, client) for client, sent in self.sent.items())
        return {id_: client for id_, client in ids if id_}


def _reason(reply: Any) -> str:
    return str(reply.error.reason)[:200]

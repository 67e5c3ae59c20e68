"""When a round of the server ends: at a quorum of answers, or at a deadline."""

import dataclasses
import queue
import time
from collections.abc import Iterable, Mapping
from threading import Thread
from typing import Any, NamedTuple

from jaxcomp import checks
from jaxcomp.adapters.flower.server_round import log
from jaxcomp.federated.method import Method
from jaxcomp_site import polling


@dataclasses.dataclass(frozen=True)
class Quorum:
    """A round ends at so many messages or at a deadline, and later messages count for less.

    A client that has not answered is not asked again until it answers, or until `patience` is over.
    Its message counts in the round in which it arrives, if it is at most `oldest` rounds old, with
    `(1 + age)^(−staleness)` times its weight; `staleness` is the method's. Older ones are refused
    as "late". A refused message stays in the client's residual.

    Args:
        messages: a round ends when so many of the clients that it asked have sent a message, or
            when all have answered.
        deadline: the seconds after which it ends in any case. A round without any message moves
            nothing.
        oldest: the largest age of a message, in rounds; 0 refuses all late ones.
        patience: the seconds after which a client that was asked is asked anew: it has lost the
            message, or restarted. An answer to the old question is no longer used.

    Raises:
        ValueError: for numbers out of range.

    Example:
        >>> quorum = Quorum(messages=3, deadline=120.0)

    References:
        Xie, Koyejo and Gupta, `Asynchronous federated optimization
        <https://arxiv.org/abs/1903.03934>`_ (FedAsync), 2019, for the polynomial factor.

    Note:
        The factor changes the weight in a mean, not the length of the server's step, as in the
        `Simulation`. `jaxcomp.optimizers.delayed_nesterov` is the other published way.
    """

    messages: int
    deadline: float
    oldest: int = 4
    patience: float = 3600.0

    def __post_init__(self):
        checks.integer("messages", self.messages, 1)
        checks.positive("deadline", self.deadline)
        checks.integer("oldest", self.oldest, 0)
        checks.number("patience", self.patience, self.deadline)

    def check(self, method: Method) -> None:
        """Raises a `ValueError` for a method that late messages would break."""
        if not self.oldest:
            return
        reason = None
        if method.uplink.feedback.facts.mirrors:
            reason = "a Shift, whose client has moved by the whole message"
        elif method.uplink.guessed:
            reason = "side information, which is that of the latest round"
        elif method.fragments != 1:
            reason = "fragments, of which a round adds up one"
        elif not method.aggregate.streams:
            reason = f"{method.aggregate!r}, which combines messages of one round"
        if reason:
            raise ValueError(f"`oldest` must be 0 with {reason}, got {self.oldest}")


class _Asked(NamedTuple):
    """A message to a client: its node, and when it was sent."""

    node: int
    at: float


class Waiting:
    """Flower's grid, whose training messages are answered until a quorum or a deadline.

    Answers that come later are those of the next call. Each message is asked for by a thread of its
    own, since Flower's `pull_messages` returns only when the answer is here in whole, however
    slowly its client sends it.

    Args:
        grid: Flower's grid.
        quorum: when to return.
    """

    def __init__(self, grid: Any, quorum: Quorum):
        self._grid, self._quorum = grid, quorum
        self._asked: dict[str, _Asked] = {}
        self._pulled: set[str] = set()
        self._came: queue.SimpleQueue[tuple[str, list[Any]]] = queue.SimpleQueue()
        self._trains = False
        self._pace = polling.Pace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def train(self) -> None:
        """Says that the next messages are those of a round of training, even if there are none."""
        self._trains = True

    def busy(self) -> set[int]:
        """The nodes that have not answered yet; those for which the patience is over are not."""
        now = time.monotonic()
        for message, asked in list(self._asked.items()):
            if now - asked.at > self._quorum.patience:
                log.warning("\t> node %d has not answered, and is asked anew", asked.node)
                del self._asked[message]
        return {asked.node for asked in self._asked.values()}

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> list[Any]:
        """The answers that came before the end of the round, to these and to former messages."""
        trains, self._trains = self._trains, False
        messages = list(messages)
        if not trains:  # No messages, unless clients evaluate.
            return list(self._grid.send_and_receive(messages, timeout=timeout)) if messages else []
        ids = [found or "" for found in self._grid.push_messages(messages)]
        begin = time.monotonic()
        for message, sent in zip(ids, messages, strict=True):
            if message:  # Empty for a node that is unknown by now.
                self._asked[message] = _Asked(sent.metadata.dst_node_id, begin)
        limit = self._quorum.deadline if timeout is None else min(self._quorum.deadline, timeout)
        answers: list[Any] = []
        while not self._is_closed(ids, answers) and (waited := time.monotonic() - begin) < limit:
            self._pull()
            found = self._new(min(self._pace.pause(waited), limit - waited))
            if found and not answers:
                self._pace.came(time.monotonic() - begin)
            answers += found
        return answers

    def _is_closed(self, ids: list[str], answers: list[Any]) -> bool:
        """Whether the quorum is there, or nobody is left to answer."""
        if not ids:
            return bool(answers) or not self._asked
        sent = {a.metadata.reply_to_message_id for a in answers if not a.has_error()}
        every = not any(message in self._asked for message in ids)
        return every or len(sent.intersection(ids)) >= self._quorum.messages

    def _pull(self) -> None:
        """Asks for the answers of the nodes that are there.

        The SuperLink deletes a message if it is asked for its answer while its node is away.
        """
        there = set(self._grid.get_node_ids())
        for message, asked in self._asked.items():
            if asked.node in there and message not in self._pulled:
                self._pulled.add(message)
                Thread(target=self._pull_one, args=(message,), daemon=True).start()

    def _pull_one(self, message: str) -> None:
        found: list[Any] = []
        try:
            found = list(self._grid.pull_messages([message]))
        except Exception as error:  # Such as a connection that is away: it is asked again.
            log.warning("\t> the answer to %s cannot be read yet: %r", message, error)
        self._came.put((message, found))

    def _new(self, seconds: float) -> list[Any]:
        """The next answers; none if no one arrives within so many seconds."""
        answers: list[Any] = []
        end = time.monotonic() + seconds
        while True:
            left = 0.0 if answers else max(end - time.monotonic(), 0.0)
            try:
                message, found = self._came.get(timeout=left)
            except queue.Empty:
                break
            self._pulled.discard(message)
            if found and self._asked.pop(message, None) is not None:
                answers += found
        return answers


def free(grid: Any, seated: Mapping[int, int]) -> dict[int, int]:
    """The nodes of the clients that can be asked in a round that begins."""
    if not isinstance(grid, Waiting):
        return dict(seated)
    grid.train()
    busy = grid.busy()
    return {client: node for client, node in seated.items() if node not in busy}

"""When a round of the server ends: at a quorum of answers, or at a deadline."""

import dataclasses
import queue
import time
from collections.abc import Iterable, Mapping
from threading import Thread
from typing import Any, NamedTuple

from jaxcomp import checks
from jaxcomp.adapters.flower.grace import Grace
from jaxcomp.adapters.flower.server_round import log
from jaxcomp.federated import faults
from jaxcomp.federated.method import Method
from jaxcomp_site import polling


@dataclasses.dataclass(frozen=True)
class Quorum:
    """A round ends at so many messages or at a deadline, and later messages count for less.

    A client that has not answered is not asked again until it answers, or until `patience` is over.
    Its message counts in the round in which it arrives, if it is at most `oldest` rounds old, with
    `(1 + age)^(−staleness)` times its weight; `staleness` is the method's. Older ones are refused
    as "late". A refused message stays in the client's residual. With fragments a late message
    counts in the next round of its fragment, and ages are counted in such rounds.

    Args:
        messages: a round ends when so many of the clients that it asked have sent a message, or
            when all have answered.
        deadline: the seconds after which it ends in any case. A round without any message moves
            nothing.
        oldest: the largest age of a message, in rounds, or in rounds of its fragment; 0 refuses all
            late ones, which an aggregate of all messages of a round needs, and a `Shift` with a
            `staleness`, and side information of a round.
        patience: the seconds after which a client that was asked is asked anew: it has lost the
            message, or restarted. An answer to the old question is no longer used.
        grace: how long a round that has its `messages` waits for one more: as long as those that
            have answered are then idle for at most `grace` times the seconds for which the next one
            would be, which otherwise waits for the end of the next round. A client is expected to
            take as long as the last time. 0 never waits; 1 counts the seconds of both alike.
        buffer: whether late messages count among the `messages` of a round, which takes no more of
            them: the buffer of FedBuff. More wait for the next round, and their clients too.

    Raises:
        ValueError: for numbers out of range, or a buffer that refuses late messages.

    Example:
        >>> quorum = Quorum(messages=3, deadline=120.0)

    References:
        Xie, Koyejo and Gupta, `Asynchronous federated optimization
        <https://arxiv.org/abs/1903.03934>`_ (FedAsync), 2019, for the polynomial factor; Douillard
        et al., `Decoupled DiLoCo for resilient distributed pre-training
        <https://arxiv.org/abs/2604.21428>`_, 2026, for the adaptive grace after a quorum, whose
        rule could not be read: this one is ours; Nguyen et al., `Federated learning with buffered
        asynchronous aggregation <https://arxiv.org/abs/2106.06639>`_ (FedBuff), 2022, for the
        buffer.

    Note:
        The factor changes the weight in a mean, not the length of the server's step, unless the
        method's `mean` is "messages" or "all". `jaxcomp.optimizers.delayed_nesterov` is another
        published way.
    """

    messages: int
    deadline: float
    oldest: int = 4
    patience: float = 3600.0
    grace: float = 0.0
    buffer: bool = False

    def __post_init__(self):
        checks.integer("messages", self.messages, 1)
        checks.positive("deadline", self.deadline)
        checks.integer("oldest", self.oldest, 0)
        checks.number("patience", self.patience, self.deadline)
        checks.number("grace", self.grace, 0.0)
        checks.flag("buffer", self.buffer)
        if self.buffer and not self.oldest:
            raise ValueError("`oldest` must be positive with a buffer, got 0")
        if self.buffer and self.grace:
            raise ValueError(
                "`grace` must be 0 with a buffer, which takes no more messages than its own, got "
                f"{self.grace}"
            )

    def check(self, method: Method) -> None:
        """Raises a `ValueError` for a method that late messages would break."""
        reason = faults.late_refusal(method)
        if self.oldest and reason:
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
        delay: the steps that a site takes after it has answered.
    """

    def __init__(self, grid: Any, quorum: Quorum, delay: int = 0):
        self._grid, self._quorum, self._delay = grid, quorum, delay
        self._arrivals = Grace(quorum.grace)
        self._asked: dict[str, _Asked] = {}
        self._pulled: set[str] = set()
        self._waiting: list[Any] = []  # Answers that a full buffer left for the next round.
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
                self._arrivals.give_up(asked.node)
        waiting = {answer.metadata.src_node_id for answer in self._waiting}
        return waiting | {asked.node for asked in self._asked.values()}

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
        self._arrivals.begin(begin)
        for message, sent in zip(ids, messages, strict=True):
            if message:  # Empty for a node that is unknown by now.
                self._asked[message] = _Asked(sent.metadata.dst_node_id, begin)
                self._arrivals.ask(sent.metadata.dst_node_id, begin)
        limit = self._quorum.deadline if timeout is None else min(self._quorum.deadline, timeout)
        answers, self._waiting = self._waiting, []
        while not self._is_closed(ids, answers) and (waited := time.monotonic() - begin) < limit:
            self._pull()
            found = self._new(min(self._pace.pause(waited), limit - waited))
            if found and not answers:
                self._pace.came(time.monotonic() - begin)
            answers += found
        if self._quorum.buffer:
            answers, self._waiting = _fill(self._quorum.messages, answers)
        return answers

    def _is_closed(self, ids: list[str], answers: list[Any]) -> bool:
        """Whether the quorum is there and no more is worth waiting for, or nobody is left."""
        sent = {a.metadata.reply_to_message_id for a in answers if not a.has_error()}
        if self._quorum.buffer:
            return len(sent) >= self._quorum.messages or not self._asked
        if not ids:
            return bool(answers) or not self._asked
        every = not any(message in self._asked for message in ids)
        enough = len(sent.intersection(ids)) >= self._quorum.messages
        return every or (enough and not self._arrivals.pays(time.monotonic()))

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
            asked = self._asked.pop(message, None) if found else None
            if asked is not None:
                answers += found
                self._came_from(asked.node, found)
        return answers

    def _came_from(self, node: int, found: list[Any]) -> None:
        """Notes when a node has answered, and how long the steps of its delay take."""
        sent, works = [one for one in found if not one.has_error()], 0.0
        if self._delay and sent:
            numbers = dict(sent[0].content.metric_records).get("metrics", {})
            steps, seconds = numbers.get("steps"), numbers.get("seconds")
            if isinstance(steps, int) and isinstance(seconds, float) and steps > 0:
                works = self._delay * seconds / steps
        self._arrivals.came(node, time.monotonic(), sent=bool(sent), works=works)


def _fill(size: int, answers: list[Any]) -> tuple[list[Any], list[Any]]:
    """The first answers with so many messages, and the others."""
    sent = 0
    for place, answer in enumerate(answers):
        if sent == size:
            return answers[:place], answers[place:]
        sent += not answer.has_error()
    return answers, []


def free(grid: Any, seated: Mapping[int, int]) -> dict[int, int]:
    """The nodes of the clients that can be asked in a round that begins."""
    if not isinstance(grid, Waiting):
        return dict(seated)
    grid.train()
    busy = grid.busy()
    return {client: node for client, node in seated.items() if node not in busy}

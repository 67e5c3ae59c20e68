"""Checks of an answer before it is added: it is the message of a client, or refused."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxcomp.adapters.flower import metrics, records
from jaxcomp.adapters.flower.records import Answer, Refused
from jaxcomp.adapters.flower.seats import BEHIND, Seats
from jaxcomp.adapters.flower.server_round import Heard, Round
from jaxcomp.federated import faults
from jaxcomp.federated.method import Method
from jaxcomp.messages import MessageError, from_bytes
from jaxcomp.types import PyTree


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads answers, and keeps the message of each, or refuses it.

    Attributes:
        method: the method.
        likes: the shapes and dtypes of the parameters, of each fragment.
        limit: bytes of a message.
        seats: which node is which client.
        weights: the weight of each client.
        weighted_by: the name of the number that multiplies it, of those that the client reports.
        weight_of: a function of these numbers in its place.
        secrets: the secret of each client; None without.
    """

    method: Method
    likes: tuple[PyTree, ...]
    limit: int
    seats: Seats
    weights: np.ndarray
    weighted_by: str | None
    weight_of: Callable[[Mapping[str, Any]], float] | None
    secrets: Callable[[int], bytes] | None

    def hear(self, run: bytes, round_: Round, reply: Any, now: int) -> None:
        """Reads one answer to the message of a round, in the round `now`."""
        node, asked = reply.metadata.src_node_id, round_.find_client(reply)
        try:
            client = round_.client_of(reply)
            secret = None if self.secrets is None else self.secrets(client)
            reported, expected = metrics.read(reply.content), (round_.number, client, self.limit)
            answer = records.read_answer(reply.content, *expected, run, secret)
            round_.heard[client] = self._read(run, round_, answer, reported, secret, now)
        except Refused as error:
            round_.refuse(node, asked, error.kind, error)
        except MessageError as error:
            round_.refuse(node, asked, "malformed", error)

    def _read(
        self,
        run: bytes,
        round_: Round,
        answer: Answer,
        reported: Any,
        secret: bytes | None,
        now: int,
    ) -> Heard:
        client = answer.client
        if answer.status == "behind":
            self.seats.has[client] = BEHIND
            raise Refused("behind", "it could not follow, and gets the whole parameters next time")
        accepted = int(self.seats.accepted[client])
        if answer.upon not in (accepted, -1):
            raise Refused("wrong memory", f"its memory is of round {answer.upon}, not {accepted}")
        if answer.upon != accepted and self.method.mirrors:
            raise Refused(
                "memory lost", "its memory is gone, and with it what the server's mean has of it"
            )
        age = -(-(now - round_.number) // len(self.likes))  # In rounds of its fragment.
        if answer.status != "sent" or age > round_.oldest:
            self.seats.has[client] = round_.number
            if answer.status != "sent":
                raise Refused(answer.status, "it has no message for this round")
            raise Refused("late", f"it answers round {round_.number} in round {now}")
        weight = self.weights[client]
        if self.weighted_by is not None:
            weight = metrics.weight(reported, self.weighted_by, weight)
        if self.weight_of is not None:
            weight = metrics.weight_by(reported, self.weight_of, weight)
        # The simulation multiplies in float64, too.
        weight = np.float32(weight * faults.stale(np.array([age]), self.method.staleness)[0])
        of_message = records.secret_of(secret, run, round_.number, client)
        policy = self.method.uplink.policy
        # Finiteness is checked where the message is added, with the round's own key.
        like = self.likes[round_.number % len(self.likes)]
        payload = from_bytes(policy, answer.payload, like, secret=of_message, finite=False)
        self.seats.has[client] = round_.number
        return Heard(answer, payload, weight, reported, answer.upon != accepted)

"""The server on Flower: a strategy that takes a method's rounds."""

import collections
import dataclasses
import functools
import logging
import secrets as secrets_
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.federated import block, server
from jaxcomp.federated.flower import extra, raw, records
from jaxcomp.federated.flower.history import History
from jaxcomp.federated.flower.memory import Centre
from jaxcomp.federated.flower.records import Answer, Instruction, Refused
from jaxcomp.federated.flower.seats import Seats
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import Total
from jaxcomp.federated.simulation import Report, weights_of
from jaxcomp.federated.table import OnHost
from jaxcomp.messages import MessageError, from_bytes, message_limit, to_bytes
from jaxcomp.numerics import noise
from jaxcomp.types import Array, PyTree

_log = logging.getLogger("flwr")
_LINES = 8
"""How many refused messages of a round are logged, each in a line of its own."""


class CompressedFedAvg(extra.FedAvg):
    """A Flower strategy that trains with a `Method`, and sends compressed bytes both ways.

    It has the bits of `Simulation`: the same sampling, clients' work and messages, added in the
    order of the clients. Clients run `client_app` or `compress_mod` of the same method. Nodes that
    do not answer are left out of a round. Every answer is checked before anything is made of it,
    and what is wrong with it is logged and counted.

    A client gets the messages that it missed, or the whole parameters if these are fewer bytes.

    Args:
        method: the method.
        params: the parameters before the first round.
        clients: how many clients there are. A node is a client from when it is first seen.
        key: a seed or key; everything random follows from it.
        weights: a weight for each client; None for equal weights. Clients have no say in it.
        numbers: the number of each node, by its id, for nodes with lasting ids; None to number
            nodes as they come.
        secrets: `secrets(number)` gives a client's own secret, 16 to 64 bytes: only who knows it
            can write this client's messages. Goes with `numbers`.
        largest: refuses messages with an element that is larger, once decoded; None for any
            finite ones.
        min_available_nodes: a round waits for so many connected nodes.
        **settings: of `flwr`'s `FedAvg`, such as `fraction_evaluate`, which is zero by default.

    Attributes:
        state: the `ServerState`.
        reports: a `Report` of each round. Its loss is the mean of what the clients with accepted
            messages say.
        refused: how many answers were refused, by kind.
        up: bytes of the clients' messages, without what Flower adds.
        down: bytes of the messages to the clients.

    Raises:
        ImportError: without Flower.
        ValueError: for settings of another kind.
    """

    def __init__(
        self,
        method: Method,
        params: PyTree,
        clients: int,
        *,
        key: Any = 0,
        weights: Any = None,
        numbers: Mapping[int, int] | None = None,
        secrets: Callable[[int], bytes] | None = None,
        largest: float | None = None,
        min_available_nodes: int = 2,
        **settings: Any,
    ):
        extra.needed()
        checks.part("method", method, Method)
        checks.integer("clients", clients, 1)
        checks.integer("min_available_nodes", min_available_nodes, 1, clients)
        if largest is not None:
            checks.positive("largest", largest)
        if secrets is not None and numbers is None:
            raise ValueError(
                "`numbers` must be given with `secrets`: whose secret a node has follows from its "
                "number, got None"
            )
        settings = {"fraction_evaluate": 0.0, **settings}
        super().__init__(min_available_nodes=min_available_nodes, **settings)
        self.method, self.clients, self.key = method, clients, noise.raw(key)
        self.weights = weights_of(weights, clients)
        self.state = server.init(method, params, clients)
        self.reports: list[Report] = []
        self.refused: collections.Counter[str] = collections.Counter()
        self.up = self.down = 0
        self._like = raw.like(self.state.params)
        self._limit = message_limit(method.uplink.policy, self._like)
        self._largest = np.float32(np.finfo(np.float32).max if largest is None else largest)
        self._secrets, self._seats = secrets, Seats(clients, numbers)
        self._sides = OnHost(jax.tree.map(np.asarray, self._new_side()), clients)
        self._history = History(raw.size(self._centre()))
        self._run = secrets_.token_bytes(8)
        self._open: _Round | None = None

    @property
    def params(self) -> PyTree:
        """The parameters, as all clients know them."""
        return self.state.params

    def start(
        self,
        grid: Any,
        initial_arrays: Any = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: Any = None,
        evaluate_config: Any = None,
        evaluate_fn: Any = None,
    ) -> Any:
        """Trains, as `FedAvg.start`; `initial_arrays` are the strategy's own parameters."""
        if initial_arrays is None:
            initial_arrays = records.arrays_of(self.params)
        return super().start(
            grid,
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            evaluate_fn,
        )

    def summary(self) -> None:
        """Logs the settings."""
        _log.info("\t├──> Method: %r", self.method.uplink.policy)
        _log.info("\t└──> Clients: %d, sampled by %r", self.clients, self.method.sampling)

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """The messages of a round: what each of its clients needs to begin."""
        del arrays
        seated = self._seats.seated(self._connected(grid))
        number = int(self.state.round)
        key = server.round_key(self.key, number)
        cohort = self.method.sampling.cohort(key, self.clients)
        config["server-round"] = server_round
        asked, messages, down = {}, [], 0
        whole = raw.write(self._centre())
        whole_array = records.array(whole, records.CENTRE)
        digest = raw.digest(self._centre())
        for client in (int(n) for n in cohort if int(n) in seated):
            parts = self._history.needed(int(self._seats.has[client]), number)
            base = -1 if parts is None else int(self._seats.has[client])
            parts = (whole,) if parts is None else parts
            given = self._instruction(number, client, base, digest, parts)
            secret = None if self._secrets is None else self._secrets(client)
            array = whole_array if base < 0 else None
            content = records.write_instruction(given, secret, array)
            content[self.configrecord_key] = config
            asked[seated[client]] = client
            messages.append(
                extra.Message(content=content, message_type="train", dst_node_id=seated[client])
            )
            down += sum(map(len, parts))
        self.down += down
        _log.info("configure_train: round %d, %d of %d clients", number, len(asked), len(cohort))
        self._open = _Round(number, key, cohort, asked, down)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Adds the messages in the order of the clients, and moves the parameters."""
        del server_round
        if self._open is None:
            raise ValueError("`replies` must come after configure_train, got some before it")
        round_, self._open = self._open, None
        for reply in replies:
            self._hear(round_, reply)
        self._log_dropouts(round_)
        total = server.nothing(self.method, self._like)
        losses, up, held = {}, 0, []
        for client in sorted(round_.heard):
            answer, payload = round_.heard.pop(client)
            up += len(answer.payload)
            total, accepted = self._add(round_, total, client, payload)
            if accepted:
                losses[client] = answer.loss
                if not self.method.aggregate.streams:
                    held.append((client, np.float32(self.weights[client]), payload))
        if held:
            numbers, weights, payloads = jax.tree.map(lambda *rows: np.stack(rows), *held)
            rows = np.searchsorted(round_.cohort, numbers)
            given = server.held(round_.cohort, self.clients, weights, rows, payloads)
            self.state, total = server.combined(self.method, round_.key, self.state, given)
        self.up += up
        self._step(round_, total)
        loss = records.mean_loss(losses)
        report = Report(round_.number, len(round_.cohort), len(losses), loss, up, round_.down)
        self.reports.append(report)
        _log.info("aggregate_train: %r", report)
        metrics = {name: value for name, value in report._asdict().items() if value == value}
        return records.arrays_of(self.params), extra.MetricRecord(metrics)

    def _connected(self, grid: Any) -> list[int]:
        """The ids of the connected nodes, once there are enough."""
        while len(nodes := list(grid.get_node_ids())) < self.min_available_nodes:
            time.sleep(1)
        return nodes

    def _centre(self) -> Centre:
        return Centre(self.state.params, self.state.shared)

    def _new_side(self) -> PyTree:
        return self.method.uplink.side.row(self.state.params)

    def _instruction(
        self, number: int, client: int, base: int, digest: bytes, parts: tuple[bytes, ...]
    ) -> Instruction:
        return Instruction(
            self._run,
            number,
            client,
            base,
            int(self._seats.accepted[client]),
            np.asarray(self.key).tobytes(),
            digest,
            parts,
        )

    def _hear(self, round_: "_Round", reply: Any) -> None:
        """Reads one answer, and keeps its message, or refuses it."""
        node = reply.metadata.src_node_id
        try:
            client = round_.asked.get(node)
            if client is None:
                raise Refused("not asked", "it was not asked in this round")
            if reply.has_error():
                raise Refused("failed", f"its app failed: {str(reply.error.reason)[:200]}")
            if client in round_.heard:
                raise Refused("repeated", "it has already answered in this round")
            answer = records.read_answer(reply.content, round_.number, client, self._limit)
            self._read(round_, answer)
        except Refused as error:
            self._refuse(round_, node, error.kind, error)
        except MessageError as error:
            self._refuse(round_, node, "malformed", error)

    def _read(self, round_: "_Round", answer: Answer) -> None:
        client = answer.client
        if answer.status == "behind":
            self._seats.has[client] = -1
            raise Refused("behind", "it could not follow, and gets the whole parameters next time")
        accepted = int(self._seats.accepted[client])
        if answer.upon not in (accepted, -1):
            raise Refused("wrong memory", f"its memory is of round {answer.upon}, not {accepted}")
        if answer.upon != accepted and self.method.uplink.feedback.mirrors:
            raise Refused(
                "memory lost", "its memory is gone, and with it what the mirror knows of it"
            )
        if answer.status != "sent":
            self._seats.has[client] = round_.number
            raise Refused(answer.status, "it has no message for this round")
        secret = None if self._secrets is None else self._secrets(client)
        of_message = records.secret_of(secret, self._run, round_.number, client)
        policy = self.method.uplink.policy
        # Finiteness is checked where the message is added, with the round's own key.
        payload = from_bytes(policy, answer.payload, self._like, secret=of_message, finite=False)
        self._seats.has[client] = round_.number
        if answer.upon != accepted:
            self._seats.accepted[client] = -1
            new = jax.tree.map(lambda x: np.asarray(x)[None], self._new_side())
            self._sides.write(np.array([client]), new)
        round_.heard[client] = answer, payload

    def _add(self, round_: "_Round", total: Total, client: int, payload: Any) -> tuple[Total, bool]:
        rows = np.array([client])
        side = jax.tree.map(lambda x: x[0], self._sides.read(rows))
        weight = jnp.float32(self.weights[client])
        given = (weight, payload, self._centre(), side, self._largest)
        total, accepted, side = _added(self.method, round_.key, total, jnp.uint32(client), *given)
        if not accepted:
            node = next(node for node, number in round_.asked.items() if number == client)
            text = "its message decodes to NaN, Inf or larger elements than allowed"
            self._refuse(round_, node, "not finite", text)
            return total, False
        self._sides.write(rows, jax.tree.map(lambda x: np.asarray(x)[None], side))
        self._seats.accepted[client] = round_.number
        return total, True

    def _step(self, round_: "_Round", total: Total) -> None:
        moves = server.moves(self.method, total)
        sums = server.weights_of(self.method, self.weights)
        self.state, payload = server.step(self.method, round_.key, self.state, total, sums)
        if payload is not None and self.method.downlink is not None:
            policy = self.method.downlink.policy
            self._history.add(to_bytes(policy, payload, self._like) if moves else b"")
        elif jax.tree.leaves(self.state.shared):  # Clients compute it from the parameters.
            self._history.add(raw.write(self.params) if moves else b"")
        else:
            self._history.add(None)

    def _refuse(self, round_: "_Round", node: int, kind: str, why: Any) -> None:
        self.refused[kind] += 1
        round_.refused[kind] += 1
        if round_.refused.total() <= _LINES:
            _log.warning("\t> node %d is refused: %s", node, why)

    def _log_dropouts(self, round_: "_Round") -> None:
        missing = len(round_.asked) - len(round_.heard)
        if round_.refused.total() > _LINES or missing:
            counts = ", ".join(f"{count} {kind}" for kind, count in round_.refused.most_common())
            _log.info("\t> %d clients have no part; refused: %s", missing, counts or "none")


@dataclasses.dataclass
class _Round:
    """A round between the messages to the clients and their answers.

    Attributes:
        number: of the round.
        key: of the round.
        cohort: the clients that were drawn.
        asked: the client of each node that was asked.
        down: bytes that were sent.
        heard: the answers with a message, and the message.
        refused: how many answers were refused, by kind.
    """

    number: int
    key: Array
    cohort: np.ndarray
    asked: dict[int, int]
    down: int
    heard: dict[int, tuple[Answer, Any]] = dataclasses.field(default_factory=dict)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@functools.partial(jax.jit, static_argnums=0)
def _added(
    method: Method,
    key: Array,
    total: Total,
    number: Array,
    weight: Array,
    payload: Any,
    centre: Centre,
    side: PyTree,
    largest: Array,
) -> tuple[Total, Array, PyTree]:
    """The sum with one more message, unless it is not finite or too large, or the sum would be."""
    like = raw.like(centre.params)
    guesses = method.uplink.side.at_server(centre.shared, side, centre.params)
    after, accepted, read = server.add(method, key, total, number, weight, payload, like, guesses)
    sums, leaves = jax.tree.leaves((after.stacks, after.dense)), jax.tree.leaves(read)
    accepted &= jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in sums]))
    accepted &= jnp.all(jnp.stack([jnp.all(jnp.abs(x) <= largest) for x in leaves]))
    total = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), after, total)
    return total, accepted, block.heard(method, like, side, read, accepted)

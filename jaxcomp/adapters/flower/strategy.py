"""The server on Flower: a strategy that takes a method's rounds."""

import collections
import pathlib
import secrets as secrets_
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import checks
from jaxcomp.adapters.flower import (
    adding,
    closing,
    extra,
    integers,
    limits,
    metrics,
    raw,
    records,
    settings as settings_,
    watching,
)
from jaxcomp.adapters.flower.closing import Quorum, Waiting
from jaxcomp.adapters.flower.hearing import Reader
from jaxcomp.adapters.flower.history import History
from jaxcomp.adapters.flower.memory import Centre
from jaxcomp.adapters.flower.published import Published
from jaxcomp.adapters.flower.records import Instruction
from jaxcomp.adapters.flower.seats import BEHIND, Seats
from jaxcomp.adapters.flower.server_round import Round, Taken, log
from jaxcomp.federated import checkpoint as checkpoint_, turns
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import ServerState
from jaxcomp.federated.simulation import Report, weights_of
from jaxcomp.messages import message_limit
from jaxcomp.numerics import noise
from jaxcomp.types import PyTree
from jaxcomp.weights import Publisher


class CompressedFedAvg(extra.FedAvg):
    """A Flower strategy that trains with a `Method`, and sends compressed bytes both ways.

    It has the bits of `Simulation`: the same sampling, clients' work and messages, added in the
    order of the clients. Clients run `client_app` or `compress_mod` of the same method. Every
    answer is checked before anything is made of it, and what is wrong with it is logged and
    counted. A round counts whole or, after an exception, not at all.

    A round draws its clients from the connected nodes that are clients; if all are connected, that
    is the simulation's draw. A node becomes a client when it is first seen, with the lowest free
    number, and keeps its number while it is away. If no number is free, a new node gets that of the
    node that has been away longest, and begins with a new memory; not with a `Shift` or control
    variates, for which it has to wait. A client gets the messages that it missed, or the whole
    parameters if these are fewer bytes.

    Args:
        method: the method. Its `sampling` says how many clients take part, where `FedAvg` has
            `fraction_train` and `min_train_nodes`.
        params: the parameters before the first round.
        clients: how many clients there are.
        key: a seed or key; everything random follows from it.
        weights: a weight for each client; None for equal weights.
        weighted_by_key: the name under which clients report their weight in their metric records,
            such as "num-examples"; it is multiplied by that of `weights`. A hostile client can
            report what it likes. None gives clients no say, whatever they report.
        weight_of: a function of all numbers that a client reports in its place, such as
            `jaxcomp.federated.tokens_squared_per_step`.
        quorum: when a round ends, and what becomes of later messages; None waits for all clients,
            up to the `timeout` of `start`.
        weights_to: publishes the parameters of each round, with its number as their step. A `Site`
            with a reader of them gets them there where it would get the whole parameters by
            message: when it joins or returns. Not with side information of the server.
        numbers: the number of each node, by its id, for nodes with lasting ids; None to number
            nodes as they come.
        secrets: `secrets(number)` gives a client's own secret, 16 to 64 bytes: only who knows it
            can write this client's messages. Goes with `numbers`.
        largest: refuses messages with an element that is larger, once decoded; None for any
            finite ones.
        min_available_nodes: a round waits for so many connected clients.
        train_metrics_aggr_fn: as for `FedAvg`, for the metric records beside accepted messages;
            None for the weighted mean of each of their numbers. Its errors end `start`, after the
            round is counted.
        checkpoint: a folder to which every round is saved, for `restore`, and in which
            `jaxcomp watch` finds the rounds; None for none.
        **settings: of `flwr`'s `FedAvg`, such as `fraction_evaluate`, which is zero by default.

    Attributes:
        state: the `ServerState`. It cannot be set: clients and mirrors would not fit it.
        reports: a `Report` of each round. Its loss is the mean of what the clients with accepted
            messages say.
        refused: how many answers were refused, by kind.
        late: how many late messages were added, by their age in rounds.
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
        weighted_by_key: str | None = None,
        numbers: Mapping[int, int] | None = None,
        weight_of: Callable[[Mapping[str, Any]], float] | None = None,
        quorum: Quorum | None = None,
        weights_to: Publisher | None = None,
        secrets: Callable[[int], bytes] | None = None,
        largest: float | None = None,
        min_available_nodes: int = 2,
        train_metrics_aggr_fn: Callable[[list[Any], str], Any] | None = None,
        checkpoint: str | pathlib.Path | None = None,
        **settings: Any,
    ):
        extra.require()
        checks.part("method", method, Method)
        checks.integer("clients", clients, 1)
        settings_.check_rounds(method, clients, min_available_nodes, quorum)
        settings_.check_clients(secrets, numbers, largest)
        settings_.check(method, clients, weighted_by_key, weight_of, settings)
        settings = {"fraction_evaluate": 0.0, **settings}
        settings["weighted_by_key"] = weighted_by_key or metrics.EXAMPLES  # For evaluation, too.
        super().__init__(min_available_nodes=min_available_nodes, **settings)
        self._given = raw.like(params)
        self.method, self.clients = integers.apart(method, self._given), clients
        self.key = noise.raw(key)
        self.weights = weights_of(weights, clients)
        self.reports: list[Report] = []
        self.up = self.down = 0
        self.refused: collections.Counter[str] = collections.Counter()
        self._state = turns.init(self.method, integers.as_floats(params), clients)
        self.late: collections.Counter[int] = collections.Counter()
        self._weighted_by, self._aggregated = weighted_by_key, train_metrics_aggr_fn
        self._like = raw.like(self._state.params)
        likes = turns.likes(self.method, self._like)
        self._limit = max(message_limit(self.method.uplink.policy, like) for like in likes)
        self._secrets, self._quorum = secrets, quorum
        folder = None if checkpoint is None else checkpoint_.folder_of(checkpoint, "checkpoint")
        self._checkpoints = folder
        self._seats = Seats(clients, numbers, lasting=method.mirrors)
        rules = (self.weights, weighted_by_key, weight_of, secrets)
        self._watch = watching.Watch(None if folder is None else folder.folder, self._seats)
        self._reader = Reader(self.method, likes, self._limit, self._seats, *rules)
        settings_.check_publisher(weights_to, self._state.shared)
        self._published = Published(weights_to)
        late = quorum is not None and quorum.oldest > 0
        self._adder = adding.Adder(self.method, self._state, clients, largest, late=late)
        self._history = History(raw.size(self._centre()))
        self._run, self._since = secrets_.token_bytes(8), time.time_ns()
        self._open: Round | None = None
        self._former: list[Round] = []  # Rounds whose clients may still answer.
        self._follows = False  # Whether checkpoints continue those that are there.

    @property
    def state(self) -> ServerState:
        """Everything that the server keeps, beside its memory of single clients."""
        return self._state

    @property
    def accepted(self) -> np.ndarray:
        """The round of each client's last accepted message; -1 for none."""
        return self._seats.accepted.copy()

    @property
    def params(self) -> PyTree:
        """The parameters, as all clients know them."""
        return integers.restore_integers(self._state.params, self._given)

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
        """Trains for more rounds, as `FedAvg.start`.

        Raises:
            ValueError: if `initial_arrays` are not the strategy's own parameters, or if the folder
                of checkpoints holds those of another training.
        """
        if self._checkpoints is not None:
            self._checkpoints.own()
        if initial_arrays is None:
            initial_arrays = records.late_arrays_of(self.params)
        new = None if self._follows else self._checkpoints
        settings_.check_start(initial_arrays, self.params, new)
        if new is not None:
            # What clients do in the first round belongs to a training that a kill must not end.
            self.save(new.folder)
        self._published.publish(self._state.params, int(self._state.round))
        configs = (train_config, evaluate_config, evaluate_fn)
        watched = self._watch.training(int(self._state.round), num_rounds, self.clients)
        with limits.limit_answers(grid, self._limit + limits.BESIDE), watched:
            given = grid if self._quorum is None else Waiting(grid, self._quorum, self.method.delay)
            return super().start(given, initial_arrays, num_rounds, timeout, *configs)

    def summary(self) -> None:
        """Logs the settings."""
        settings_.log_summary(self.method, self.clients)

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes a checkpoint, from which `restore` goes on bit for bit.

        A kill at any moment leaves the last one valid; the last two are kept. A checkpoint holds
        the state, the server's memory of single clients, which node is which client, the key, and
        the sums of bytes; not `reports` and `refused`, nor what clients keep themselves.

        Raises:
            ValueError: if `folder` holds something else, or if another process trains with it.
        """
        versions = checkpoint_.folder_of(folder, own=self._checkpoints)
        checkpoint_.save(versions, self._checkpoint(), self._adder.sides.arrays())
        self._follows = True

    def restore(self, folder: str | pathlib.Path, *, missing_ok: bool = False) -> None:
        """Goes on from the last checkpoint of a strategy with the same arguments: as its training.

        Warns if the last one is damaged, so that the one before it is taken. Nodes that were asked
        in a round that is asked again send the same message again. If it is not the checkpoint of
        the last round, what clients have kept since then is of no use: they begin with new
        memories, or are refused with a `Shift`.

        Args:
            folder: the folder of the checkpoint.
            missing_ok: whether to do nothing if there is no checkpoint yet.

        Raises:
            ValueError: if `folder` holds no checkpoint, one of other shapes, or only damaged ones.
        """
        versions = checkpoint_.folder_of(folder, own=self._checkpoints)
        rows = self._adder.sides.arrays()
        kept = checkpoint_.restore(versions, self._checkpoint(), rows, missing_ok=missing_ok)
        if kept is None:
            return
        self._adder.sides.fill(rows)
        state, pending, key, run, seats, counts = kept
        state, self._adder.pending, self.key = jax.tree.map(jnp.asarray, (state, pending, key))
        self._state = state
        self._run, (self.up, self.down, since) = run.tobytes(), map(int, counts)
        self._since = max(time.time_ns(), since + 1)
        self._seats.take(seats)
        self._history = History(self._history.whole)
        self._open, self._former, self._follows = None, [], True
        self.reports = [report for report in self.reports if report.round < state.round]

    def _checkpoint(self) -> Any:
        """Everything that a checkpoint holds, beside the rows; its shapes never change."""
        run = np.frombuffer(self._run, np.uint8)
        counts = np.array([self.up, self.down, self._since], np.int64)
        return self._state, self._adder.pending, self.key, run, self._seats.save(), counts

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> list[Any]:
        """The messages of a round: what each of its clients needs to begin."""
        del arrays
        seated = closing.free(grid, self._seats.wait_for(grid, self.min_available_nodes))
        number = int(self._state.round)
        key = turns.key(self.method, self._like, self.key, number)
        cohort = self.method.sampling.among(key, self.clients, np.array(list(seated)))
        config["server-round"] = server_round
        nodes, messages, sizes = {int(client): seated[int(client)] for client in cohort}, {}, {}
        whole_array: Any = None  # Most rounds have nobody who needs it.
        digest = raw.digest(self._centre())
        for client, node in nodes.items():
            has = int(self._seats.has[client])
            base, parts = has, self._history.needed(has, number)
            if parts is None:
                published = self._published.round == number and has != BEHIND
                base = records.PUBLISHED if published else records.WHOLE
                if not published and whole_array is None:
                    whole_array = records.array(raw.write(self._centre()), records.CENTRE)
                parts = () if published else (whole_array.data,)
            given = self._instruction(number, client, node, base, digest, parts)
            secret = None if self._secrets is None else self._secrets(client)
            array = whole_array if base == records.WHOLE else None
            content = records.write_instruction(given, secret, array)
            content[self.configrecord_key] = config
            messages[client] = extra.Message(
                content=content, message_type="train", dst_node_id=node
            )
            sizes[client] = sum(map(len, parts))
        log.info("configure_train: round %d, %d of %d clients", number, len(nodes), len(seated))
        sent = {client: message.metadata for client, message in messages.items()}
        for former in self._former:  # An answer to what a client was asked before is of no use.
            former.waiting -= set(nodes)
        oldest = 0 if self._quorum is None else self._quorum.oldest
        self._open = Round(number, key, nodes, sent, sizes, oldest)
        self.down += self._open.down
        return list(messages.values())

    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
        """Adds the messages in the order of the clients, and moves the parameters."""
        del server_round
        if self._open is None:
            raise ValueError("`replies` must come after configure_train, got some before it")
        round_, self._open = self._open, None
        rounds = [*self._former, round_]
        for reply in replies:
            asked = next((one for one in rounds if one.find_client(reply) is not None), round_)
            client = asked.find_client(reply)
            self._reader.hear(self._run, asked, reply, round_.number)
            asked.waiting -= {client}
        heard = [one.answer for each in rounds for one in each.heard.values()]
        sizes = {answer.client: len(answer.payload) for answer in heard}
        up = sum(sizes.values())
        turn = turns.of(self.method, self._like, round_.number)
        lane, total, taken, pending = self._adder.sum(self._state, rounds)
        lane, message = adding.step(self.method, round_.key, lane, total, self.weights)
        # Nothing is kept of a round before it is complete: after an error it can be repeated.
        self._state = turns.join(self.method, self._state, turn, lane)
        self._adder.pending = pending
        self._history.add(message)
        self._published.publish(self._state.params, int(self._state.round))
        for client, one in taken.items():
            row = jax.tree.map(lambda x: np.asarray(x)[None], one.side)
            self._adder.sides.write(np.array([client]), row)
            self._seats.accepted[client] = one.round
        self.up += up
        self.late.update(round_.log_late(one.round for one in taken.values()))
        for one in rounds:
            self.refused.update(one.refused)
            one.refused.clear()
        self._former = [] if self._quorum is None else [one for one in rounds if one.waiting]
        loss = records.mean_loss({client: one.loss for client, one in taken.items()})
        report = Report(round_.number, len(round_.cohort), len(taken), loss, up, round_.down)
        self.reports.append(report)
        log.info("aggregate_train: %r", report)
        if self._checkpoints is not None:
            self.save(self._checkpoints.folder)
        self._watch.write(report, (self.up, self.down), rounds, taken, sizes)
        return records.late_arrays_of(self.params), self._metrics(report, list(taken.values()))

    def _centre(self) -> Centre:
        return Centre(self._state.params, self._state.shared)

    def _instruction(
        self,
        number: int,
        client: int,
        node: int,
        base: int,
        digest: bytes,
        parts: tuple[bytes, ...],
    ) -> Instruction:
        seed, accepted = np.asarray(self.key).tobytes(), int(self._seats.accepted[client])
        given = (number, client, base, accepted, seed, digest, self._since)
        return Instruction(self._run, *given, node.to_bytes(8, "little"), parts)

    def _metrics(self, report: Report, taken: list[Taken]) -> Any:
        """The report, and beside it what the clients report."""
        if self._weighted_by is None and len(self.reports) == 1:
            metrics.warn_of_examples([one.metrics for one in taken])
        own = {name: value for name, value in report._asdict().items() if value == value}
        found = metrics.aggregate(taken, self._aggregated, self.weighted_by_key)
        # No client may say how many were accepted; a function of the server's own may.
        return extra.MetricRecord(found | own if self._aggregated is None else own | found)

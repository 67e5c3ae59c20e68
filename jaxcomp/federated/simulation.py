"""A simulation of many clients on few devices, round by round."""

import collections
import concurrent.futures
import functools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxcomp import checks
from jaxcomp.federated import block, checkpoint, server, turns
from jaxcomp.federated.arrivals import Arrivals
from jaxcomp.federated.block import Clients, Done, Known
from jaxcomp.federated.faults import Faults
from jaxcomp.federated.ledger import Ledger
from jaxcomp.federated.method import Method
from jaxcomp.federated.program import Program
from jaxcomp.federated.table import OnDevice, OnHost, Table
from jaxcomp.numerics import noise
from jaxcomp.types import PyTree

Batches = Callable[[np.ndarray, int], Any]
"""`batches(numbers, round)`: arrays `[clients, steps, …]`, the data of these clients."""


class Report(NamedTuple):
    """The report of a round.

    Attributes:
        round: its number, from 0.
        sampled: how many clients were drawn.
        accepted: how many messages were part of the mean.
        loss: the mean of the clients' losses over their local steps, before the round's update, of
            clients whose loss is finite; NaN without any.
        up: bytes that clients sent.
        down: bytes that clients received, with what they had missed.
    """

    round: int
    sampled: int
    accepted: int
    loss: float
    up: int
    down: int


class Simulation:
    """Rounds of a federated method over any number of clients.

    Each round runs as blocks of clients: a compiled scan, in which every client does its local
    steps and encodes its message. The server adds the messages in the order of the clients. So
    neither `chunk` nor the number of devices changes a bit of the result.

    Args:
        method: the method.
        params: the parameters before the first round.
        clients: how many clients there are.
        batches: `batches(numbers, round)` gives the data of these clients for a round: arrays
            `[len(numbers), steps, …]`. Called ahead of time, in another thread.
        key: a seed or key; everything random follows from it.
        weights: a weight for each client, such as its number of examples; None for equal weights.
        steps: `steps(numbers, round)` gives how many of its batches each client uses; None for all.
        faults: which messages are lost, and which clients begin from old parameters.
        delays: `delays(numbers, round)` gives for each of these clients, which begin in this round,
            how many rounds later its message arrives, at most `faults.longest`; it takes part in no
            round before that. None for messages that arrive at once. A message is that of the round
            in which its client began, and counts for less by the method's `staleness`.
        chunk: how many clients are worked on at once on each device of a mesh, or with `together`;
            else clients are worked on one by one, in a block for each core.
        mesh: a mesh of one axis, over whose devices clients are spread; None for one device.
        together: vectorize the clients of a chunk: for accelerators.
        table: where what clients keep is: in the "memory" of the host, on the "device", or in
            mapped files in a folder, for more than memory can hold.
        messages: how many messages of a block are written by `to_bytes` for the ledger, which is
            slow; the mean of their bytes stands for the others'. With 0, the bytes are those of the
            payloads' arrays, without a head and before entropy coding.

    Warns if no leaf of `params` is compressed.

    Raises:
        ValueError: for settings of another kind; on use, for data of other shapes.

    Example:
        >>> import jax.numpy as jnp, jaxcomp, optax
        >>> work = jaxcomp.federated.LocalSteps(lambda w, x: jnp.mean((w - x) ** 2), optax.sgd(0.1))
        >>> codec = jaxcomp.Policy(jaxcomp.qsgd_inf(bits=8), min_size=0, min_ndim=0)
        >>> method = jaxcomp.federated.Method(work, codec)
        >>> data = np.random.default_rng(0).normal(3, 1, (100, 5, 8, 16)).astype(np.float32)
        >>> sim = Simulation(method, jnp.zeros(16), 100, lambda numbers, round: data[numbers])
        >>> reports = sim.run(5)
        >>> bool(reports[-1].loss < reports[0].loss)
        True
    """

    def __init__(
        self,
        method: Method,
        params: PyTree,
        clients: int,
        batches: Batches,
        *,
        key: Any = 0,
        weights: Any = None,
        steps: Callable[[np.ndarray, int], np.ndarray] | None = None,
        faults: Faults = Faults(),
        delays: Callable[[np.ndarray, int], Any] | None = None,
        chunk: int = 16,
        mesh: Mesh | None = None,
        together: bool = False,
        table: str | pathlib.Path = "memory",
        messages: int = 0,
    ):
        checks.part("method", method, Method)
        checks.part("faults", faults, Faults)
        checks.integer("clients", clients, 1)
        checks.integer("chunk", chunk, 1)
        checks.integer("messages", messages, 0)
        if mesh is not None and len(mesh.axis_names) != 1:
            raise ValueError(f"`mesh` must have one axis, got {mesh.axis_names}")
        if faults.old and method.streams:
            raise ValueError(
                "`faults` must have no old parameters with fragments, a delay or a mix, where "
                f"clients go on from their own, got {faults!r}"
            )
        self._arrivals = Arrivals(method, clients, faults, delays)
        self.method, self.clients, self.batches = method, clients, batches
        self.key, self.steps, self.faults = noise.raw(key), steps, faults
        self.weights = weights_of(weights, clients)
        self.state = turns.init(method, params, clients)
        row = jax.tree.map(np.asarray, block.init(method, self.state.params))
        self.table = _table(table, row, clients, mesh)
        self.ledger = Ledger(method, self.state.params, clients, messages)
        self._centres = [self.state.params]
        devices = 1 if mesh is None else mesh.size
        row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(row))
        self._program = Program(
            method, chunk, mesh, together, messages > 0 or not method.aggregate.streams
        )
        alone = self._program.beside > 1
        once = 1 if alone else chunk * devices
        most = _SMALL if alone and not messages else _BLOCK  # `messages` are of each block.
        chunks = min(-(-clients // once), max(1, most // (once * row_bytes + 1)))
        self._size = once * chunks

    @property
    def params(self) -> PyTree:
        """The parameters, as all clients know them."""
        return self.state.params

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes a checkpoint, from which `restore` goes on bit for bit.

        A kill at any moment leaves the last one valid. The last two are in `folder`, each with
        checksums.

        Raises:
            ValueError: if `folder` holds something else, which is never overwritten.
        """
        checkpoint.save(checkpoint.folder_of(folder), self._kept(), self.table.arrays())

    def restore(self, folder: str | pathlib.Path, *, missing_ok: bool = False) -> None:
        """Goes on from the last checkpoint of a simulation with the same arguments.

        Warns if the last one is damaged, so that the one before it is taken.

        Args:
            folder: the folder of the checkpoint.
            missing_ok: whether to do nothing if there is no checkpoint yet.

        Raises:
            ValueError: if `folder` holds no checkpoint, one of other shapes, or only damaged ones.
        """
        rows, versions = self.table.arrays(), checkpoint.folder_of(folder)
        kept = checkpoint.restore(versions, self._kept(), rows, missing_ok=missing_ok)
        if kept is None:
            return
        self.table.fill(rows)
        state, centres, number, begun, *counted = kept
        self._arrivals.take(begun)
        self.state = jax.tree.map(jnp.asarray, state)
        self._centres = [jax.tree.map(jnp.asarray, c) for c in centres][: int(number)]
        self.ledger.take(*counted)

    def _kept(self) -> Any:
        """Everything that a checkpoint holds, beside the table; its shapes never change."""
        known = self.state, self._padded(), np.int64(len(self._centres))
        return *known, self._arrivals.kept(), *self.ledger.kept()

    def _padded(self) -> list[PyTree]:
        """The parameters of the last rounds, always of as many, so that one program takes them."""
        missing = self.faults.longest + 1 - len(self._centres)
        return [*self._centres, *[self._centres[-1]] * missing]

    def run(self, rounds: int, each: Callable[[Report], None] | None = None) -> list[Report]:
        """Runs rounds.

        Args:
            rounds: how many.
            each: called with the report of every round, for a line or a bar of progress.
        """
        checks.integer("rounds", rounds, 0)
        reports = []
        for _ in range(rounds):
            reports.append(self.round())
            if each is not None:
                each(reports[-1])
        return reports

    def round(self) -> Report:
        """Runs the next round."""
        number = int(self.state.round)
        turn = turns.of(self.method, self.params, number)
        key = turns.key(self.method, self.params, self.key, number)
        lane = turns.lane(self.method, self.state, turn)
        cohort = self._arrivals.begin(key, number)
        losses, accepted, heard_all = [], 0, []
        down = self.ledger.fetched(cohort, number)
        up, total = 0, server.nothing(self.method, lane.params)
        for numbers, weights, done in self._blocks(total, number, turn):
            total = done.total
            self.table.write(numbers, done.own)
            heard = np.asarray(done.accepted)[: len(numbers)]
            accepted += int(heard.sum())
            losses.append(np.asarray(done.losses)[: len(numbers)])
            if not self.method.aggregate.streams:
                heard_all.append(_messages(len(numbers), weights, done))
            came = np.asarray(done.sent)[: len(numbers)]
            up += self.ledger.received(came, done.payloads, turn)
        if heard_all:
            weights, payloads = jax.tree.map(lambda *parts: np.concatenate(parts), *heard_all)
            rows = np.arange(len(cohort))
            held = server.fill_table(cohort, self.clients, weights, rows, payloads)
            lane, total = server.combine(self.method, key, lane, held)
            accepted = int(total.count)
        sums = server.weights_of(self.method, self.weights)
        lane, payload = server.step(self.method, key, lane, total, sums)
        self.state = turns.join(self.method, self.state, turn, lane)
        self.ledger.announced(payload, server.moves(self.method, total), turn)
        self._centres = [self.state.params, *self._centres][: self.faults.longest + 1]
        heard = np.concatenate(losses) if losses else np.zeros(0)
        finite = heard[np.isfinite(heard)]
        loss = float(np.mean(finite)) if finite.size else math.nan
        return Report(number, len(cohort), accepted, loss, up, down)

    def _blocks(
        self, total: server.Total, number: int, turn: int
    ) -> Iterator[tuple[np.ndarray, Any, Done]]:
        """The clients of each block, their weights, and what they did; the next ones are begun."""
        begun = collections.deque()
        centres = jax.tree.map(lambda *xs: jnp.stack(xs), *self._padded())
        for began, cohort in self._arrivals.end(number):
            key = turns.key(self.method, self.params, self.key, began)
            known = Known(key, centres, self.state.shared)
            for numbers, given in self._prepared(cohort, began, number - began, key):
                done = self._program(turn, known, total, *given)
                total = done.total
                begun.append((numbers, given[0].weights, done))
                if len(begun) >= self._program.beside:
                    yield begun.popleft()
        yield from begun

    def _prepared(self, cohort: np.ndarray, number: int, age: int, key: Any) -> Iterator[Any]:
        """The blocks of clients that began in a round; while one is computed, the next is read."""
        starts = range(0, len(cohort), self._size)
        arrives, ages = self.faults.draw(key, cohort, len(self._centres))
        ages = ages + age

        def prepare(start: int) -> Any:
            part = slice(start, start + self._size)
            numbers = cohort[part]
            batches = self.batches(numbers, number)
            most = _steps_of(batches, len(numbers))
            steps = self.steps(numbers, number) if self.steps else np.full(len(numbers), most)
            weights = self.weights[numbers] * self.faults.times(
                arrives[part], ages[part], self.method.staleness
            )
            clients = Clients(
                numbers.astype(np.uint32),
                weights.astype(np.float32),
                ages[part].astype(np.int32),
                np.asarray(steps, np.int32),
            )
            given = clients, batches, self.table.lend(numbers)
            return numbers, jax.tree.map(functools.partial(_filled, self._size), given)

        with concurrent.futures.ThreadPoolExecutor(1) as ahead:
            coming = [ahead.submit(prepare, start) for start in starts[:1]]
            for index in range(len(starts)):
                ready = coming.pop().result()
                if index + 1 < len(starts):
                    coming.append(ahead.submit(prepare, starts[index + 1]))
                yield ready


_BLOCK, _SMALL = 2**26, 2**23
"""Bytes of the table in one block, over all devices: the host holds several copies of a block. The
memory of a small one is used again; that of a large one is new, with a fault for each page."""


def _messages(count: int, weights: np.ndarray, done: Done) -> tuple[np.ndarray, Any]:
    """The weights and messages of the clients of a block, without those that fill it up."""
    weights = np.where(np.asarray(done.accepted), np.asarray(weights), 0).astype(np.float32)
    return weights[:count], jax.tree.map(lambda x: np.asarray(x)[:count], done.payloads)


def _table(where: Any, row: PyTree, clients: int, mesh: Mesh | None) -> Table:
    if not isinstance(where, str | pathlib.Path):
        raise ValueError(f"`table` must be 'memory', 'device' or a folder, got {where!r}")
    if where == "device":
        if mesh is not None:
            raise ValueError(
                "`table` must be 'memory' or a folder with a mesh, since a client may be on "
                "another device in every round, got 'device'"
            )
        return OnDevice(row, clients)
    return OnHost(row, clients, None if where == "memory" else where)


def weights_of(given: Any, clients: int) -> np.ndarray:
    """A weight for each client, checked; equal ones for None."""
    if given is None:
        return np.ones(clients, np.float32)
    weights = np.asarray(given, np.float32)
    if weights.shape != (clients,) or not np.isfinite(weights).all() or (weights <= 0).any():
        raise ValueError(
            f"`weights` must be {clients} positive numbers, one for each client, got "
            f"{weights.dtype}{list(weights.shape)} from {weights.min(initial=0)} on"
        )
    return weights


def _steps_of(batches: Any, clients: int) -> int:
    shapes = [np.shape(x) for x in jax.tree.leaves(batches)]
    if not shapes or any(len(s) < 2 or s[:2] != (clients, shapes[0][1]) for s in shapes):
        raise ValueError(
            f"`batches` must give arrays [{clients} clients, steps, …] for {clients} clients, got "
            f"shapes {shapes}"
        )
    return shapes[0][1]


def _filled(size: int, x: Any) -> Any:
    """The rows, filled up to a whole block with clients of weight zero."""
    if len(x) == size:
        return x
    if isinstance(x, jax.Array):
        return jnp.pad(x, [(0, size - len(x)), *[(0, 0)] * (x.ndim - 1)])
    x = np.asarray(x)
    filled = np.zeros((size, *x.shape[1:]), x.dtype)
    filled[: len(x)] = x
    return filled

"""A site: a client of Flower whose process stays up between rounds."""

import collections
import functools
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxcomp import checks
from jaxcomp.adapters.flower import client, extra, files, placing, published, raw
from jaxcomp.adapters.flower.counts import Counts, since_accepted
from jaxcomp.adapters.flower.placing import Placed
from jaxcomp.adapters.flower.records import Instruction
from jaxcomp.federated import block, turns
from jaxcomp.federated.block import Clients, Known, Own
from jaxcomp.federated.method import Method
from jaxcomp.federated.streaming import Streamed
from jaxcomp.federated.uplink import Message
from jaxcomp.types import PyTree
from jaxcomp_site import courier
from jaxcomp_site.packing import packed, unpacked
from jaxcomp_weights import Reader

Data = Callable[[int, int], Any]
"""`data(number, taken)`: arrays `[steps, …]`, the batches of client `number` from its step `taken`
on."""

_SITE = "jaxcomp.site"
_PATIENCE = 2.0
"""Seconds for which a process of the site that was killed may live on."""


class Site:
    """A client whose process stays up: it compiles once, and keeps its own state in a folder.

    Flower starts a process for each message. With the app `jaxcomp_site.app:app`, that process
    imports no JAX and hands the message to this one, which keeps the compiled program, the state of
    the inner optimizer, the residual and the position in its data. All of that but the program is
    in a checkpoint in `folder` before an answer is sent. A site that is killed goes on from there:
    what it had answered it answers again, and a round that it was in begins anew. After an error
    in a round, of `data` for instance, the site is as it was before that round; the error is
    logged, told to the server, and the site stays up.

    A folder belongs to one process, and in a training to one node of Flower. A second one is
    refused.

    With a method that has a `delay`, the site takes these steps while its message is under way. A
    site of several processes takes them when the next message is here.

    Args:
        method: the method, as on the server.
        like: the parameters, or their shapes and dtypes.
        data: `data(number, taken)` gives arrays `[steps, …]`: the batches of client `number` from
            its step `taken` on. Their number is that of the steps of a round, and may differ
            between sites and rounds.
        folder: the site's own folder, which the SuperNode names with `--node-config
            'site="folder"'`.
        secret: the client's own secret, 16 to 64 bytes; None for none.
        metrics: `metrics(number, steps)` gives what the site reports of a round, beside the number
            of its "steps" and the "seconds" that they took, such as `{"tokens": 8192 * steps}`.
            Where a residual keeps what was refused, these three are reported since the last
            accepted message.
        weights: reads the parameters where the server publishes them (`weights_to` of
            `CompressedFedAvg`) when the site joins or returns; None to get them by message.
        placed: where the arrays of a site of several devices are, which may be those of several
            processes of `jax.distributed`; None for one device.

    Attributes:
        taken: the steps of the site so far; those of a delay count when they are taken.
        refused: how many messages it could not answer, by the name of the error.

    Raises:
        ImportError: without Flower.
        ValueError: for settings of another kind, a folder that holds something else or a memory of
            which nothing is whole, or if another process has the folder.

    Example:
        >>> site = Site(method, params, data, folder="/var/lib/site")  # doctest: +SKIP
        >>> site.serve()  # doctest: +SKIP
    """

    def __init__(
        self,
        method: Method,
        like: PyTree,
        data: Data,
        *,
        folder: "str | os.PathLike[str]",
        secret: bytes | None = None,
        metrics: Callable[[int, int], Mapping[str, Any]] | None = None,
        weights: Reader | None = None,
        placed: Placed | None = None,
    ):
        extra.require()
        checks.function("data", data)
        checks.path("folder", folder)
        if metrics is not None:
            checks.function("metrics", metrics)
        if placed is not None:
            checks.part("placed", placed, Placed)
        if weights is not None:
            checks.instance("weights", weights, Reader, "jaxcomp_weights.Reader(url)")
        self._folder = pathlib.Path(folder)
        self.refused: collections.Counter[str] = collections.Counter()
        self._left: tuple[int, Any] | None = None  # The client and what it keeps, before a delay.
        self._ahead: tuple[int, Any] | None = None  # Its steps before, and what it keeps after.
        self._like = raw.like(like)
        self._weights = weights
        own = None if secret is None else lambda _: secret
        self._work = client.work_of(method, like, own, published=self._published)
        self._method, self._data, self._metrics, self._placed = method, data, metrics, placed
        self._memory = files.folder_of(self._folder / "memory", "folder", _PATIENCE)
        self._take(extra.RecordDict())
        if jax.process_index() == 0:
            self._memory.own()
            self._take(files.read(self._memory))

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Does the rounds that it is asked for, one after another, until `until()` after one.

        In a site of several processes, all call it: the first one listens, and tells the others.
        """
        if jax.process_count() == 1:
            courier.serve(self._folder, self.answer, until, self._go_on)
            return
        self._take(unpacked(_broadcast(packed(self._state))))
        if jax.process_index() == 0:
            courier.serve(self._folder, lambda content: self.answer(_broadcast(content)), until)
            _broadcast(b"")
            return
        while content := _broadcast(b""):
            courier.reply(self.answer, content)  # The first process says it to who asked.

    def answer(self, content: bytes) -> bytes:
        """The answer to a message, once it is in the checkpoint; an error leaves all as before."""
        before = self.taken, self._counts, self._left, self._ahead
        state = extra.RecordDict(dict(self._state.items()))

        def work() -> Any:
            found = self._work(unpacked(content, views=True), state, self._run)
            counts = {} if self._counts is None else {"counts": self._counts.write()}
            state[_SITE] = extra.ConfigRecord({"taken": self.taken, **counts})
            if jax.process_index() == 0:
                files.write(self._memory, state)
            return found

        try:
            found = _on_all_processes(work)
        except Exception as error:
            self.taken, self._counts, self._left, self._ahead = before
            self.refused[type(error).__name__] += 1
            raise
        self._state = state
        return packed(found)

    def _go_on(self) -> None:
        """Takes the steps of the delay, while the answer is under way."""
        left, self._left = self._left, None
        if left is None:
            return
        number, kept = left
        try:
            self._ahead = int(kept.due), self._rest(number, kept)
            self.taken = int(kept.due) + self._method.delay
        except Exception as error:  # They are taken again in the next round, which says it too.
            courier.log.warning("steps of the delay failed: %s: %s", type(error).__name__, error)

    def _take(self, state: Any) -> None:
        """Goes on from this state."""
        self._state, self.taken = state, 0
        self._counts: Counts | None = None
        if _SITE in state:
            kept = state[_SITE]
            self.taken = int(kept["taken"])
            self._counts = Counts.read(kept["counts"]) if "counts" in kept else None

    def _run(self, known: Known, given: Instruction, own: Own) -> client.Worked:
        """The steps of a round."""
        start = time.monotonic()
        own = own._replace(inner=self._finish_delay(given.client, own.inner))
        batches = _on_all_processes(lambda: self._data(given.client, self.taken))
        steps = client.steps_of(batches)
        turn = turns.of(self._method, self._like, given.round)
        parts = known, client.who(given, steps), batches, own
        if self._placed is None:
            found = _one_round(self._method, turn, *parts)
        else:
            found = placing.work(self._method, self._placed, turn, *parts)
        sent, inner, loss = jax.block_until_ready(found)
        sound = bool(sent.sound)
        self.taken += steps - self._method.delay * sound
        if self._method.delay and sound:
            inner = inner._replace(due=np.int32(self.taken))
            self._left = given.client, inner
        numbers = {"steps": steps, "seconds": time.monotonic() - start}
        if self._metrics is not None:
            numbers |= self._metrics(given.client, steps)
        if self._method.uplink.feedback.facts.keeps_unsent:
            numbers, self._counts = since_accepted(self._counts, given, numbers)
        reported = {"metrics": extra.MetricRecord(numbers)}
        return client.Worked(sent, inner, float(loss), reported)

    def _finish_delay(self, number: int, kept: Any) -> Any:
        """Returns the site's memory after the steps of the last round's delay."""
        ahead, self._ahead, self._left = self._ahead, None, None
        if not self._method.delay or kept.due < 0:
            return kept
        due = int(kept.due)
        self.taken = due + self._method.delay
        return ahead[1] if ahead is not None and ahead[0] == due else self._rest(number, kept)

    def _published(self, round_: int) -> Any:
        """The parameters of a round, where they are published."""
        return None if self._weights is None else published.read(self._weights, self._like, round_)

    def _rest(self, number: int, kept: Streamed) -> Streamed:
        """The steps of a delay."""
        delay = self._method.delay
        given = _on_all_processes(lambda: self._data(number, int(kept.due)))
        batches = jax.tree.map(lambda x: x[:delay], given)
        if client.steps_of(batches) < delay:
            raise ValueError(
                f"`data` must give batches of more steps than the delay, {delay}, got "
                f"{client.steps_of(batches)}"
            )
        if self._placed is not None:
            return placing.rest(self._method, self._placed, kept, batches)
        return jax.block_until_ready(_rest_alone(self._method)(kept, batches))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_round(
    method: Method, turn: int, known: Known, who: Clients, batches: Any, own: Own
) -> tuple[Message, PyTree, Any]:
    """The round of a site of one device, without the steps of a delay."""
    return client.unread(block.worker(method, turn)(known, who, batches, own))


@functools.lru_cache(maxsize=8)
def _rest_alone(method: Method) -> Callable[..., Any]:
    run, steps = block.rester(method), jnp.int32(method.delay)
    return jax.jit(lambda kept, batches: run(kept, batches, steps))


def _on_all_processes(do: Callable[[], Any]) -> Any:
    """Returns `do()`; raises if it fails on any process, for which others would wait."""
    found = wrong = None
    try:
        found = do()
    except Exception as error:
        wrong = error
    several = jax.process_count() > 1
    if several and multihost_utils.process_allgather(np.int32(wrong is not None)).any():
        wrong = wrong or RuntimeError("another process of the site failed, whose log says why")
    if wrong is not None:
        raise wrong
    return found


def _broadcast(content: bytes) -> bytes:
    """Sends the first process's content to all others."""
    length = multihost_utils.broadcast_one_to_all(np.int64(len(content)))
    padded = np.zeros(int(length), np.uint8)
    if jax.process_index() == 0:
        padded[:] = np.frombuffer(content, np.uint8)
    found = multihost_utils.broadcast_one_to_all(padded) if length else padded
    return np.asarray(found).tobytes()

"""A site: a client of Flower whose process stays up between rounds."""

import functools
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp import checks
from jaxcomp.adapters.flower import client, extra, files
from jaxcomp.adapters.flower.records import Instruction
from jaxcomp.federated import block
from jaxcomp.federated.block import Clients, Known, Own
from jaxcomp.federated.method import Method
from jaxcomp.types import PyTree
from jaxcomp_site import courier
from jaxcomp_site.packing import packed, unpacked

Data = Callable[[int, int], Any]
"""`data(number, taken)`: arrays `[steps, …]`, the batches of client `number` from its step `taken`
on."""

_SITE = "jaxcomp.site"


class Placed(NamedTuple):
    """Where the arrays of a site of several devices are.

    Attributes:
        mesh: its devices.
        params: a `PartitionSpec` for each parameter, or one for all.
        batch: the spec of a batch, without the axis of steps.
    """

    mesh: Mesh
    params: PyTree
    batch: PartitionSpec


class Site:
    """A client whose process stays up: it compiles once, and keeps its own state in a folder.

    Flower starts a process for each message. With the app `jaxcomp_site.app:app`, that process
    imports no JAX and hands the message to this one, which keeps the compiled program, the state of
    the inner optimizer, the residual and the position in its data. All of that but the program is
    in a checkpoint in `folder` before an answer is sent. A site that is killed goes on from there:
    what it had answered it answers again, and a round that it was in begins anew.

    Args:
        method: the method, as on the server.
        like: the parameters, or their shapes and dtypes.
        data: `data(number, taken)` gives arrays `[steps, …]`: the batches of client `number` from
            its step `taken` on. Their number is that of the steps of a round, and may differ
            between sites and rounds.
        folder: the site's own folder, which the SuperNode names with `--node-config
            'site="folder"'`.
        secret: the client's own secret, 16 to 64 bytes; None for none.
        metrics: `metrics(number, steps)` gives what the site reports, beside the number of its
            "steps" and the "seconds" that they took, such as `{"tokens": 8192 * steps}`.
        placed: where the arrays of a site of several devices are, which may be those of several
            processes of `jax.distributed`; None for one device.

    Attributes:
        taken: the steps of the site so far.

    Raises:
        ImportError: without Flower.
        ValueError: for settings of another kind, or a folder that holds something else.

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
        placed: Placed | None = None,
    ):
        extra.needed()
        checks.function("data", data)
        checks.path("folder", folder)
        if metrics is not None:
            checks.function("metrics", metrics)
        if placed is not None:
            checks.part("placed", placed, Placed)
        self._folder = pathlib.Path(folder)
        self._file = self._folder / "memory"
        self._take(files.read(self._file))
        self._work = client.work_of(method, like, None if secret is None else lambda _: secret)
        self._method, self._data, self._metrics, self._placed = method, data, metrics, placed

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Does the rounds that it is asked for, one after another, until `until()` after one.

        In a site of several processes, all call it: the first one listens, and tells the others.
        """
        if jax.process_count() == 1:
            courier.serve(self._folder, self.answer, until)
            return
        self._take(unpacked(_told(packed(self._state))))
        if jax.process_index() == 0:
            courier.serve(self._folder, lambda content: self.answer(_told(content)), until)
            _told(b"")
            return
        while content := _told(b""):
            try:
                self.answer(content)
            except ValueError:  # The first process tells it to who asked.
                continue

    def answer(self, content: bytes) -> bytes:
        """The answer to a message, once it is in the checkpoint."""
        found = self._work(unpacked(content), self._state, self._run)
        self._state[_SITE] = extra.ConfigRecord({"taken": self.taken})
        if jax.process_index() == 0:
            files.write(self._file, self._state)
        return packed(found)

    def _take(self, state: Any) -> None:
        """Goes on from this state."""
        self._state, self.taken = state, 0
        if _SITE in state:
            self.taken = int(state[_SITE]["taken"])

    def _run(self, known: Known, given: Instruction, own: Own) -> client.Worked:
        """The steps of a round."""
        start = time.monotonic()
        batches = self._data(given.client, self.taken)
        steps = client.steps_of(batches)
        who = client.who(given, steps)
        if self._placed is None:
            found = client.one_round(self._method, known, who, batches, own)
        else:
            found = _spread(self._method, self._placed, known, who, batches, own)
        sent, inner, loss = jax.block_until_ready(found)
        self.taken += steps
        numbers = {"steps": steps, "seconds": time.monotonic() - start}
        if self._metrics is not None:
            numbers |= self._metrics(given.client, steps)
        reported = {"metrics": extra.MetricRecord(numbers)}
        return client.Worked(sent, inner, float(loss), reported)


def _spread(
    method: Method, placed: Placed, known: Known, who: Clients, batches: Any, own: Own
) -> Any:
    """The work of a client over the devices of its mesh."""
    mesh, specs = placed.mesh, placed.params
    centre = jax.tree.map(lambda x: x[0], known.centres)
    if isinstance(specs, PartitionSpec):
        specs = jax.tree.map(lambda _: placed.params, centre)

    def lies(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    everywhere = lies(PartitionSpec())
    home = jax.tree.map(lies, specs)
    of_inner = (
        optax.tree_utils.tree_map_params(
            method.work.optimizer,
            lambda _, where: where,
            own.inner,
            home,
            transform_non_params=lambda _: everywhere,
        )
        if method.work.keep
        else ()
    )
    before = jax.tree.map(lambda spec: lies(PartitionSpec(None, *spec)), specs)
    # All processes have the same values, which must not belong to a device of one of them.
    known, who, own = jax.device_get((known, who, own))
    given = (
        known._replace(centres=jax.device_put(known.centres, before)),
        who,
        jax.device_put(batches, lies(PartitionSpec(None, *placed.batch))),
        own._replace(inner=jax.device_put(own.inner, of_inner)),
    )
    return _compiled(method, everywhere)(*given)


@functools.lru_cache(maxsize=8)
def _compiled(method: Method, everywhere: NamedSharding) -> Callable[..., Any]:
    return jax.jit(functools.partial(block.client, method), out_shardings=everywhere)


def _told(content: bytes) -> bytes:
    """What the first process tells all others."""
    length = multihost_utils.broadcast_one_to_all(np.int64(len(content)))
    padded = np.zeros(int(length), np.uint8)
    if jax.process_index() == 0:
        padded[:] = np.frombuffer(content, np.uint8)
    found = multihost_utils.broadcast_one_to_all(padded) if length else padded
    return np.asarray(found).tobytes()

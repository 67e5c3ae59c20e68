"""A publisher: writes the weights of a training program for readers, in a thread of its own."""

import atexit
import operator
import os
import queue
import threading
import time
import warnings
from typing import Any, NamedTuple, SupportsIndex

import jax

from jaxcomp import checks
from jaxcomp.theory.cost import Network
from jaxcomp.types import PyTree
from jaxcomp.weights import exports
from jaxcomp.weights.chain import Rules
from jaxcomp.weights.versions import Writer
from jaxcomp_weights import signing
from jaxcomp_weights.stores import Store

SMALL, FAST = "small", "fast"
CODINGS = (SMALL, FAST)
_FAST_FROM = 1.6e5
"""Bytes per second from which the fast coding is sooner at a reader: 100 million weights have
0.4 MB more than in the small one, and take 2.6 s less to code, read and apply on two cores
(`benchmarks/results/weights/speeds.md`)."""


class _Job(NamedTuple):
    named: dict[str, jax.Array]
    step: int
    time: float


class Publisher:
    """Writes versions of weights to a URL: snapshots, and lossless patches between versions.

    A `jaxcomp_weights.Reader` gets each version bit for bit. `publish` copies the weights on their
    devices and returns; a thread codes and writes them. At most one version waits while another one
    is written: after that, `publish` waits too. An error of the thread is raised by the next call.

    Args:
        url: where to write: a path, or a URL that fsspec can open, such as `s3://bucket/run`.
        export: a pure function from parameters to arrays by name, in the names and layouts of the
            receivers; None for paths joined by `/`.
        dtype: the dtype in which receivers compute, for floating arrays; None for their own.
        coding: "small" for the fewest bytes, "fast" for the shortest time; None for the choice by
            the link.
        link: the link of a reader, a `jaxcomp.planning.Network`: the fast coding is chosen from
            1.3 Mbit/s on. None for the fewest bytes.
        snapshot_every: a snapshot at least every so many versions; also when the patches since the
            last one have more bytes than it has.
        skips: also patches over so many versions, for readers that are late. Each holds one more
            copy of the weights on the devices.
        keep: how many versions stay readable; None for all. Files that no listed version needs are
            removed.
        sign: an ed25519 private key that signs all documents: 32 bytes, or a key of the package
            cryptography.
        options: keyword arguments of fsspec's file system.
        patience: seconds to wait for another process of this machine that publishes there to end.

    Raises:
        ValueError: for arguments out of range, a URL that cannot be opened, or one at which
            another process publishes.

    Example:
        >>> import jax.numpy as jnp, jaxcomp_weights
        >>> with Publisher("memory://docs/publisher", dtype=jnp.bfloat16) as publisher:
        ...     for step in range(3):
        ...         publisher.publish({"w": jnp.full(5, 1 + step / 128)}, step)
        >>> weights, version = jaxcomp_weights.Reader("memory://docs/publisher").update()
        >>> float(weights["w"][0]), version
        (1.015625, 3)

    Note:
        In training with several processes, all of them make a publisher and call `publish`. Each
        writes the shards that it has; the first one writes the documents.

    References:
        Miahi and Belilovsky, `PULSE <https://arxiv.org/abs/2602.03839>`_, 2026, sends the changed
        weights between versions. Here the old weights' exponents are the context of the code.
    """

    def __init__(
        self,
        url: "str | os.PathLike[str]",
        *,
        export: exports.Export | None = None,
        dtype: Any = None,
        coding: str | None = None,
        link: Network | None = None,
        snapshot_every: int = 64,
        skips: tuple[int, ...] = (8, 64),
        keep: int | None = 128,
        sign: Any = None,
        options: dict[str, Any] | None = None,
        patience: float = 10.0,
    ):
        if export is not None:
            checks.function("export", export)
        exports.check_dtype(dtype)
        if coding is not None:
            checks.choice("coding", coding, CODINGS)
        checks.integer("snapshot_every", snapshot_every, 1)
        checks.sequence("skips", skips)
        for skip in skips:
            checks.integer("skips", skip, 2)
        if keep is not None:
            checks.integer("keep", keep, 1)
        if link is not None:
            checks.instance("link", link, Network, "jaxcomp.planning.Network(12.5e6)")
        self._export = exports.compiled(export, dtype)
        self._writer = Writer(
            Store(url, options),
            coding or (FAST if link is not None and link.bandwidth >= _FAST_FROM else SMALL),
            Rules(snapshot_every=snapshot_every, skips=tuple(sorted(set(skips))), keep=keep),
            None if sign is None else signing.Key.private(sign),
            patience,
        )
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def version(self) -> int | None:
        """The number of the newest version that readers can see; None before the first one."""
        newest = self._writer.newest
        return None if newest is None else newest.number

    def publish(self, params: PyTree, step: SupportsIndex) -> None:
        """Publishes parameters as the next version.

        They are copied before this returns control, so they may be donated to the next step.

        Args:
            params: the parameters, as `export` takes them.
            step: the step of training.

        Raises:
            ValueError: after `close`; for parameters that cannot be published; if another
                publisher has taken over.
            OSError: if a version before could not be written. Readers see the one before it.
        """
        if self._closed:
            raise ValueError("`publish` must be called before `close`, got a closed publisher")
        try:
            number = operator.index(step)
        except TypeError:
            raise ValueError(f"`step` must be an integer, got {step!r}") from None
        checks.integer("step", number, 0)
        self._raise()
        job = _Job(self._export(params), number, time.time())
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="jaxcomp.weights", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # Otherwise versions that wait would be lost at the end.
        self._jobs.put(job)

    def flush(self) -> None:
        """Waits until all published versions are written.

        Raises:
            OSError: if one could not be written.
            ValueError: if another publisher has taken over.
        """
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Writes what was published, ends the thread, and lets others publish at the URL.

        Raises:
            OSError: if a version could not be written.
        """
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            if self._thread is not None:
                self._jobs.put(None)
                self._thread.join()
            self._writer.release()
        self._raise()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except Exception as own:  # The error of the block is the one to see.
            warnings.warn(f"a version could not be written: {own}", stacklevel=2)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._writer.write(job.named, job.step, job.time)
            except BaseException as error:
                self._error = error
            finally:
                del job  # Its arrays.
                self._jobs.task_done()
        self._jobs.task_done()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

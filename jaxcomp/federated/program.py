"""The compiled block of a simulation, on one device or over the devices of a mesh."""

import functools
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxcomp.backend import mapping
from jaxcomp.federated import block
from jaxcomp.federated.block import Clients, Done, Known, Own
from jaxcomp.federated.method import Method
from jaxcomp.federated.server import Total

_CORES = 8
"""The most cores for which blocks are held in memory."""


class Program:
    """The compiled block, on one device or over a mesh."""

    def __init__(
        self, method: Method, chunk: int, mesh: Mesh | None, together: bool, keep_payloads: bool
    ):
        self.mesh = mesh
        # Blocks that are under way at once: one for each core, one that is written, and a next one.
        self.beside = 1 if mesh is not None or together else min(os.cpu_count() or 1, _CORES) + 2
        axis_name = None if mesh is None else mesh.axis_names[0]
        self._run = functools.partial(
            block.run,
            method,
            chunk=chunk,
            axis_name=axis_name,
            together=together,
            keep_payloads=keep_payloads,
        )
        self._chunk = chunk
        run = self._run if mesh is None else self._mapped
        if self.beside > 1:
            run = functools.partial(block.work, method, keep_payloads=keep_payloads)
        # A program for each fragment.
        self._compiled = functools.cache(lambda turn: jax.jit(functools.partial(run, turn=turn)))
        self._add = jax.jit(functools.partial(block.add, method), donate_argnums=0)

    def __call__(
        self, turn: int, known: Known, total: Total, clients: Clients, batches: Any, own: Own
    ) -> Done:
        if self.beside > 1:
            done = self._compiled(turn)(known, clients, batches, own)
            total = self._add(total, done.read, done.weights)
            return Done(total, done.own, done.sent, done.weights > 0, done.losses, done.payloads)
        if self.mesh is None:
            return self._compiled(turn)(known, total, clients, batches, own)
        size = len(np.asarray(clients.numbers))
        order = _device_major(size, self.mesh.size, self._chunk)
        sharding = NamedSharding(self.mesh, P(self.mesh.axis_names[0]))
        whole = NamedSharding(self.mesh, P())

        def split(x: Any) -> Any:
            rows = np.asarray(x)[order]
            return jax.make_array_from_callback(rows.shape, sharding, lambda at: rows[at])

        given = jax.tree.map(split, (clients, batches, own))
        known, total = jax.tree.map(lambda x: _everywhere(x, whole), (known, total))
        done = self._compiled(turn)(known, total, *given)
        back = np.argsort(order)
        own, sent, accepted, losses = jax.tree.map(
            lambda x: _host(x)[back], (done.own, done.sent, done.accepted, done.losses)
        )
        total, payloads = jax.tree.map(_host, (done.total, done.payloads))
        return Done(total, own, sent, accepted, losses, payloads)

    def _mapped(self, known: Known, total: Total, *given: Any, turn: int) -> Done:
        assert self.mesh is not None
        rows: Any = P(self.mesh.axis_names[0])
        whole: Any = P()
        out = Done(whole, rows, rows, rows, rows, whole)
        specs = (P(), P(), rows, rows, rows)
        # Not typed: loops in a user's loss or optimizer begin with zeros that are typed as equal on
        # all devices. Nothing is differentiated across devices, so the types would decide nothing.
        run = mapping.shard_map(
            functools.partial(self._run, turn=turn),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=out,
            check_vma=False,
        )
        return run(known, total, *given)


def _device_major(size: int, devices: int, chunk: int) -> np.ndarray:
    """The clients in the order of the devices: each has every so-manieth chunk."""
    return np.arange(size).reshape(-1, devices, chunk).swapaxes(0, 1).reshape(-1)


def _everywhere(x: Any, sharding: NamedSharding) -> Any:
    rows = np.asarray(x)
    return jax.make_array_from_callback(rows.shape, sharding, lambda at: rows[at])


def _host(x: Any) -> np.ndarray:
    """The whole of an array, also of one over several processes."""
    if x.is_fully_addressable:
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))

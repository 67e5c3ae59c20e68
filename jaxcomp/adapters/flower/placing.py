"""The work of a site over the devices of its mesh."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp.adapters.flower import client
from jaxcomp.federated import block, streaming
from jaxcomp.federated.block import Clients, Known, Own
from jaxcomp.federated.method import Method
from jaxcomp.federated.streaming import Streamed
from jaxcomp.types import PyTree


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

    def lies(self, spec: PartitionSpec = PartitionSpec()) -> NamedSharding:
        """Where arrays of this spec are; without one, those that every device has."""
        return NamedSharding(self.mesh, spec)

    def specs(self, params: PyTree) -> PyTree:
        """A spec for each parameter."""
        if isinstance(self.params, PartitionSpec):
            return jax.tree.map(lambda _: self.params, params)
        return self.params


def work(
    method: Method, placed: Placed, turn: int, known: Known, who: Clients, batches: Any, own: Own
) -> Any:
    """A client's round, without the steps of a delay."""
    centre = jax.tree.map(lambda x: x[0], known.centres)
    before = jax.tree.map(
        lambda spec: placed.lies(PartitionSpec(None, *spec)), placed.specs(centre)
    )
    # All processes have the same values, which must not belong to a device of one of them.
    known, who, own = jax.device_get((known, who, own))
    given = (
        known._replace(centres=jax.device_put(known.centres, before)),
        who,
        _batches(placed, batches),
        own._replace(inner=_put_kept(method, placed, own.inner, centre)),
    )
    return _compile(method, turn, placed.lies())(*given)


def rest(method: Method, placed: Placed, kept: Streamed, batches: Any) -> Streamed:
    """The steps of the delay."""
    kept = jax.device_get(kept)
    kept = _put_kept(method, placed, kept, kept.before)
    return _rest(method, placed.lies())(kept, _batches(placed, batches))


def _put_kept(method: Method, placed: Placed, kept: PyTree, params: PyTree) -> PyTree:
    """Puts a client's memory of its work on the devices."""
    if not method.work.keep:
        return kept
    home, everywhere = jax.tree.map(placed.lies, placed.specs(params)), placed.lies()
    whole = isinstance(kept, Streamed)
    of_inner = optax.tree_utils.tree_map_params(
        method.work.optimizer,
        lambda _, where: where,
        kept.inner if whole else kept,
        home,
        transform_non_params=lambda _: everywhere,
    )
    if not whole:
        return jax.device_put(kept, of_inner)
    where: dict[str, Any] = {"inner": of_inner, "offset": home, "before": home}
    where |= {"waits": everywhere, "due": everywhere}
    if not streaming.keeps_centre(method):
        where["before"] = ()
    return jax.device_put(kept, kept._replace(**where))


def _batches(placed: Placed, batches: Any) -> Any:
    return jax.device_put(batches, placed.lies(PartitionSpec(None, *placed.batch)))


@functools.lru_cache(maxsize=64)
def _compile(method: Method, turn: int, everywhere: NamedSharding) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        return client.unread(block.client(method, turn, *given))

    return jax.jit(run, out_shardings=everywhere)


@functools.lru_cache(maxsize=8)
def _rest(method: Method, everywhere: NamedSharding) -> Callable[..., Any]:
    steps = jnp.int32(method.delay)
    run = block.rester(method)
    return jax.jit(lambda kept, batches: run(kept, batches, steps), out_shardings=everywhere)

"""Statistics of a step: bytes, error and residual."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Reducer
from jaxcomp.codecs.coded import Spent
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import norms
from jaxcomp.reducers import accounting, reduce as reduce_
from jaxcomp.reducers.robust import RobustState
from jaxcomp.types import Array, AxisName, PyTree
from jaxcomp.wire import cost as wire_cost


class Stats(NamedTuple):
    """Statistics of the last step; the same on every worker.

    Attributes:
        relative_error: `Σ‖message − sent‖² / Σ‖message‖²` over all workers' compressed leaves;
            under a gate, over the participants'.
        residual_ratio: the root of `Σ‖residual‖² / Σ‖gradient‖²` over the same leaves, where the
            residual is the unsent part of past messages (with momentum: the velocity); zero
            without feedback.
        payload_bytes: the bytes that one worker puts into the collectives.
        link_bytes: the bytes that one device sends over its link.
        spare_bytes: the part of the payload bytes, uplink and downlink, that the entropy coders
            leave empty; the rest are the logical bytes. The mean over the workers.
        lost: the number of elements that did not fit into the capacity of a `Coded`, over all
            workers, uplink and downlink; a residual sends them later.
        excluded: the number of messages that `Robust` left out because they were not finite, over
            all shards.

    All are float32: bytes are exact up to 16 MB and rounded to 24 bits above.
    """

    relative_error: Array
    residual_ratio: Array
    payload_bytes: Array
    link_bytes: Array
    spare_bytes: Array
    lost: Array
    excluded: Array


def nothing() -> Stats:
    """The statistics before the first step."""
    return Stats(*(jnp.zeros((), jnp.float32) for _ in Stats._fields))


def measure(
    reducer: Reducer,
    grads: PyTree,
    result: reduce_.Reduction,
    before: PyTree,
    axis_name: AxisName,
    shards: tuple[str, ...],
) -> Stats:
    """The statistics of a step, over all workers and shards."""
    residual = accounting.feedback_of(reducer).unsent(per_worker.unwrap(result.state.feedback))
    # Squares of large and small values leave the range of float32: measure in units of the largest.
    everywhere = (*axes.names(axis_name), *shards)
    top = axes.maximum(norms.largest((result.message, residual, result.given)), everywhere)
    unit = norms.unit(top)
    lost = [p - c for p, c in zip(result.message, result.sent, strict=True)]
    measured = (lost, result.message, residual, result.given)
    energies = [norms.energy(tree, unit).astype(jnp.float32) for tree in measured]
    if result.participation is not None:  # Non-participants send nothing, so they lose nothing.
        energies[:2] = [jnp.where(result.participation.taken, energy, 0) for energy in energies[:2]]
    lost, message, residual, energy = lax.pmean(jnp.stack(energies), everywhere)
    costs = (*_costs(reducer, grads, before, axis_name), *_spent(result.state, everywhere))
    if result.participation is not None:
        costs = tuple(jnp.where(result.participation.go, cost, 0) for cost in costs)
    payload, link, spare, cut = costs
    return Stats(
        relative_error=lost / jnp.where(message == 0, 1, message),
        residual_ratio=jnp.sqrt(residual / jnp.where(energy == 0, 1, energy)),
        payload_bytes=payload,
        link_bytes=link,
        spare_bytes=spare,
        lost=cut,
        excluded=_excluded(result.state, shards),
    )


def _excluded(state: PyTree, shards: tuple[str, ...]) -> Array:
    """The number of messages that were left out; zero for reducers that leave out none."""
    leaves = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, RobustState))
    found = [part.excluded for part in leaves if isinstance(part, RobustState)]
    if not found:
        return jnp.zeros((), jnp.float32)
    count = sum((part.astype(jnp.float32) for part in found), jnp.float32(0))
    return lax.psum(axes.vary(count, shards), shards) if shards else count


def _spent(state: PyTree, everywhere: tuple[str, ...]) -> tuple[Array, Array]:
    """The coders' empty bytes, averaged over workers, and the sum of their lost elements."""
    spent = coders_spent(state)
    if spent is None:
        return jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    return lax.pmean(spent.spare, everywhere), lax.psum(spent.lost, everywhere)


def coders_spent(state: PyTree) -> Spent | None:
    """The spare and lost capacity of all entropy coders in this state; None without one."""
    leaves = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, Spent))
    found = [part for part in leaves if isinstance(part, Spent)]
    if not found:
        return None
    spare, lost = (sum(map(jnp.sum, column), jnp.float32(0)) for column in zip(*found, strict=True))
    return Spent(spare, lost)


def _costs(
    reducer: Reducer, grads: PyTree, state: PyTree, axis_name: AxisName
) -> tuple[Array, Array]:
    """Payload and link bytes of a step that starts with this reducer state."""
    phases, number = reducer.schedule, reducer.phase(state)
    sizes = axes.sizes(axis_name)
    plans = [accounting.plan(r, grads, sizes) for _, r in phases]
    workers = sizes if reducer.hierarchical else math.prod(sizes)
    pairs = zip(phases, plans, strict=True)
    payload = [_count(accounting.payload_bytes(r, plan)) for (_, r), plan in pairs]
    link = [_count(wire_cost.wire_bytes(r, grads, workers=workers)) for _, r in phases]
    return jnp.stack(payload)[number], jnp.stack(link)[number]


def _count(size: int) -> Array:
    return jnp.asarray(float(size), jnp.float32)

"""Statistics of a step: bytes, error and residual."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Reducer
from jaxcomp.codecs.coded import Spent
from jaxcomp.exchange import fast_axis, reduce as reduce_
from jaxcomp.exchange.aggregated import AggregateState
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import norms
from jaxcomp.reducers import choose
from jaxcomp.transforms import groups as groups_
from jaxcomp.types import Array, PyTree


class Stats(NamedTuple):
    """Statistics of the last step; the same on every worker.

    Attributes:
        relative_error: `Σ‖message − sent‖² / Σ‖message‖²` over all workers' compressed leaves;
            under a gate, over the participants'.
        residual_ratio: the root of `Σ‖residual‖² / Σ‖gradient‖²` over the same leaves, where the
            residual is the unsent part of past messages (with momentum: the velocity); zero
            without feedback. It grows too when the gradients vanish.
        residual_norm: the norm of a worker's residual over its compressed leaves and all shards,
            as the root mean square over the workers; zero without feedback.
        gradient_norm: the same of the gradients; `residual_ratio = residual_norm / gradient_norm`.
        payload_bytes: the bytes that one worker puts into the collectives.
        link_bytes: the bytes that one device sends over its link.
        spare_bytes: the part of the payload bytes, uplink and downlink, that the entropy coders
            leave empty; the rest are the logical bytes. The mean over the workers.
        lost: the number of elements that did not fit into the capacity of a `Coded`, over all
            workers, uplink and downlink; a residual sends them later.
        excluded: the number of messages that `Robust` left out because they were not finite, over
            all shards.

        saturation: the fraction of values beyond the outermost levels of their codec, of the leaves
            whose codec has such a range (Lloyd–Max levels of two bits or more, clipped scales);
            zero where there is none. Values of a rotated codec are those after the rotation. Codecs
            that agree on a range between workers are not counted.
        groups: `GroupStats` by the name of the group, if `stats` names groups, or `()`.

    All are float32: bytes are exact up to 16 MB and rounded to 24 bits above.
    """

    relative_error: Array
    residual_ratio: Array
    residual_norm: Array
    gradient_norm: Array
    payload_bytes: Array
    link_bytes: Array
    spare_bytes: Array
    lost: Array
    excluded: Array
    saturation: Array
    groups: Any = ()


def nothing(stats: groups_.Grouping, source: Link | Reducer, params: PyTree) -> Stats:
    """The statistics before the first step."""
    found: dict[str, Any] = {name: jnp.zeros((), jnp.float32) for name in Stats._fields}
    found["groups"] = ()
    if groups_.grouped(stats):
        plan = choose.plan(source, params, sizes=(1,))
        found["groups"] = groups_.empty(groups_.names(stats, plan))
    return Stats(**found)


def measure(
    stats: groups_.Grouping,
    plan: Plan,
    key: Array,
    before: PyTree,
    grads: PyTree,
    result: reduce_.Reduction,
    shards: tuple[str, ...] = (),
) -> Stats:
    """The statistics of a step, over all workers and shards.

    Args:
        stats: the grouping of leaves.
        plan: the plan of the step.
        key: its key.
        before: the reducer's state at its start.
        grads: this worker's gradients.
        result: its result.
        shards: the axes of the shards of a model.
    """
    residual = plan.feedback.unsent(per_worker.unwrap(result.state.feedback))
    # Squares of large and small values leave the range of float32: measure in units of the largest.
    everywhere = (*axes.names(plan.axis_name), *shards)
    top = axes.maximum(norms.largest((result.message, residual, result.given)), everywhere)
    unit = norms.unit(top)
    lost = [p - c for p, c in zip(result.message, result.sent, strict=True)]
    measured = (lost, result.message, residual, result.given)
    energies = [norms.energy(tree, unit).astype(jnp.float32) for tree in measured]
    worker = lax.axis_index(plan.axis)
    own_key = fast_axis.fold_key(plan, key)
    clipped = groups_.count_clipped(plan.batches, result.message, own_key, worker)
    both = sum(clipped.values(), jnp.zeros(2, jnp.float32))
    part = result.participation
    energies = _mean(jnp.stack([*energies, *both]), part, everywhere)
    # The energies are means over workers and shards, in the unit; a norm is the sum over shards.
    factor = math.sqrt(math.prod(axes.sizes(shards))) / unit
    residual_norm, gradient_norm = _norms(energies, factor)
    phases, number = _phases(plan, grads, before)
    sent = [[_count(getattr(p, name)) for p in phases] for name in ("payload_bytes", "link_bytes")]
    costs = (*(jnp.stack(each)[number] for each in sent), *_spent(result.state, everywhere))
    if part is not None:
        costs = tuple(jnp.where(part.go, cost, 0) for cost in costs)
    payload, link, spare, cut = costs
    groups: Any = ()
    if groups_.grouped(stats):
        names = groups_.names(stats, plan)
        parts = [groups_.energies(plan.layout.batches, tree, unit) for tree in measured]
        groups = _by_group(names, (*parts, clipped), part, everywhere, factor)
        sizes = [groups_.payload(phase, names) for phase in phases]
        go = 1 if part is None else part.go
        groups = {
            name: group._replace(
                payload_bytes=jnp.stack([_count(size[name]) for size in sizes])[number] * go
            )
            for name, group in groups.items()
        }
    return Stats(
        relative_error=_relative(*energies[:2]),
        residual_ratio=jnp.sqrt(_relative(*energies[2:4])),
        residual_norm=residual_norm,
        gradient_norm=gradient_norm,
        payload_bytes=payload,
        link_bytes=link,
        spare_bytes=spare,
        lost=cut,
        excluded=_excluded(result.state, shards),
        saturation=_relative(*energies[4:]),
        groups=groups,
    )


def _mean(values: Array, participation: Any, everywhere: tuple[str, ...]) -> Array:
    """The mean over workers of `[…, 6]`: lost, message, residual, gradient, clipped, elements.

    Non-participants send nothing, so they lose and clip nothing.
    """
    if participation is not None:
        silent = jnp.array([True, True, False, False, True, True]) & ~participation.taken
        values = jnp.where(silent, 0, values)
    return lax.pmean(values, everywhere)


def _relative(part: Array, whole: Array) -> Array:
    return part / jnp.where(whole == 0, 1, whole)


def _norms(energies: Array, factor: Array) -> Array:
    """The norms of the residual and of the gradients."""
    return (jnp.sqrt(energies[2:4]) * factor).astype(jnp.float32)


def _by_group(
    names: Sequence[str],
    leaves: Sequence[dict[int, Array]],
    participation: Any,
    everywhere: tuple[str, ...],
    factor: Array,
) -> dict[str, groups_.GroupStats]:
    """The statistics of each group, without its bytes."""
    order = sorted(set(names))
    *energies, clipped = leaves
    nothing = jnp.zeros((), jnp.float32)
    rows = []
    for name in order:
        row = [sum(groups_.of_group(part, names, name), nothing) for part in energies]
        both = sum(groups_.of_group(clipped, names, name), jnp.zeros(2, jnp.float32))
        rows.append(jnp.stack([*row, *both]))
    means = _mean(jnp.stack(rows), participation, everywhere)
    groups = {}
    for name, row in zip(order, means, strict=True):
        residual_norm, gradient_norm = _norms(row, factor)
        groups[name] = groups_.GroupStats(
            relative_error=_relative(*row[:2]),
            residual_ratio=jnp.sqrt(_relative(*row[2:4])),
            residual_norm=residual_norm,
            gradient_norm=gradient_norm,
            saturation=_relative(*row[4:]),
            payload_bytes=nothing,
        )
    return groups


def _excluded(state: PyTree, shards: tuple[str, ...]) -> Array:
    """The number of messages that were left out; zero for reducers that leave out none."""
    leaves = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, AggregateState))
    found = [part.excluded for part in leaves if isinstance(part, AggregateState)]
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


def _phases(plan: Plan, grads: PyTree, state: PyTree) -> tuple[list[Plan], Any]:
    """The plans of all phases, and the number of that of a step with this reducer state."""
    phases = plan.given.facts.phases
    if not phases:
        return [plan], 0
    starts = jnp.asarray([start for start, _ in phases[1:]], jnp.int32)
    number = jnp.sum(state.phase_step >= starts, dtype=jnp.int32)
    return [Plan.of(phase, grads, plan.axis_name, plan.sizes) for _, phase in phases], number


def _count(size: float) -> Array:
    return jnp.asarray(float(size), jnp.float32)

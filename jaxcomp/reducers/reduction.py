"""The one path that every gradient takes through any reducer: feedback, uplink, downlink."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import compiler, policy as policy_, trees, wire
from jaxcomp.feedback import NoFeedback
from jaxcomp.protocols import Array, AxisName, Feedback, PyTree, Reducer, Stacks
from jaxcomp.workers import PerWorker

_LARGE = 2**16


class ReductionState(NamedTuple):
    """The memory of the workers' links, and what the reducer itself keeps."""

    feedback: PerWorker
    reducer: PyTree


class Reduction(NamedTuple):
    """A mean, the memory for the next step, and what the step's statistics need."""

    mean: PyTree
    state: ReductionState
    message: Stacks
    sent: Stacks


def plan(reducer: Reducer, like: PyTree) -> trees.Layout:
    """Which leaves the reducer compresses, in which batches."""
    policy = policy_.NOTHING if reducer.uplink is None else reducer.uplink.policy
    return trees.layout(policy, like)


def payload_bytes(reducer: Reducer, layout: trees.Layout) -> int:
    """What one worker puts into the collectives for a tree of this layout."""
    return round(sum(batch_bytes(reducer, layout))) + trees.dense_bytes(
        layout, dense_dtype(reducer)
    )


def batch_bytes(reducer: Reducer, layout: trees.Layout) -> tuple[float, ...]:
    """What each batch accounts for of it: its payload, unless the reducer knows better."""
    own = getattr(settled(reducer), "payload_bytes", None)
    if own is not None:
        return own(layout.batches)
    return tuple(float(wire.fused_bytes(part)) for part in wire.payload_like(layout))


def dense_dtype(reducer: Reducer) -> Any:
    """The dtype that a reducer sends dense leaves in; None for their own."""
    dtype = getattr(settled(reducer), "dtype", None)
    return None if dtype is None else jnp.dtype(dtype)


def settled(reducer: Reducer) -> Reducer:
    """The last reducer of one that changes with time; else itself."""
    return getattr(reducer, "phases", ((0, reducer),))[-1][1]


def feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of the workers' links."""
    return NoFeedback() if reducer.uplink is None else reducer.uplink.feedback


def init(reducer: Reducer, like: PyTree, axis_name: AxisName) -> ReductionState:
    """Memory for gradients like these."""
    feedback, batches = feedback_of(reducer), plan(reducer, like).batches
    memory = feedback.init(
        tuple(batch.like for batch in batches), reducer.part_like(batches, axis_name)
    )
    return ReductionState(
        feedback=PerWorker.wrap(memory, feedback.kind, axis_name),
        reducer=reducer.init(batches, axis_name),
    )


def reduce(
    reducer: Reducer,
    key: Array,
    grads: PyTree,
    state: ReductionState,
    axis_name: AxisName,
    *,
    weight: Array | None = None,
    guard: bool = True,
) -> Reduction:
    """stack → compensate → collect → the uplink's feedback on this device's part → spread.

    The mirror of a shift memory is thus added before the downlink. With `guard`, a mean that is
    not finite leaves every memory as it was, alike on all workers, since all see the same mean.
    """
    feedback, layout = feedback_of(reducer), plan(reducer, grads)
    xs, dense = trees.stacks(layout, grads)
    message, memory = feedback.compensate(xs, state.feedback.own())
    part, sent, share, links = reducer.collect(
        key, layout.batches, message, state.reducer, axis_name, weight
    )
    estimate, memory = feedback.update(message, sent, part, share, weight, memory)
    means, links = reducer.spread(key, layout.batches, estimate, links, axis_name)
    dense = reducer.dense(dense, axis_name, weight)
    new = ReductionState(PerWorker.wrap(memory, feedback.kind, axis_name), links)
    if guard and jax.tree.leaves(new):  # Without memory there is nothing to guard.
        finite = all_finite((means, dense))
        new = jax.tree.map(lambda now, before: jnp.where(finite, now, before), new, state)
    return Reduction(trees.assemble(layout, means, dense), new, message, sent)


def all_finite(tree: PyTree) -> Array:
    """Whether every element of every leaf is finite."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(tree)]
    large = [leaf for leaf in leaves if leaf.size >= _LARGE]
    small = [leaf for leaf in leaves if leaf.size < _LARGE]

    def check(large, small):
        # Small leaves as one vector: one reduction to compile instead of some for each leaf.
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in large]
        if small:
            finite.append(jnp.all(jnp.concatenate([jnp.isfinite(leaf) for leaf in small])))
        return functools.reduce(jnp.logical_and, finite, jnp.asarray(np.True_))

    return compiler.outlined(check)(large, small)

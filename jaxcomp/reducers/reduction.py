"""The one path that every gradient takes through any reducer: feedback, uplink, downlink."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp.feedback import NoFeedback
from jaxcomp.mesh import PerWorker
from jaxcomp.protocols import Array, AxisName, Feedback, PyTree, Reducer


class ReductionState(NamedTuple):
    """The memory of the workers' links, and what the reducer itself keeps."""

    feedback: PerWorker
    reducer: PyTree


class Reduction(NamedTuple):
    """A mean, the memory for the next step, and what the step's statistics need."""

    mean: PyTree
    state: ReductionState
    message: PyTree
    sent: PyTree


def feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of the workers' links."""
    return NoFeedback() if reducer.uplink is None else reducer.uplink.feedback


def init(reducer: Reducer, like: PyTree, axis_name: AxisName) -> ReductionState:
    """Memory for gradients like these."""
    feedback = feedback_of(reducer)
    memory = feedback.init(like, reducer.part_like(like, axis_name))
    return ReductionState(
        feedback=PerWorker.wrap(memory, feedback.kind, axis_name),
        reducer=reducer.init(like, axis_name),
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
    """compensate → collect → the uplink's feedback on this device's part → spread.

    The mirror of a shift memory is thus added before the downlink. With `guard`, a mean that is
    not finite leaves every memory as it was, alike on all workers, since all see the same mean.
    """
    feedback = feedback_of(reducer)
    message, memory = feedback.compensate(grads, state.feedback.own())
    part, sent, share, links = reducer.collect(key, message, state.reducer, axis_name, weight)
    estimate, memory = feedback.update(message, sent, part, share, weight, memory)
    mean, links = reducer.spread(key, estimate, grads, links, axis_name)
    new = ReductionState(PerWorker.wrap(memory, feedback.kind, axis_name), links)
    if guard and jax.tree.leaves(new):  # Without memory there is nothing to guard.
        finite = all_finite(mean)
        new = jax.tree.map(lambda now, before: jnp.where(finite, now, before), new, state)
    return Reduction(mean, new, message, sent)


def all_finite(tree: PyTree) -> Array:
    """Whether every element of every leaf is finite."""
    checks = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(checks)) if checks else jnp.asarray(np.True_)

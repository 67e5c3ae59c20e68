"""The memory of a reduction: of the links, of the reducer, of dense leaves under a gate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import Mirrored, Reducer
from jaxcomp.mesh import per_worker
from jaxcomp.reducers import accounting, carry, shard_memory
from jaxcomp.types import AxisName, Batches, PyTree


class OtherShapesError(ValueError):
    """The memory of a state has shapes that none has which has been in use over these workers."""


class ReductionState(NamedTuple):
    """The memory of the workers' links, and what the reducer itself keeps.

    Attributes:
        feedback: the links' memory.
        reducer: the reducer's state.
        dense: under a gate, the memory of the leaves that are sent as they are; else `()`.
    """

    feedback: PyTree
    reducer: PyTree
    dense: PyTree = ()

    def carried(self, like: "ReductionState", workers: int, *, sharded: bool) -> "ReductionState":
        """The state on its way to so many workers, with nothing that they have no place for.

        `jaxcomp.resize_workers` calls this before it moves the arrays.

        Args:
            like: shapes and dtypes of a state of the new workers.
            workers: how many they are.
            sharded: whether the arrays have an axis of shards, after that of the workers.

        Raises:
            ValueError: if something is remembered that only these workers can send.
        """
        if hasattr(self.reducer, "outer") and jax.tree.leaves((self.feedback, self.reducer)):
            raise ValueError(
                f"`state` cannot be moved to {workers} workers: which rows a device of "
                "jaxcomp.Hierarchical remembers depends on the sizes of all axes. Begin a new "
                "state with jaxcomp.init_state"
            )
        feedback, reducer = carry.up(
            self.feedback, self.reducer, like.reducer, workers, sharded=sharded
        )
        return self._replace(feedback=feedback, reducer=reducer)


def init(
    reducer: Reducer, like: PyTree, axis_name: AxisName, *, gated: bool = False
) -> ReductionState:
    """Memory for gradients like these; with `gated`, also for the leaves that are sent dense.

    Raises:
        ValueError: if a codec does not go with the feedback around it.
    """
    feedback, layout = (
        accounting.feedback_of(reducer),
        accounting.plan_here(reducer, like, axis_name),
    )
    batches = layout.batches
    for batch in batches:
        feedback.check(batch.codec, batch.size)
    memory, aside = _memory(reducer, batches, axis_name), accounting.aside_of(reducer)
    likes = tuple(layout.likes[i] for i in layout.dense)
    return ReductionState(
        feedback=hold(reducer, memory, axis_name),
        reducer=reducer.init(batches, axis_name),
        dense=hold_aside(reducer, aside.init(likes, likes), axis_name) if gated else (),
    )


def _memory(reducer: Reducer, batches: Batches, axis_name: AxisName) -> PyTree:
    """The memory of the uplink's feedback, without the workers' axis."""
    inner = reducer.within(batches, axis_name)
    return accounting.feedback_of(reducer).init(
        tuple(batch.like for batch in inner), reducer.part_like(batches, axis_name)
    )


def fitted(
    reducer: Reducer, batches: Batches, state: ReductionState, axis_name: AxisName
) -> ReductionState:
    """The state for these workers, from one that may have been made where there was only one.

    Raises:
        OtherShapesError: a `ValueError`, if it cannot be one for them.
    """
    memory = per_worker.unwrap(state.feedback)
    wanted = jax.eval_shape(lambda: _memory(reducer, batches, axis_name))
    if isinstance(memory, Mirrored) and reducer.splits:
        rows = tuple(batch.like for batch in batches)
        whole = jax.eval_shape(lambda: accounting.feedback_of(reducer).init(rows, rows)).mirror
        mirror = shard_memory.own(memory.mirror, wanted.mirror, axis_name, whole)
        memory = memory._replace(mirror=mirror)
    if jax.tree.map(jnp.shape, memory) != jax.tree.map(jnp.shape, wanted):
        raise OtherShapesError(
            "`state` must be one for these gradients and workers: its memory has shapes "
            f"{jax.tree.map(jnp.shape, memory)} where {jax.tree.map(jnp.shape, wanted)} are "
            "wanted. Make it with jaxcomp.init_state, or with tx.init inside the mapped function"
        )
    return ReductionState(
        feedback=hold(reducer, memory, axis_name),
        reducer=reducer.fitted(batches, state.reducer, axis_name),
        dense=state.dense,
    )


def hold(reducer: Reducer, memory: PyTree, axis_name: AxisName) -> PyTree:
    """The memory of the workers' links as it lies in a state."""
    kind, splits = accounting.feedback_of(reducer).kind, reducer.splits
    return per_worker.wrap(memory, kind, axis_name, splits=splits)


def hold_aside(reducer: Reducer, memory: PyTree, axis_name: AxisName) -> PyTree:
    """The memory of the leaves that are sent dense; every device has their whole mean."""
    return per_worker.wrap(memory, accounting.aside_of(reducer).kind, axis_name)

"""The memory of a reduction: links, reducer, and under a gate the dense leaves."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.base import Mirrored, Reducer
from jaxcomp.mesh import kinds, per_worker
from jaxcomp.reducers import accounting, resize, shard_memory
from jaxcomp.types import AxisName, Batches, PyTree


class OtherShapesError(ValueError):
    """The shapes of a state's memory are impossible for a state in use with these workers."""


@kinds.REDUCTIONS.register
class ReductionState(NamedTuple):
    """The memory of the workers' links, and the reducer's own state.

    Attributes:
        feedback: the links' memory.
        reducer: the reducer's state.
        dense: the memory of the dense leaves under a gate; else `()`.
    """

    feedback: PyTree
    reducer: PyTree
    dense: PyTree = ()

    def carried(self, like: "ReductionState", workers: int, *, sharded: bool) -> "ReductionState":
        """Prepares the state for another number of workers, without arrays that they do not have.

        `jaxcomp.resize_workers` calls this before it moves the arrays.

        Args:
            like: shapes and dtypes of a state of the new workers.
            workers: the new number of workers.
            sharded: whether the arrays have an axis of shards, after that of the workers.

        Raises:
            ValueError: if the memory cannot be moved to other workers.
        """
        if hasattr(self.reducer, "outer") and jax.tree.leaves((self.feedback, self.reducer)):
            raise ValueError(
                f"`state` must not be that of jaxcomp.Hierarchical to be moved to {workers} "
                "workers, because the rows that a device stores depend on the sizes of all axes. "
                "Make a new state with jaxcomp.init_state"
            )
        feedback, reducer = resize.up(
            self.feedback, self.reducer, like.reducer, workers, sharded=sharded
        )
        return self._replace(feedback=feedback, reducer=reducer)

    def is_slice(self) -> bool:
        """Whether a state with the memory of one worker has the rows of one of several workers.

        A state that `tx.init` makes outside of a mapped function has all rows of memory that is
        split over the workers, as many elements as the uplink's; `x[0]` of a state of `jax.pmap`
        has the rows of one worker. Placement calls this.
        """
        held, rows = [0], [0]
        for part in (self.feedback, self.reducer):
            for path, leaf in jax.tree_util.tree_leaves_with_path(part):
                if per_worker.shared_out(path):
                    rows.append(math.prod(leaf.shape) if leaf.shape[:1] == (1,) else 0)
                elif part is self.feedback and per_worker.marked(path):
                    held.append(math.prod(leaf.shape))
        return max(held) >= 2 * max(rows) > 0


def init(
    reducer: Reducer, like: PyTree, axis_name: AxisName, *, gated: bool = False
) -> ReductionState:
    """Memory for gradients like these; with `gated`, also for the dense leaves.

    Raises:
        ValueError: if a codec cannot be combined with its feedback.
    """
    feedback, layout = (
        accounting.feedback_of(reducer),
        accounting.plan_here(reducer, like, axis_name),
    )
    batches = layout.batches
    for batch in batches:
        feedback.check(batch.codec, batch.size)
    memory = _memory(reducer, batches, axis_name)
    dense_memory: PyTree = ()
    if gated:
        likes = tuple(layout.likes[i] for i in layout.dense)
        dense_memory = accounting.dense_feedback_of(reducer).init(likes, likes)
        dense_memory = hold_dense_memory(reducer, dense_memory, axis_name)
    return ReductionState(
        feedback=hold(reducer, memory, axis_name),
        reducer=reducer.init(batches, axis_name),
        dense=dense_memory,
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
    """Adapts state initialised outside the mapped function to the current workers.

    Raises:
        OtherShapesError: a `ValueError`, if the state cannot be adapted.
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
            "`state` must be one for these gradients and workers, with memory of shapes "
            f"{jax.tree.map(jnp.shape, wanted)}, got {jax.tree.map(jnp.shape, memory)}. Make it "
            "with jaxcomp.init_state, or with tx.init inside the mapped function"
        )
    return ReductionState(
        feedback=hold(reducer, memory, axis_name),
        reducer=reducer.fitted(batches, state.reducer, axis_name),
        dense=state.dense,
    )


def hold(reducer: Reducer, memory: PyTree, axis_name: AxisName) -> PyTree:
    """The memory of the workers' links as a state stores it."""
    kind = accounting.feedback_of(reducer).kind
    return per_worker.wrap(memory, kind, axis_name, splits=reducer.splits, alike=reducer.alike)


def hold_dense_memory(reducer: Reducer, memory: PyTree, axis_name: AxisName) -> PyTree:
    """The memory of the dense leaves as a state stores it; every device has their whole mean."""
    return per_worker.wrap(memory, accounting.dense_feedback_of(reducer).kind, axis_name)

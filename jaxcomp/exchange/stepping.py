"""An optimizer between the two ways of a reduction: each worker steps its part of the model."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.exchange.plan import Plan
from jaxcomp.exchange.state import LevelsState, ReductionState
from jaxcomp.layout import trees
from jaxcomp.mesh import kinds, per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import norms, summing
from jaxcomp.types import Array, PyTree, Stacks


class Stepped(NamedTuple):
    """An optimizer's state for some arrays.

    Attributes:
        optimizer: the state of the optimizer.
        masters: the arrays' own values, in float32 or wider; `()` without them.
    """

    optimizer: PyTree
    masters: PyTree


class SteppedState(NamedTuple):
    """The state of an optimizer that steps a part of the model on each worker.

    Attributes:
        taken: the number of steps that it took.
        part: the state for this worker's part of the compressed leaves.
        dense: the state for the dense leaves, which every worker steps whole.
    """

    taken: Array
    part: Stepped
    dense: Stepped


@kinds.REDUCTIONS.register
class SteppedMemory(NamedTuple):
    """The memory of `jaxcomp.sharded_optimizer`.

    Attributes:
        reduction: the memory of the links.
        optimizer: the optimizer's state, of which each worker has its part.
    """

    reduction: ReductionState
    optimizer: SteppedState

    def check_resizable(self, workers: int) -> None:
        """Raises a `ValueError` if the rows of a device depend on the sizes of several axes."""
        if isinstance(self.reduction.reducer, LevelsState):
            raise ValueError(
                f"`state` must not be that of a fast level to be moved to {workers} workers, "
                "because the rows that a device stores depend on the sizes of all axes. Make a new "
                "state with jaxcomp.init_state"
            )

    def carried(self, like: "SteppedMemory", workers: int, *, sharded: bool) -> "SteppedMemory":
        """The memory in the tree of another number of workers; see `ReductionState.carried`."""
        moved = self.reduction.carried(like.reduction, workers, sharded=sharded)
        return self._replace(reduction=moved)


@dataclasses.dataclass(frozen=True)
class Stepper:
    """Makes updates of means: of the compressed leaves this worker's part, of the others all.

    Attributes:
        optimizer: an elementwise optimizer.
        masters: whether weights have values of their own beside the replicas, so that what the way
            down or a narrow dtype rounds off is sent in the next step.
        max_norm: the norm at which the mean gradient is clipped; None for no clipping.
    """

    optimizer: Any
    masters: bool
    max_norm: float | None

    def init(self, plan: Plan) -> SteppedState:
        """The state before the first step, in which masters are still zero."""

        def begun(likes: Any) -> Stepped:
            zeros = tuple(jnp.zeros(x.shape, summing.wide(x.dtype)) for x in likes)
            return Stepped(self.optimizer.init(zeros), zeros if self.masters else ())

        part = begun(plan.part_like)
        dense = begun([plan.layout.likes[i] for i in plan.layout.dense])
        return SteppedState(jnp.zeros((), jnp.int32), _hold(plan, part), dense)

    def step(
        self,
        plan: Plan,
        part: Stacks,
        dense: Stacks,
        params: PyTree,
        state: SteppedState,
        shards: tuple[str, ...],
        extra: dict[str, Any],
    ) -> tuple[Stacks, Stacks, SteppedState]:
        """What to add to the replicas, and the next state.

        Args:
            plan: the plan.
            part: this worker's part of the mean of the compressed leaves.
            dense: the mean of the dense leaves.
            params: this device's replica of the parameters.
            state: the state.
            shards: the axes over which the model is sharded, whose devices have other leaves.
            extra: further arguments of the optimizer's update.
        """
        stacks, weights = trees.stacks(plan.layout, params)
        if plan.fast is not None:
            stacks = tuple(own.own(x) for own, x in zip(plan.batches, stacks, strict=True))
        replica = tuple(own.own(x) for own, x in zip(plan.slices, stacks, strict=True))
        part, dense = (tuple(map(_wide, x)) for x in (part, dense))
        if self.max_norm is not None:
            part, dense = self._clipped(plan, part, dense, shards)
        first = state.taken == 0
        # In the shapes that are stored: XLA writes a state into its own buffer only where nothing
        # between the old value and the new one is reshaped.
        own = _rows(plan, per_worker.unwrap(state.part), lambda x: x[None])
        part, replica = (tuple(x[None] for x in stacks) for stacks in (part, replica))
        updates, of_part = self._stepped(part, replica, own, first, extra)
        steps, of_dense = self._stepped(dense, weights, state.dense, first, extra)
        updates, of_part = tuple(x[0] for x in updates), _rows(plan, of_part, lambda x: x[0])
        return updates, steps, SteppedState(state.taken + 1, _hold(plan, of_part), of_dense)

    def _stepped(
        self,
        grads: Stacks,
        replica: Stacks,
        state: Stepped,
        first: Array,
        extra: dict[str, Any],
    ) -> tuple[Stacks, Stepped]:
        """What to add to the replica, and the next state."""
        weights = replica = tuple(map(_wide, replica))
        if self.masters:
            pairs = zip(replica, state.masters, strict=True)
            weights = tuple(jnp.where(first, x, y) for x, y in pairs)
        updates, after = self.optimizer.update(grads, state.optimizer, weights, **extra)
        masters: Any = ()
        if self.masters:
            # Computed once: computed again for the state, at the end of the step, they would keep
            # the replicas alive, which the caller then could not overwrite in place.
            masters = lax.optimization_barrier(
                tuple(x + u for x, u in zip(weights, updates, strict=True))
            )
            updates = tuple(x - y for x, y in zip(masters, replica, strict=True))
        # Seen by the guard even if the update, such as the sign of Inf, is finite.
        pairs = zip(grads, updates, strict=True)
        sound = tuple(jnp.where(jnp.isfinite(g), u, jnp.nan) for g, u in pairs)
        return sound, Stepped(after, masters)

    def _clipped(
        self, plan: Plan, part: Stacks, dense: Stacks, shards: tuple[str, ...]
    ) -> tuple[Stacks, Stacks]:
        """Both, scaled down to the largest norm; of a mean that is not finite, to NaN."""
        over = tuple(axes.names(plan.axis_name)) + shards
        everything = jnp.maximum(norms.largest(part), norms.largest(dense))
        unit = norms.unit(lax.pmax(everything, over))
        energy = lax.psum(norms.energy(part, unit), over)
        of_dense = norms.energy(dense, unit)
        energy += lax.psum(of_dense, shards) if shards else of_dense
        norm = jnp.sqrt(energy)
        bound = jnp.float32(self.max_norm) * unit
        # NaN compares as small, so that it stays; Inf times zero is NaN.
        factor = jnp.where(norm > bound, bound / norm, 1.0)

        return tuple(x * factor for x in part), tuple(x * factor for x in dense)


def _wide(x: Array) -> Array:
    return x.astype(summing.wide(x.dtype))


def _hold(plan: Plan, tree: PyTree) -> PyTree:
    """A tree as a state stores it: each array of rows is this worker's slice of them."""
    return _rows(plan, tree, lambda x: PerWorker.wrap(x, "slice", plan.axis_name))


def _rows(plan: Plan, tree: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """A tree whose arrays of this worker's rows, with or without a leading one, are changed."""
    shapes = {x.shape for x in plan.part_like}
    shapes |= {(1, *shape) for shape in shapes}
    return jax.tree.map(lambda x: change(x) if jnp.shape(x) in shapes else x, tree)

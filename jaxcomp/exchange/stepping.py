"""An optimizer between the two ways of a reduction: each worker steps its part of the model."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.exchange.plan import Plan
from jaxcomp.exchange.state import ReductionState, TiersState
from jaxcomp.layout import batches, trees
from jaxcomp.mesh import kinds, per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.misuse import elementwise
from jaxcomp.numerics import addition, counting, norms
from jaxcomp.types import Array, PyTree, Stacks


class Stepped(NamedTuple):
    """An optimizer's state for some arrays.

    Attributes:
        optimizer: the state of the optimizer.
        residual: the part of the updates that the replicas have not received yet, in float32 or
            wider; `()` without memory on the way down.
    """

    optimizer: PyTree
    residual: PyTree


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
        if isinstance(self.reduction.reducer, TiersState):
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
        remembers: whether the part of an update that the way down or a narrow dtype rounds off is
            sent in the next step.
        max_norm: the norm at which the mean gradient is clipped; None for no clipping.
    """

    optimizer: Any
    remembers: bool
    max_norm: float | None

    def init(self, plan: Plan, whole: PyTree) -> SteppedState:
        """The state before the first step, whose values the first step makes from the parameters.

        Args:
            plan: the plan.
            whole: the parameters of the whole model, or their shapes.

        Raises:
            ValueError: if the optimizer needs whole leaves, or treats leaves differently.
        """
        dense = {number: plan.layout.likes[number] for number in plan.layout.dense}
        leaves, treedef = jax.tree.flatten(whole)
        for batch in plan.layout.batches:  # A leaf is stepped in the dtype of its batch.
            for number in {piece.leaf for piece in batch.pieces}:
                leaves[number] = jax.ShapeDtypeStruct(jnp.shape(leaves[number]), batch.dtype)
        stepped = treedef.unflatten(leaves)
        elementwise.check(self.optimizer, stepped, plan.part_like, dense, given=whole)

        def begun(likes: Any) -> Stepped:
            zeros = tuple(jnp.zeros(x.shape, addition.wide(x.dtype)) for x in likes)
            return Stepped(self.optimizer.init(zeros), zeros if self.remembers else ())

        part = begun(plan.part_like)
        # With one more row in each array, only arrays of rows have another shape. Optax also calls
        # the one-element leaves of factored moments parameters (`tree_map_params`).
        more = [jax.ShapeDtypeStruct((x.shape[0] + 1, x.shape[1]), x.dtype) for x in plan.part_like]
        taller = jax.eval_shape(lambda: begun(more))
        held = jax.tree.map(
            lambda x, y: x if jnp.shape(x) == y.shape else _wrap(plan, x), part, taller
        )
        return SteppedState(jnp.zeros((), jnp.int32), held, begun(dense.values()))

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
        """The updates to send, and the next state, in which they are still the residual.

        Args:
            plan: the plan.
            part: this worker's part of the mean of the compressed leaves.
            dense: the mean of the dense leaves.
            params: this device's replica of the parameters.
            state: the state.
            shards: the axes over which the model is sharded, whose devices have other leaves.
            extra: further arguments of the optimizer's update.
        """
        replica, weights = _own(plan, params), _dense(plan, params)
        part, dense = (tuple(map(_wide, x)) for x in (part, dense))
        if self.max_norm is not None:
            part, dense = self._clipped(plan, part, dense, shards)
        first = state.taken == 0

        def stepped(grads: Stacks, replica: Stacks, state: Stepped) -> tuple[Stacks, Stepped]:
            return self._stepped(grads, replica, state, first, extra)

        # The optimizer sees rows, as in `init`, but the arrays keep the axis of the workers in
        # which they are stored: XLA writes a state into its own buffer only where nothing between
        # the old value and the new one is reshaped.
        nodes, treedef = jax.tree.flatten(state.part, is_leaf=per_worker.is_per_worker)
        own = [per_worker.is_per_worker(node) for node in nodes]
        marks = treedef.unflatten([0 if one else None for one in own])
        held = treedef.unflatten(
            [node.own()[None] if one else node for node, one in zip(nodes, own, strict=True)]
        )
        rows = jax.vmap(stepped, in_axes=(0, 0, marks), out_axes=(0, marks), axis_size=1)
        part, replica = (tuple(x[None] for x in stacks) for stacks in (part, replica))
        updates, after = rows(part, replica, held)
        if self.remembers:
            # An optimizer may divide by zero in the padding.
            pairs = zip(plan.slices, updates, strict=True)
            updates = tuple(jax.vmap(functools.partial(batches.real, s))(x) for s, x in pairs)
            after = after._replace(residual=updates)
        steps, of_dense = stepped(dense, weights, state.dense)
        after = jax.tree.map(
            lambda axis, x: x if axis is None else _wrap(plan, x[0]),
            marks,
            after,
            is_leaf=lambda axis: axis is None,
        )
        new = SteppedState(counting.after(state.taken), after, of_dense)
        return tuple(x[0] for x in updates), steps, new

    def settle(
        self, plan: Plan, mean: Stacks, dense: Stacks, params: PyTree, state: SteppedState
    ) -> SteppedState:
        """The state without the updates that the replicas have received.

        Args:
            plan: the plan.
            mean: the updates of the compressed leaves, as every worker has received them.
            dense: the updates of the dense leaves.
            params: this device's replica, before its update.
            state: the state after `step`.
        """
        if not self.remembers:
            return state
        dtypes = {x.dtype for x in (*jax.tree.leaves(params), *plan.layout.likes)}
        if dtypes <= {jnp.dtype(jnp.float32)} or dtypes == {jnp.dtype(jnp.float64)}:
            received, of_dense = _slice(plan, mean), dense
        else:  # As `optax.apply_updates` rounds them.
            after = optax.apply_updates(params, trees.assemble(plan.layout, mean, dense))
            received, of_dense = (
                tuple(_wide(x) - _wide(y) for x, y in zip(new, old, strict=True))
                for new, old in (
                    (_own(plan, after), _own(plan, params)),
                    (_dense(plan, after), _dense(plan, params)),
                )
            )
        pairs = zip(state.part.residual, received, strict=True)
        # In the shape that is stored.
        left = tuple(PerWorker(x.tree - y[None], x.kind) for x, y in pairs)
        part = state.part._replace(residual=left)
        pairs = zip(state.dense.residual, of_dense, strict=True)
        rest = state.dense._replace(residual=tuple(x - y for x, y in pairs))
        return state._replace(part=part, dense=rest)

    def _stepped(
        self,
        grads: Stacks,
        replica: Stacks,
        state: Stepped,
        first: Array,
        extra: dict[str, Any],
    ) -> tuple[Stacks, Stepped]:
        """The updates to send, and the next state."""
        weights = tuple(map(_wide, replica))
        if self.remembers:
            weights = tuple(x + r for x, r in zip(weights, state.residual, strict=True))
        likes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in weights)
        held, treedef = jax.tree.flatten(state.optimizer)
        copies = elementwise.copies(self.optimizer, likes)
        if any(copies):  # Made here and not in `init`, which may know no parameters, or others.
            fresh = jax.tree.leaves(self.optimizer.init(weights))
            held = [
                jnp.where(first, new, old) if copied else old
                for copied, new, old in zip(copies, fresh, held, strict=True)
            ]
        held = treedef.unflatten(held)
        updates, after = self.optimizer.update(grads, held, weights, **extra)
        if self.remembers:
            updates = tuple(u + r for u, r in zip(updates, state.residual, strict=True))
        # Seen by the guard even if the update, such as the sign of Inf, is finite.
        pairs = zip(grads, updates, strict=True)
        sound = tuple(jnp.where(jnp.isfinite(g), u, jnp.nan) for g, u in pairs)
        if not self.remembers:
            return sound, Stepped(after, ())
        # Computed once: computed again for the residual, at the end of the step, they would keep
        # the replicas alive, which the caller then could not overwrite in place.
        sound = lax.optimization_barrier(sound)
        return sound, Stepped(after, sound)

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
    return x.astype(addition.wide(x.dtype))


def _own(plan: Plan, tree: PyTree) -> Stacks:
    """This worker's part of the compressed leaves of a tree, in a dtype that represents them."""
    leaves = plan.layout.treedef.flatten_up_to(tree)
    whole = [batch.in_dtype_of(leaves) for batch in plan.layout.batches]
    return _slice(plan, tuple(trees.stack(batch, leaves) for batch in whole))


def _dense(plan: Plan, tree: PyTree) -> Stacks:
    """The dense leaves of a tree."""
    leaves = plan.layout.treedef.flatten_up_to(tree)
    return tuple(leaves[number] for number in plan.layout.dense)


def _slice(plan: Plan, stacks: Stacks) -> Stacks:
    """This worker's slice of all rows."""
    if plan.fast is not None:
        stacks = tuple(own.own(x) for own, x in zip(plan.batches, stacks, strict=True))
    return tuple(own.own(x) for own, x in zip(plan.slices, stacks, strict=True))


def _wrap(plan: Plan, rows: Array) -> PerWorker:
    """Rows as a state stores them: this worker's slice."""
    return PerWorker.wrap(rows, "slice", plan.axis_name)

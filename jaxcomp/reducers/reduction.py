"""The one path that every gradient takes through any reducer: feedback, uplink, downlink."""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomp import axes, compiler, policy as policy_, trees, wire, workers as workers_
from jaxcomp.base import Feedback, Mirrored, Reducer
from jaxcomp.feedback import NoFeedback, Residual
from jaxcomp.reducers import carry, dense as dense_, shares
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks

_LARGE = 2**16

_PARTS = 4
_WORTH_PARTS = 2**22
"""From so many elements on, the first parts are on their way while the last gradients are computed;
below, messages are too short for the wire to tell.
"""


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


class Reduction(NamedTuple):
    """A mean, the memory for the next step, and what the step's statistics need.

    Attributes:
        mean: of the gradients.
        state: for the next step.
        given: what the links were given of this worker's gradient.
        message: what they sent in place of it.
        sent: what arrived of that.
        turn: who sent, under a gate.
    """

    mean: PyTree
    state: ReductionState
    given: Stacks
    message: Stacks
    sent: Stacks
    turn: Any = None


def plan(reducer: Reducer, like: PyTree, workers: tuple[int, ...] = (1,)) -> trees.Layout:
    """Which leaves the reducer compresses, in which batches, over axes of these sizes."""
    policy = policy_.NOTHING if reducer.uplink is None else reducer.uplink.policy
    shares = reducer.shares(workers)
    whole = trees.layout(policy, like, shares=shares)
    runs = collectives(reducer, whole.batches)
    return whole if runs == 1 else trees.layout(policy, like, shares=shares, runs=runs)


def collectives(reducer: Any, batches: Batches) -> int:
    """Into how many collectives the payload of these batches is split each way, at most."""
    if reducer.collectives is not None:
        return reducer.collectives
    # Shares of a hierarchy have none: their leaves are not in runs.
    pieces = [piece for batch in batches for piece in getattr(batch, "pieces", ())]
    large = sum(piece.stop - piece.start for piece in pieces) >= _WORTH_PARTS
    return min(_PARTS, len({piece.leaf for piece in pieces})) if large else 1


def rounds(reducer: Any, batches: Batches, payload: PyTree, workers: int) -> int:
    """Messages one after another, where this is sent one way: `n − 1` for each collective.

    Those of one step do not depend on each other and may share the wire, but no plan counts on it.
    """
    return wire.collectives(payload, collectives(reducer, batches)) * (workers - 1)


def plan_here(reducer: Reducer, like: PyTree, axis_name: AxisName) -> trees.Layout:
    """The `plan` over the workers of this axis."""
    return plan(reducer, like, axes.sizes(axis_name))


def link_bytes(reducer: Any, like: PyTree, workers: Any) -> int:
    """What one device sends over so many workers, for batches and for leaves left dense."""
    sizes = workers if isinstance(workers, tuple) else (workers,)
    layout = plan(reducer, like, sizes)
    dense = dense_.fused_link_bytes([layout.likes[i] for i in layout.dense], math.prod(sizes))
    told = told_bytes(reducer, layout.batches, math.prod(sizes))
    return math.ceil(reducer.batches_link_bytes(layout.batches, workers) + dense + told)


def told_bytes(reducer: Any, batches: Batches, workers: int) -> Fraction | int:
    """Those of the number by which workers say that their memories are finite."""
    return wire.ring(4, workers) if tells(reducer, batches) else 0


def payload_bytes(reducer: Reducer, layout: trees.Layout) -> int:
    """What one worker puts into the collectives for a tree of this layout."""
    return round(sum(batch_bytes(reducer, layout))) + trees.dense_bytes(
        layout, dense_dtype(reducer)
    )


def batch_bytes(reducer: Reducer, layout: trees.Layout) -> tuple[float, ...]:
    """What each batch accounts for of it: its payload, unless the reducer knows better."""
    own = settled(reducer).payload_bytes(layout.batches)
    if own is not None:
        return own
    return tuple(float(wire.fused_bytes(part)) for part in wire.payload_like(layout.batches))


def dense_dtype(reducer: Reducer) -> Any:
    """The dtype that a reducer sends dense leaves in; None for their own."""
    dtype = settled(reducer).dtype
    return None if dtype is None else jnp.dtype(dtype)


def settled(reducer: Reducer) -> Reducer:
    """The last reducer of one that changes with time; else itself."""
    return reducer.schedule[-1][1]


def feedback_of(reducer: Reducer) -> Feedback:
    """The feedback of the workers' links."""
    return NoFeedback() if reducer.uplink is None else reducer.uplink.feedback


def aside_of(reducer: Reducer) -> Feedback:
    """Under a gate, the feedback of the leaves that are sent as they are.

    That of the others, but without momentum, which those leaves get after the mean.
    """
    feedback = feedback_of(reducer)
    return Residual() if feedback.kind == "momentum" else feedback


def init(
    reducer: Reducer, like: PyTree, axis_name: AxisName, *, gated: bool = False
) -> ReductionState:
    """Memory for gradients like these; with `gated`, also for the leaves that are sent dense.

    Raises:
        ValueError: if a codec does not go with the feedback around it.
    """
    feedback, layout = feedback_of(reducer), plan_here(reducer, like, axis_name)
    batches = layout.batches
    for batch in batches:
        feedback.check(batch.codec, batch.size)
    memory, aside = _memory(reducer, batches, axis_name), aside_of(reducer)
    likes = tuple(layout.likes[i] for i in layout.dense)
    return ReductionState(
        feedback=hold(reducer, memory, axis_name),
        reducer=reducer.init(batches, axis_name),
        dense=hold_aside(reducer, aside.init(likes, likes), axis_name) if gated else (),
    )


def _memory(reducer: Reducer, batches: Batches, axis_name: AxisName) -> PyTree:
    """Of the uplink's feedback, without the workers' axis."""
    inner = reducer.within(batches, axis_name)
    return feedback_of(reducer).init(
        tuple(batch.like for batch in inner), reducer.part_like(batches, axis_name)
    )


def fitted(
    reducer: Reducer, batches: Batches, state: ReductionState, axis_name: AxisName
) -> ReductionState:
    """The state for these workers, from one that may have been made where there was only one.

    Raises:
        OtherShapesError: a `ValueError`, if it cannot be one for them.
    """
    memory = workers_.held(state.feedback)
    wanted = jax.eval_shape(lambda: _memory(reducer, batches, axis_name))
    if isinstance(memory, Mirrored) and reducer.splits:
        rows = tuple(batch.like for batch in batches)
        whole = jax.eval_shape(lambda: feedback_of(reducer).init(rows, rows)).mirror
        mirror = shares.own(memory.mirror, wanted.mirror, axis_name, whole)
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


def reduce(
    reducer: Reducer,
    key: Array,
    grads: PyTree,
    state: ReductionState,
    axis_name: AxisName,
    *,
    weight: Array | None = None,
    guard: bool = True,
    everywhere: tuple[str, ...] = (),
) -> Reduction:
    """stack → compensate → collect → the uplink's feedback on this device's part → spread.

    The mirror of a shift memory is thus added before the downlink. With `guard`, a mean that is
    not finite leaves every memory as it was, alike on all workers, since all see the same mean; and
    alike over the axes `everywhere`, which have a part of it each. If the memory of one worker
    would not be finite, a leaf of the mean is made NaN on all.
    """
    feedback, layout = feedback_of(reducer), plan_here(reducer, grads, axis_name)
    batches = layout.batches
    state = fitted(reducer, batches, state, axis_name)
    xs, dense = trees.stacks(layout, grads)
    xs = reducer.enter(batches, xs, axis_name)
    message, memory = feedback.compensate(xs, workers_.held(state.feedback))
    part, sent, share, links = reducer.collect(
        key, batches, message, state.reducer, axis_name, weight
    )
    estimate, memory = feedback.update(message, sent, part, share, weight, memory)
    means, links = reducer.spread(key, batches, estimate, links, axis_name)
    means = reducer.leave(batches, means, axis_name)
    if not guard or not tells(reducer, batches):
        dense = reducer.dense(dense, axis_name, weight)
    elif weight is None:  # With the dense leaves, so that it is no collective more.
        *dense, flag = reducer.dense((*dense, unsound(memory)), axis_name)
        means, dense = spoilt((means, dense), flag)
    else:
        dense, flag = reducer.dense(dense, axis_name, weight), told(memory, axis_name)
        means, dense = spoilt((means, dense), flag)
    new = ReductionState(hold(reducer, memory, axis_name), links)
    if guard and jax.tree.leaves(new):  # Without memory there is nothing to guard.
        finite = all_finite((means, dense))
        if everywhere:
            finite = jax.lax.pmin(finite.astype(jnp.int32), everywhere) == 1
        new = jax.tree.map(lambda now, before: jnp.where(finite, now, before), new, state)
    return Reduction(trees.assemble(layout, means, dense), new, xs, message, sent)


def tells(reducer: Reducer, batches: Batches) -> bool:
    """Whether a worker's memory may be lost in a step whose mean is finite, so that it must say so.

    One worker alone cannot keep what it had: a mirror would no longer be the mean of what it
    mirrors.
    """
    return bool(batches) and not feedback_of(reducer).bounded


def unsound(memory: PyTree) -> Array:
    """NaN if a worker's memory holds what is not finite, else zero."""
    own = memory.own if isinstance(memory, Mirrored) else memory
    floating = [x for x in jax.tree.leaves(own) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.where(all_finite(floating), jnp.float32(0), jnp.float32(jnp.nan))


def told(memory: PyTree, axis_name: AxisName) -> Array:
    """The same of all workers together."""
    return jax.lax.psum(axes.vary(unsound(memory), axis_name), axis_name)


def spoilt(tree: PyTree, flag: Array) -> PyTree:
    """The tree, with NaN for its smallest leaf if the flag is: all of it would be one more pass."""
    leaves, treedef = jax.tree.flatten(tree)
    sizes = [leaf.size or math.inf for leaf in leaves]
    number = sizes.index(min(sizes))
    leaves[number] = jnp.where(jnp.isnan(flag), jnp.nan, leaves[number])
    return jax.tree.unflatten(treedef, leaves)


def hold(reducer: Reducer, memory: PyTree, axis_name: AxisName) -> PyTree:
    """The memory of the workers' links as it lies in a state."""
    kind, splits = feedback_of(reducer).kind, reducer.splits
    return workers_.hold(memory, kind, axis_name, splits=splits)


def hold_aside(reducer: Reducer, memory: PyTree, axis_name: AxisName) -> PyTree:
    """That of the leaves that are sent as they are, of whose mean every device has all."""
    return workers_.hold(memory, aside_of(reducer).kind, axis_name)


def none_lost(after: PyTree, before: PyTree) -> Array:
    """Whether no floating element of a state has become non-finite.

    One that was so before may mean something: a best loss begins at infinity.
    """
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    floating = [pair for pair in pairs if jnp.issubdtype(pair[0].dtype, jnp.floating)]

    def check(pairs):
        fine = [jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old)) for new, old in pairs]
        return functools.reduce(jnp.logical_and, fine, jnp.asarray(np.True_))

    return compiler.outlined(check)(floating)


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

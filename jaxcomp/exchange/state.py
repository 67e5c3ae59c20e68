"""The memory of a reduction: links, reducer, and under a gate the dense leaves."""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.exchange import legs, resize
from jaxcomp.exchange.plan import Plan, call_cached, dense_feedback_of
from jaxcomp.layout import policy
from jaxcomp.mesh import kinds, per_worker
from jaxcomp.types import PyTree

_LINK = "link"
"""The kind of a link's memory, of which new workers get the mean of the old ones."""


class TiersState(NamedTuple):
    """The state of the slow level's reducer; devices on the fast axis hold different rows."""

    outer: PyTree


@kinds.REDUCTIONS.register
class ReductionState(NamedTuple):
    """The memory of the workers' links, and the reducer's own state.

    Attributes:
        feedback: the links' memory.
        reducer: the reducer's state; `()` if it has no arrays.
        dense: the memory of the dense leaves under a gate; else `()`.
    """

    feedback: PyTree
    reducer: PyTree
    dense: PyTree = ()

    def check_resizable(self, workers: int) -> None:
        """Raises a `ValueError` if the rows of a device depend on the sizes of several axes."""
        tiers = isinstance(self.reducer, TiersState)
        if tiers and jax.tree.leaves((self.feedback, self.reducer)):
            raise ValueError(
                f"`state` must not be that of jaxcomp.Hierarchical to be moved to {workers} "
                "workers, because the rows that a device stores depend on the sizes of all axes. "
                "Make a new state with jaxcomp.init_state"
            )

    def carried(self, like: "ReductionState", workers: int, *, sharded: bool) -> "ReductionState":
        """The state in the tree of another number of workers, without arrays that they lack.

        `jaxcomp.resize_workers` calls this before it moves the arrays.

        Args:
            like: the state of the new workers before its first step.
            workers: the new number of workers.
            sharded: whether the arrays have an axis of shards, after that of the workers.

        Raises:
            ValueError: if the memory cannot be moved to other workers.
        """
        feedback, reducer = resize.carry(
            self.feedback, self.reducer, like.reducer, workers, sharded=sharded
        )
        return self._replace(feedback=feedback, reducer=reducer)


_OF_ANOTHER = (
    "It is of another codec or feedback: jaxcomp.graft(tx, state, params, mesh, axis_name) keeps "
    "all of the state but its memory; jaxcomp.init_state(tx, params, mesh, axis_name) begins anew"
)
_OF_OTHERS = (
    "It is of other parameters, another codec or other workers: make it with jaxcomp.init_state, "
    "or with tx.init inside the mapped function; keep all but the memory with jaxcomp.graft(tx, "
    "state, params, mesh, axis_name), or convert the memory of another number of workers with "
    "jaxcomp.resize_workers"
)


def init(plan: Plan, *, gated: bool = False) -> ReductionState:
    """Memory for the leaves of a plan; with `gated`, also for the dense leaves.

    Raises:
        ValueError: if a codec cannot be combined with its feedback.
    """
    feedback, of_dense = plan.feedback, dense_feedback_of(plan.given)
    for batch in plan.batches:
        feedback.check(batch.codec, batch.size)
    likes = tuple(plan.layout.likes[i] for i in plan.layout.dense)
    memory = feedback.init(plan.likes, plan.part_like)
    dense = of_dense.init(likes, likes) if gated else ()
    return hold(plan, ReductionState(memory, legs.init(plan), dense), gated=gated)


def hold(plan: Plan, own: ReductionState, *, gated: bool = False) -> ReductionState:
    """A worker's memory as a state stores it.

    A reducer's state without arrays is `()`, for any number of workers. Of the dense leaves every
    device has the whole mean.
    """
    facts, axis_name = plan.facts, plan.axis_name
    reducer = own.reducer if jax.tree.leaves(own.reducer) else ()
    return ReductionState(
        per_worker.wrap(
            own.feedback,
            _LINK,
            axis_name,
            splits=facts.splits,
            alike=facts.same_on_all,
            order=order_of(plan),
        ),
        reducer if plan.fast is None else TiersState(reducer),
        per_worker.wrap(own.dense, _LINK, axis_name) if gated else (),
    )


def order_of(plan: Plan) -> str:
    """Names which leaves are in which batch, if rules say that; else shapes do, and it is "".

    Two policies may make batches of the same shapes of different leaves, whose memory has this
    name.
    """
    if not any(why.startswith(policy.BY_RULE) for why in plan.layout.reasons):
        return ""
    order = [[piece.leaf for piece in batch.pieces] for batch in plan.layout.batches]
    return hashlib.sha256(repr(order).encode()).hexdigest()[:16]


def take(plan: Plan, state: ReductionState, *, gated: bool = False) -> ReductionState:
    """A worker's memory, from the stored one: the inverse of `hold`.

    Raises:
        ValueError: for the state of other gradients, workers or settings.
    """
    feedback, dense = per_worker.unwrap((state.feedback, state.dense))
    wanted, own, idle = call_cached(_wanted, plan, gated)
    got = shapes(state)
    held = jax.tree.leaves(state.feedback, is_leaf=per_worker.is_per_worker)
    held = {node.stored for node in held if per_worker.is_per_worker(node)}
    if held - {own}:
        raise ValueError(
            f"`state` must have the memory {own!r}, got {sorted(held)}: rules of another policy, "
            "which put the parameters into it in another order. Make it with jaxcomp.init_state, "
            "or keep all but the memory with jaxcomp.graft"
        )
    for path in wanted | got:
        if got.get(path) != wanted.get(path):
            shape = f"have the shape {wanted[path]}" if path in wanted else "not be there"
            more = wanted.keys() ^ got.keys()
            # Two workers gather, without a downlink: its memory tells their number, not the codec.
            resized = all(one.startswith(".reducer") and per_worker.SLICE in one for one in more)
            advice = _OF_OTHERS if resized else _OF_ANOTHER
            raise ValueError(
                f"`state` must be one for these gradients and {plan.workers} workers: memory"
                f"{path} must {shape}, got {got.get(path, 'none')}. {advice}"
            )
    reducer = state.reducer if plan.fast is None else state.reducer.outer
    return ReductionState(feedback, reducer if jax.tree.leaves(reducer) else idle, dense)


class _Wanted(NamedTuple):
    """The state of a plan.

    Attributes:
        shapes: the shape of every array, by its path.
        stored: the name of the links' memory.
        idle: the state of a reducer without arrays, as its legs use it.
    """

    shapes: dict[str, tuple[int, ...]]
    stored: str
    idle: PyTree


@functools.lru_cache(maxsize=512)
def _wanted(plan: Plan, gated: bool) -> _Wanted:
    state, reducer = jax.eval_shape(lambda: (init(plan, gated=gated), legs.init(plan)))
    own = per_worker.PerWorker((), _LINK, order_of(plan)).stored
    return _Wanted(shapes(state), own, reducer)


def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a tree, by its path."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(x) for path, x in flat}


def same_shapes(tree: Any, other: Any) -> bool:
    """Whether two trees have the same structure and shapes."""
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    return shapes(tree) == shapes(other)

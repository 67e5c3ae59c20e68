"""The rounds of `gossip`: workers exchange messages about their models, and mix them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.backend import conditional, xla
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import noise
from jaxcomp.reducers import accounting, guarding, reduce as reduce_, state as state_
from jaxcomp.reducers.gossip import Gossip
from jaxcomp.reducers.state import ReductionState
from jaxcomp.types import Array, AxisName, PyTree, Stacks


class Setup(NamedTuple):
    """The arguments of `gossip`."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs | None
    reducer: Gossip
    axis_name: AxisName
    mixing: float
    every: int
    rounds: Any
    prox: Callable[[PyTree, Array], PyTree] | None
    tracking: bool
    stay: bool
    guard: bool


class Slow(NamedTuple):
    """A worker's slow parameters, minus the centre, and the state of their optimizer."""

    offset: Any
    outer: Any


class Tracked(NamedTuple):
    """A worker's estimate of the mean gradient, and its last gradient."""

    estimate: Any
    last: Any


class Models(NamedTuple):
    """What an exchange changes on this worker.

    Attributes:
        offset: its parameters minus the centre.
        memory: the links' memory.
        slow: its slow parameters, or `()`.
        tracked: its estimate of the mean gradient, or `()`.
    """

    offset: PyTree
    memory: ReductionState
    slow: Any
    tracked: Any


def displaced(params: PyTree, offset: PyTree) -> PyTree:
    """`params + offset`, added in the offset's dtype."""
    return jax.tree.map(lambda p, by: (p.astype(by.dtype) + by).astype(p.dtype), params, offset)


def fitted(setup: Setup, memory: ReductionState, offset: PyTree) -> ReductionState:
    """The memory in its final shapes, which a conditional and a loop need before they begin."""
    like = (offset, offset) if setup.tracking else offset
    batches = accounting.plan_here(setup.reducer, like, setup.axis_name).batches
    return state_.fitted(setup.reducer, batches, memory, setup.axis_name)


def exchanged(
    setup: Setup, models: Models, params: PyTree, key: Array, taken: Array, mixed: Array
) -> tuple[Models, Array]:
    """The models after all rounds of an exchange, and the number of rounds so far."""
    tree = (models.offset, models.tracked.estimate) if setup.tracking else models.offset

    def once(carry: tuple[PyTree, ReductionState, Array]) -> tuple[PyTree, ReductionState, Array]:
        tree, memory, mixed = carry
        tree, memory = _mixed(setup, noise.fold(key, mixed), tree, memory)
        return tree, memory, mixed + 1

    carry = (tree, models.memory, mixed)
    if setup.rounds == 1:
        carry = once(carry)
    else:
        count = setup.rounds(taken) if callable(setup.rounds) else setup.rounds
        count = conditional.alike(jnp.asarray(count, jnp.int32), setup.axis_name)
        carry = lax.fori_loop(0, jnp.maximum(count, 1), lambda _, carry: once(carry), carry)
    tree, memory, mixed = carry
    offset, tracked = tree, models.tracked
    if setup.tracking:
        offset, tracked = tree[0], Tracked(tree[1], models.tracked.last)
    if setup.prox is not None:
        offset = _near(setup, offset, params, taken)
    slow = models.slow
    if setup.outer is not None:
        slow = _outer(setup, slow, offset, params)
        offset = slow.offset
    return Models(offset, memory, slow, tracked), mixed


def _mixed(
    setup: Setup, key: Array, tree: PyTree, memory: ReductionState
) -> tuple[PyTree, ReductionState]:
    """`x + γ (Σⱼ wᵢⱼ x̂ⱼ − x̂ᵢ)` after one round, and the memory after it."""
    reducer, axis_name = setup.reducer, setup.axis_name
    before: Any = per_worker.unwrap(memory.feedback)
    if setup.stay:
        layout = accounting.plan_here(reducer, tree, axis_name)
        apart = _assembled(layout, _apart(before.mirror, before.own))
        tree = jax.tree.map(lambda x, by: x + _times(setup.mixing, by), tree, apart)
    prepared = reduce_.prepare(reducer, key, tree, memory, axis_name, guard=setup.guard)
    result = reduce_.finish(prepared, reduce_.exchange(prepared))
    known = reducer.uplink.feedback.known(result.sent, before)
    theirs = _assembled(prepared.layout, known)
    if setup.stay:
        moved = theirs
    else:
        moved = jax.tree.map(
            lambda x, part, own: x + _times(setup.mixing, part - own), tree, result.mean, theirs
        )
    if setup.guard:
        moved = guarding.kept(guarding.all_finite(moved), moved, tree)
    return moved, result.state


def _assembled(layout: trees.Layout, stacks: Stacks) -> PyTree:
    """The tree of these stacks; only leaves without elements are outside of all batches."""
    empty = [jnp.zeros(layout.likes[i].shape, layout.likes[i].dtype) for i in layout.dense]
    return trees.assemble(layout, stacks, empty)


def _apart(those: Stacks, own: Stacks) -> Stacks:
    return tuple(a - b for a, b in zip(those, own, strict=True))


def _times(factor: float, x: Array) -> Array:
    """A product that is not fused with a sum, which would round differently elsewhere."""
    return x if factor == 1 else xla.block_fma(x * jnp.asarray(factor, x.dtype))


def _near(setup: Setup, offset: PyTree, params: PyTree, taken: Array) -> PyTree:
    """The offset of the proximal point."""
    assert setup.prox is not None
    found = setup.prox(displaced(params, offset), taken)
    return jax.tree.map(
        lambda x, p, by: x.astype(by.dtype) - p.astype(by.dtype), found, params, offset
    )


def _outer(setup: Setup, slow: Slow, mixed: PyTree, params: PyTree) -> Slow:
    """The slow parameters after a step by the pseudo-gradient."""
    assert setup.outer is not None
    delta = jax.tree.map(lambda a, m, p: (a - m).astype(p.dtype), slow.offset, mixed, params)
    here = displaced(params, slow.offset)
    update, outer = setup.outer.update(delta, slow.outer, here)
    moved = jax.tree.map(lambda a, u: a + u.astype(a.dtype), slow.offset, update)
    return Slow(moved, outer)

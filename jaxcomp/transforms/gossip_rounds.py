"""The rounds of `gossip`: workers exchange messages about their models, and mix them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.backend import conditional, xla
from jaxcomp.exchange import guarding, reduce as reduce_
from jaxcomp.exchange.plan import Plan
from jaxcomp.layout import trees
from jaxcomp.mesh import on_graph, per_worker
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.reducers.gossip import Gossip
from jaxcomp.transforms import sharded, worker_round
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
    param_specs: PyTree

    def messages(self, offset: PyTree, estimate: PyTree) -> PyTree:
        """The tree of the messages."""
        return (offset, estimate) if self.tracking else offset

    @property
    def specs(self) -> PyTree:
        """The specs of the tree of the messages."""
        return self.messages(self.param_specs, self.param_specs)


class Round(NamedTuple):
    """The state of a round of gossip, of the whole model or of one device's shard.

    Attributes:
        key: the round's key.
        memory: the links' memory.
    """

    key: Any
    memory: Any


class Slow(NamedTuple):
    """A worker's slow parameters, minus the centre, and the state of their optimizer."""

    offset: Any
    outer: Any


class Tracked(NamedTuple):
    """A worker's estimate of the mean gradient, and its last gradient."""

    estimate: Any
    last: Any


class Models(NamedTuple):
    """The values that an exchange changes on this worker.

    Attributes:
        offset: its parameters minus the centre.
        memory: the links' memory.
        slow: its slow parameters, or `()`.
        tracked: its estimate of the mean gradient, or `()`.
    """

    offset: PyTree
    memory: Any
    slow: Any
    tracked: Any


def begin(setup: Setup, params: PyTree) -> Any:
    """The memory before the first round."""

    def fresh(params: PyTree) -> Round:
        offset = worker_round.start(params)
        like = setup.messages(offset, offset)
        return Round((), choose.memory(setup.reducer, like, setup.axis_name))

    if setup.param_specs is None:
        return store_memory(setup, fresh(params).memory)
    return store_memory(
        setup, sharded.init(fresh, params, setup.param_specs, setup.axis_name).memory
    )


def store_memory(setup: Setup, memory: Any) -> Any:
    """The memory as a state stores it: mirrors are sums with the weights of one graph."""
    if not setup.reducer.uplink.feedback.facts.mirrors:
        return memory
    return on_graph.OnGraph(memory, setup.reducer.graph)


def own_memory(setup: Setup, memory: Any) -> Any:
    """The inverse of `store_memory`.

    Raises:
        ValueError: for memory over another graph.
    """
    if not setup.reducer.uplink.feedback.facts.mirrors:
        return memory
    return on_graph.own(memory, setup.reducer.graph)


def exchange(
    setup: Setup, models: Models, params: PyTree, key: Array, taken: Array, mixed: Array
) -> tuple[Models, Array]:
    """The models after all rounds of an exchange, and the number of rounds so far."""
    tree = models.offset
    if setup.tracking:
        tree = setup.messages(tree, models.tracked.estimate)
    mix = functools.partial(_mixed, setup)

    def once(carry: tuple[PyTree, Any, Array]) -> tuple[PyTree, Any, Array]:
        tree, memory, mixed = carry
        state = Round(noise.fold(key, mixed), memory)
        if setup.param_specs is None:
            tree, state = mix(tree, state)
        else:  # On each device's own shard.
            tree, state = sharded.update(mix, tree, state, (), setup.specs, setup.axis_name)
        return tree, state.memory, mixed + 1

    carry = (tree, models.memory, mixed)
    if setup.rounds == 1:
        carry = once(carry)
    else:
        count = setup.rounds(taken) if callable(setup.rounds) else setup.rounds
        count = conditional.as_replicated(jnp.asarray(count, jnp.int32), setup.axis_name)
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
    setup: Setup, tree: PyTree, state: Round, params: Any = (), shards: tuple[str, ...] = ()
) -> tuple[PyTree, Round]:
    """`x + γ (Σⱼ wᵢⱼ x̂ⱼ − x̂ᵢ)` after one round, and the memory after it."""
    del params, shards  # Each shard decides for itself which messages to leave out.
    (key, memory), reducer, axis_name = state, setup.reducer, setup.axis_name
    before: Any = per_worker.unwrap(memory.feedback)
    plan = Plan.of(reducer, tree, axis_name)
    if setup.stay:
        apart = jax.tree.map(jnp.subtract, before.mirror, before.own)
        by = _assembled(plan.layout, apart)
        tree = jax.tree.map(lambda x, by: x + _times(setup.mixing, by), tree, by)
    result = reduce_.reduce(plan, key, tree, memory, guard=setup.guard)
    known = reducer.uplink.feedback.known(result.sent, before)
    theirs = _assembled(plan.layout, known)
    if setup.stay:
        moved = theirs
    else:
        moved = jax.tree.map(
            lambda x, part, own: x + _times(setup.mixing, part - own), tree, result.mean, theirs
        )
    if setup.guard:
        moved = guarding.where_finite(guarding.all_finite(moved), moved, tree)
    return moved, state._replace(memory=result.state)


def _assembled(layout: trees.Layout, stacks: Stacks) -> PyTree:
    """The tree of these stacks; only leaves without elements are outside of all batches."""
    empty = [jnp.zeros(like.shape, like.dtype) for like in layout.dense_likes]
    return trees.assemble(layout, stacks, empty)


def _times(factor: float, x: Array) -> Array:
    """A product that is not fused with a sum, which would round differently elsewhere."""
    return x if factor == 1 else xla.block_fma(x * jnp.asarray(factor, x.dtype))


def _near(setup: Setup, offset: PyTree, params: PyTree, taken: Array) -> PyTree:
    """The offset of the proximal point."""
    assert setup.prox is not None
    found = setup.prox(worker_round.exact(params, offset), taken)
    return jax.tree.map(
        lambda x, p, by: x.astype(by.dtype) - p.astype(by.dtype), found, params, offset
    )


def _outer(setup: Setup, slow: Slow, mixed: PyTree, params: PyTree) -> Slow:
    """The slow parameters after a step by the pseudo-gradient."""
    assert setup.outer is not None
    delta = jax.tree.map(jnp.subtract, slow.offset, mixed)
    here = worker_round.exact(params, slow.offset)
    update, outer = setup.outer.update(delta, slow.outer, here)
    moved = jax.tree.map(lambda a, u: a + u.astype(a.dtype), slow.offset, update)
    return Slow(moved, outer)

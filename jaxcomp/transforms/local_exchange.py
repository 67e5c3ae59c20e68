"""The exchanges of `local_updates`: from a worker's pseudo-gradient to the centre's step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.backend import conditional, xla
from jaxcomp.exchange import guarding
from jaxcomp.exchange.state import ReductionState
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.reducers import choose
from jaxcomp.reducers.dense import Dense
from jaxcomp.transforms import (
    fragments as fragments_,
    local_steps as steps_,
    mean as mean_,
    remainder,
    variance as variance_,
    worker_round,
)
from jaxcomp.transforms.local_steps import FragmentState, LocalUpdatesState, Setup
from jaxcomp.types import Array, PyTree

_SKETCH = 0x736B6574
"""Folded into the key of the signs with which the variance of the models is measured."""


def exchange_due(
    setup: Setup,
    state: LocalUpdatesState,
    params: PyTree,
    exchange: bool | None,
    weight: Array | None = None,
) -> tuple[PyTree, LocalUpdatesState]:
    """The exchanges that are due after this step, and the update of the centre."""
    axis_name = setup.axis_name
    parts = fragments_.split(setup.fragments, params, params)
    times = steps_.schedule(setup, len(parts))
    length = setup.period.steps(state.period, state.taken - state.waited)
    ends: Any = conditional.uniform(state.waited >= length, axis_name)
    if exchange is False or (exchange and not times):
        ends = exchange
    updates, found, variance = [], [], jnp.zeros((), jnp.float32)
    averages = steps_.means(setup, params)
    for number, (fragment, part) in enumerate(zip(state.fragments, parts, strict=True)):
        taken = moves = ends
        if times and exchange is not False:
            taken, moves = (
                conditional.uniform(state.waited == step, axis_name) for step in times[number]
            )
        talk = functools.partial(_talk, setup, averages[number], weight, state.taken)
        update, after, variance = _exchange_fragment(setup, talk, fragment, part, taken, moves)
        updates.append(update)
        found.append(after)
    # A variance that is not finite says nothing about the period.
    known = ends & jnp.isfinite(variance)
    period = setup.period.after(state.period, state.taken, variance)
    state = state._replace(
        waited=jnp.where(ends, 0, state.waited),
        period=guarding.where_finite(known, period, state.period),
        fragments=tuple(found),
    )
    return fragments_.merge(tuple(updates)), state._replace(
        left=steps_.left(setup, len(parts), state)
    )


def _exchange_fragment(
    setup: Setup,
    talk: Callable[..., Any],
    fragment: FragmentState,
    params: PyTree,
    taken: Any,
    moves: Any,
) -> tuple[PyTree, FragmentState, Array]:
    """A fragment's update, its state, and the variance of the models.

    Args:
        setup: the arguments.
        talk: the exchange.
        fragment: its state.
        params: its leaves of the centre.
        taken: whether its pseudo-gradient is taken and averaged.
        moves: whether its mean moves the centre.
    """
    nothing, none = jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)
    if not setup.delay:

        def both(at: FragmentState, params: PyTree) -> tuple[PyTree, FragmentState, Array]:
            made, at, variance = talk(at, params)
            return *move_center(setup, at, made, params), variance

        return _when(moves, both, lambda at, _: (nothing, at, none), fragment, params)
    held, fragment = fragment.pending, fragment._replace(pending=())
    made, fragment, variance = _when(taken, talk, lambda at, _: (held, at, none), fragment, params)
    update, fragment = _when(
        moves,
        lambda at, params: move_center(setup, at, made, params),
        lambda at, _: (nothing, at),
        fragment,
        params,
    )
    return update, fragment._replace(pending=made), variance


def _talk(
    setup: Setup,
    mean: Any,
    weight: Array | None,
    taken: Array,
    fragment: FragmentState,
    params: PyTree,
) -> tuple[PyTree, FragmentState, Array]:
    """The mean of a fragment's pseudo-gradients, its state, and the variance of the models."""
    delta, share, fragment = message(setup, fragment, params, weight)
    made, memory = average(setup, mean, delta, fragment.mean, params, share)
    variance = jnp.zeros((), jnp.float32)
    if setup.period.measures:
        key = noise.fold(jnp.asarray(setup.seed), taken, _SKETCH)
        exact = made if _is_plain(setup, share) else None
        variance = variance_.of_models(delta, setup.axis_name, key, exact)
    return made, fragment._replace(mean=memory), variance


def message(
    setup: Setup, fragment: FragmentState, params: PyTree, weight: Array | None = None
) -> tuple[PyTree, Array | None, FragmentState]:
    """This worker's pseudo-gradient and weight, and the fragment's state after it is taken.

    With `guard`, a worker whose pseudo-gradient or weight is not finite goes back to the centre,
    and sends zeros with a weight of zero, as one that has not moved.
    """
    delta = fragment.delta(params)
    if not setup.guard:
        return delta, weight, fragment
    sound = guarding.all_finite(delta if weight is None else (delta, weight))
    delta = guarding.where_finite(sound, delta, jax.tree.map(jnp.zeros_like, delta))
    back = jax.tree.map(
        lambda to, by: to.astype(by.dtype), fragment.center(params), fragment.offset.own()
    )
    offset = guarding.where_finite(sound, fragment.offset.own(), back)
    return (
        delta,
        None if weight is None else jnp.where(sound, weight, 0),
        fragment._replace(
            offset=PerWorker.wrap(offset, "offset", setup.axis_name),
            lost=_count_lost(fragment, sound),
        ),
    )


def average(
    setup: Setup, mean: Any, delta: PyTree, memory: Any, params: PyTree, weight: Array | None = None
) -> tuple[PyTree, Any]:
    """The mean of the pseudo-gradients, and the memory of its links.

    With `guard`, memory whose mean is not finite begins anew: all messages were finite, so the
    memory was not, and would spoil every later mean too.
    """
    made, after = mean.update(delta, memory, params, weight=weight)

    def is_memory(node: Any) -> bool:
        return isinstance(node, ReductionState) and bool(jax.tree.leaves(node))

    if not (setup.guard and any(map(is_memory, jax.tree.leaves(after, is_leaf=is_memory)))):
        return made, after
    sound = guarding.all_finite(made)
    fresh = mean.init(jax.tree.map(jnp.zeros_like, params))

    def pick(now: Any, begun: Any) -> Any:
        return guarding.where_finite(sound, now, begun) if is_memory(now) else now

    return made, jax.tree.map(pick, after, fresh, is_leaf=is_memory)


def move_center(
    setup: Setup, fragment: FragmentState, mean: PyTree, params: PyTree
) -> tuple[PyTree, FragmentState]:
    """The centre's update by the outer optimizer, and where the workers go on from.

    With `guard`, an exchange that would make the centre or the optimizer's state non-finite is
    lost: the centre rests, and workers begin the next round as after any other exchange.
    """
    step = xla.compile_separately(functools.partial(_outer_step, setup))
    by, update, outer, rest = step(mean, fragment.outer, fragment.rest, params)
    if setup.guard:
        sound = _is_sound(mean, update, params, outer, fragment.outer)
        still = jax.tree.map(jnp.zeros_like, update)
        before = (jax.tree.map(jnp.zeros_like, by), still, fragment.outer, fragment.rest)
        by, update, outer, rest = guarding.where_finite(sound, (by, update, outer, rest), before)
        fragment = fragment._replace(lost=_count_lost(fragment, sound))
    own = fragment.offset.own()
    if setup.mix != 1:  # Else it is from the anchor, which does not move.
        own = xla.compile_separately(functools.partial(worker_round.resume, setup.mix))(own, by)
    return update, fragment._replace(
        offset=PerWorker.wrap(own, "offset", setup.axis_name), outer=outer, rest=rest
    )


def together(
    setup: Setup,
    grads: PyTree,
    state: LocalUpdatesState,
    params: PyTree,
    extra: dict[str, Any],
    weight: Array | None = None,
) -> tuple[PyTree, LocalUpdatesState]:
    """A synchronous step: the inner optimizer sees the mean gradient, and moves the centre.

    With `guard`, a worker whose gradient is not finite sends zeros, and all workers leave out a
    step that would make the centre or the optimizer's state non-finite.
    """
    guard, axis_name = setup.guard, setup.axis_name
    skipped, own = state.skipped.own(), jnp.ones((), bool)
    if guard:
        own = guarding.all_finite(grads if weight is None else (grads, weight))
        weight = None if weight is None else jnp.where(own, weight, 0)
        grads = guarding.where_finite(own, grads, jax.tree.map(jnp.zeros_like, grads))
    dense = mean_.Setup(Dense(), axis_name, None, setup.seed, guard=True, stats=False)
    mean: Any = mean_.transformation(dense, None, trusted=True)
    averaged, _ = mean.update(grads, mean.init(grads), params, weight=weight)
    step, shared = setup.inner.update(averaged, state.shared, params, **extra)
    parts, steps = (fragments_.split(setup.fragments, params, tree) for tree in (params, step))
    found = [
        remainder.split_step(part, fragment.rest, remainder.wide(part, fragment.rest, by))
        for fragment, part, by in zip(state.fragments, parts, steps, strict=True)
    ]
    update, rests = fragments_.merge(tuple(by for by, _ in found)), [rest for _, rest in found]
    if guard:
        sound = _is_sound(averaged, update, params, shared, state.shared)
        still = jax.tree.map(jnp.zeros_like, update)
        before = (still, state.shared, [fragment.rest for fragment in state.fragments])
        update, shared, rests = guarding.where_finite(sound, (update, shared, rests), before)
        skipped = skipped + jnp.where(sound & own, 0, 1)
    state = state._replace(
        taken=jnp.minimum(state.taken, steps_.LAST) + 1,
        inner=PerWorker.wrap(shared, "local", axis_name),
        skipped=PerWorker.wrap(skipped, "local", axis_name),
        fragments=tuple(
            fragment._replace(rest=rest)
            for fragment, rest in zip(state.fragments, rests, strict=True)
        ),
        shared=shared,
    )
    return update, state._replace(left=steps_.left(setup, len(parts), state))


def _outer_step(
    setup: Setup, mean: PyTree, outer: Any, rest: PyTree, params: PyTree
) -> tuple[PyTree, PyTree, Any, PyTree]:
    """The centre's step, its update, the optimizer's state and the centre's remainder."""
    whole = remainder.exact(params, rest)
    step, outer = setup.outer.update(remainder.wide(params, rest, mean), outer, whole)
    step = jax.tree.map(lambda u, p: u.astype(p.dtype), step, whole)
    update, rest = remainder.split_step(params, rest, step)
    return step, update, outer, rest


def _is_sound(mean: PyTree, update: PyTree, params: PyTree, after: Any, before: Any) -> Array:
    """Whether a step leaves the centre, and the state of its optimizer, finite."""
    center = optax.apply_updates(params, update)
    finite = guarding.all_finite((mean, center))
    return finite & guarding.none_lost(after, before)


def _count_lost(fragment: FragmentState, sound: Array) -> PerWorker:
    counted = fragment.lost.own() + jnp.where(sound, 0, 1)
    return PerWorker.wrap(counted, "local")


def _is_plain(setup: Setup, weight: Array | None) -> bool:
    """Whether the mean of an exchange is that of the models, and not rounded by a codec."""
    mean = setup.mean
    if isinstance(mean, optax.GradientTransformation) or mean.gate is not None:
        return False
    return choose.uplink(mean.source) is None and weight is None


def _when(go: Any, do: Callable[..., Any], rest: Callable[..., Any], *args: Any) -> Any:
    """`do(*args)` if `go`, else `rest(*args)`; without a conditional if `go` is a Python bool."""
    if isinstance(go, bool):
        return do(*args) if go else rest(*args)
    return conditional.either(go, do, rest, *args)

"""The steps of `local_updates`: alone, in an exchange, and all together."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.backend import axes, conditional, xla
from jaxcomp.base import Period
from jaxcomp.gates.periods import Constant
from jaxcomp.mesh import kinds
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.reducers import guarding
from jaxcomp.reducers.dense import Dense
from jaxcomp.transforms import branches, fragments as fragments_, sharded
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import Array, AxisName, PyTree

_LAST = 2**31 - 2


@kinds.DISPLACED.register
class FragmentState(NamedTuple):
    """State of a fragment: leaves that are exchanged together, and None in place of all others.

    Attributes:
        offset: each worker's parameters minus the centre, at least in float32.
        mean: the state of the compressed mean.
        outer: the state of the outer optimizer.
        pending: the mean that waits for its delay, or `()`.
        anchor: what `offset` is added to, where no exchange moves a worker; else `()`, for the
            centre.
    """

    offset: PerWorker
    mean: Any
    outer: Any
    pending: Any = ()
    anchor: Any = ()

    def here(self, params: PyTree) -> PyTree:
        """This worker's parameters, for the centre `params`; None for other fragments' leaves."""

        def own(by: Array | None, base: Array) -> Array | None:
            return None if by is None else (base.astype(by.dtype) + by).astype(base.dtype)

        base = params if self.anchor == () else self.anchor
        return jax.tree.map(own, self.offset.own(), base, is_leaf=lambda x: x is None)

    def moved(self, params: PyTree) -> PyTree:
        """The pseudo-gradient: the centre minus this worker's parameters."""
        if self.anchor == ():
            return jax.tree.map(lambda by, p: -by.astype(p.dtype), self.offset.own(), params)
        return jax.tree.map(
            lambda by, base, p: ((p - base) - by).astype(p.dtype),
            self.offset.own(),
            self.anchor,
            params,
        )


@kinds.MEANS.register
class LocalUpdatesState(NamedTuple):
    """State of `local_updates`.

    Attributes:
        taken: the number of steps, up to 2³¹ − 1.
        waited: the number of steps of the current round.
        period: the state of the period.
        inner: each worker's state of the inner optimizer.
        skipped: how many steps each worker left out, because they were not finite.
        fragments: the state of each fragment.
        shared: the state of the inner optimizer in the synchronous steps, or `()`.
    """

    taken: Array
    waited: Array
    period: Any
    inner: PerWorker
    skipped: PerWorker
    fragments: tuple[FragmentState, ...]
    shared: Any = ()


class Setup(NamedTuple):
    """The arguments of `local_updates`, checked."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformationExtraArgs
    axis_name: AxisName
    period: Period
    reducer: Any
    keep_inner: bool
    local_steps: tuple[int, ...] | None
    synchronous: int
    fragments: fragments_.Fragments
    delay: int
    mix: float
    settings: dict[str, Any]
    seed: Any
    param_specs: PyTree


def schedule(setup: Setup, number: int) -> list[tuple[int, int]]:
    """The steps of a round, counted from 1, in which each fragment is taken, and moves the centre.

    Raises:
        ValueError: if fragments and delay do not fit the period.
    """
    period = setup.period
    if number == 1 and not setup.delay:
        return []
    if not isinstance(period, Constant):
        raise ValueError(
            f"`every` must be a number for fragments={number} and delay={setup.delay}, which "
            f"divide a round, got {period!r}"
        )
    apart, rest = divmod(period.k, number)
    if rest:
        raise ValueError(
            f"`every` must be a multiple of the {number} fragments, got {period.k}; use "
            f"{max(apart, 1) * number} or {(apart + 1) * number}"
        )
    if setup.delay >= apart:
        raise ValueError(
            f"`delay` must be below {apart}, the steps from one fragment to the next "
            f"(every={period.k}, fragments={number}), got {setup.delay}"
        )
    ends = [apart * (fragment + 1) for fragment in range(number)]
    return [(end - setup.delay, end) for end in ends]


def means(setup: Setup, params: PyTree) -> list[optax.GradientTransformationExtraArgs]:
    """The compressed mean of each fragment."""
    number = fragments_.count(setup.fragments, params)
    if isinstance(setup.reducer, optax.GradientTransformation):
        return [optax.with_extra_args_support(setup.reducer)] * number
    specs: list[Any] = [setup.param_specs] * number
    if setup.param_specs is not None and number > 1:
        whole = sharded.spread(setup.param_specs, params)
        specs = list(fragments_.split(setup.fragments, params, whole))
    return [
        compressed_mean(
            setup.reducer,
            setup.axis_name,
            key=noise.fold(jnp.asarray(setup.seed), fragment) if fragment else setup.seed,
            param_specs=spec,
            **setup.settings,
        )
        for fragment, spec in enumerate(specs)
    ]


def alone(
    setup: Setup, grads: PyTree, state: LocalUpdatesState, params: PyTree, extra: dict[str, Any]
) -> LocalUpdatesState:
    """One step of this worker alone."""
    axis_name = setup.axis_name
    parts = fragments_.split(setup.fragments, params, params)
    pairs = list(zip(state.fragments, parts, strict=True))
    own = fragments_.merged(tuple(fragment.here(part) for fragment, part in pairs))
    offset = fragments_.merged(tuple(fragment.offset.own() for fragment in state.fragments))
    before, skipped = state.inner.own(), state.skipped.own()
    if not setup.keep_inner:
        before = guarding.kept(state.waited > 0, before, setup.inner.init(own))
    moved, inner, lost = stepped(
        setup.inner, grads, before, own, offset, extra, guard=setup.settings["guard"]
    )
    skipped = skipped + lost
    if setup.local_steps is not None:
        takes = state.waited < _own_number(setup.local_steps, axis_name)
        moved, inner = guarding.kept(takes, (moved, inner), (offset, before))
        skipped = jnp.where(takes, skipped, state.skipped.own())
    offsets = fragments_.split(setup.fragments, params, moved)
    return state._replace(
        taken=jnp.minimum(state.taken, _LAST) + 1,
        waited=state.waited + 1,
        inner=PerWorker.wrap(inner, "local", axis_name),
        skipped=PerWorker.wrap(skipped, "local", axis_name),
        fragments=tuple(
            fragment._replace(offset=PerWorker.wrap(each, "offset", axis_name))
            for fragment, each in zip(state.fragments, offsets, strict=True)
        ),
    )


def stepped(
    inner: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    before: PyTree,
    own: PyTree,
    offset: PyTree,
    extra: dict[str, Any],
    *,
    guard: bool,
) -> tuple[PyTree, PyTree, Array]:
    """A step of the inner optimizer: the next offset and state, and one for a step left out.

    Args:
        inner: the optimizer.
        grads: this worker's gradients.
        before: the optimizer's state.
        own: this worker's parameters.
        offset: these minus the centre.
        extra: further arguments for the optimizer.
        guard: leave out a step that is not finite.
    """

    def step(grads: PyTree, state: PyTree, own: PyTree, offset: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = inner.update(grads, state, own, **extra)
        return jax.tree.map(lambda by, u: by + u.astype(by.dtype), offset, updates), state

    # Separately, so that a round as one program and step by step rounds alike.
    moved, after = xla.compile_separately(step)(grads, before, own, offset)
    if not guard:
        return moved, after, jnp.zeros((), jnp.int32)
    sound = guarding.all_finite(moved) & guarding.none_lost(after, before)
    moved, after = guarding.kept(sound, (moved, after), (offset, before))
    return moved, after, jnp.where(sound, 0, 1)


def _own_number(numbers: tuple[int, ...], axis_name: AxisName) -> Array:
    """This worker's entry of a tuple."""
    if len(numbers) != axes.size(axis_name):
        raise ValueError(
            f"`local_steps` must be a number for each of the {axes.size(axis_name)} workers of "
            f"{axis_name!r}, got {len(numbers)}"
        )
    return jnp.asarray(numbers, jnp.int32)[lax.axis_index(axis_name)]


def exchanged(
    setup: Setup, state: LocalUpdatesState, params: PyTree, exchange: bool | None
) -> tuple[PyTree, LocalUpdatesState]:
    """The exchanges that are due after this step, and the update of the centre."""
    axis_name = setup.axis_name
    parts = fragments_.split(setup.fragments, params, params)
    times = schedule(setup, len(parts))
    length = setup.period.steps(state.period, state.taken - state.waited)
    ends: Any = conditional.uniform(state.waited >= length, axis_name)
    if exchange is False or (exchange and not times):
        ends = exchange
    updates, found, variance = [], [], jnp.zeros((), jnp.float32)
    averages = means(setup, params)
    for number, (fragment, part) in enumerate(zip(state.fragments, parts, strict=True)):
        taken = moves = ends
        if times and exchange is not False:
            taken, moves = (
                conditional.uniform(state.waited == step, axis_name) for step in times[number]
            )
        update, after, variance = _moved(setup, averages[number], fragment, part, taken, moves)
        updates.append(update)
        found.append(after)
    # A variance that is not finite says nothing about the period.
    known = ends & jnp.isfinite(variance)
    period = setup.period.after(state.period, state.taken, variance)
    return fragments_.merged(tuple(updates)), state._replace(
        waited=jnp.where(ends, 0, state.waited),
        period=guarding.kept(known, period, state.period),
        fragments=tuple(found),
    )


def _moved(
    setup: Setup, mean: Any, fragment: FragmentState, params: PyTree, taken: Any, moves: Any
) -> tuple[PyTree, FragmentState, Array]:
    """A fragment's update, its state, and the variance of the models.

    Args:
        setup: the arguments.
        mean: the compressed mean.
        fragment: its state.
        params: its leaves of the centre.
        taken: whether its pseudo-gradient is taken and averaged.
        moves: whether its mean moves the centre.
    """

    def talk(offset: PerWorker, state: Any, params: PyTree) -> tuple[PyTree, Any, Array]:
        delta = fragment._replace(offset=offset).moved(params)
        made, after = mean.update(delta, state, params)
        if not setup.period.measures:
            return made, after, jnp.zeros((), jnp.float32)
        return made, after, _variance(delta, made, setup.axis_name)

    def move(
        made: PyTree, offset: PerWorker, outer: Any, params: PyTree
    ) -> tuple[PyTree, PerWorker, Any]:
        step = xla.compile_separately(functools.partial(outer_step, setup))
        update, own, outer = step(made, offset.own(), outer, params)
        return update, PerWorker.wrap(own, "offset", setup.axis_name), outer

    def both(
        offset: PerWorker, state: Any, outer: Any, params: PyTree
    ) -> tuple[PyTree, PerWorker, Any, Any, Array]:
        made, state, variance = talk(offset, state, params)
        update, offset, outer = move(made, offset, outer, params)
        return update, offset, state, outer, variance

    nothing, none = jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)
    offset, outer, held = fragment.offset, fragment.outer, fragment.pending
    memory = branches.fitted(mean, fragment.mean, nothing, params)
    if not setup.delay:

        def rest(offset: PerWorker, state: Any, outer: Any, params: PyTree) -> tuple:
            return jax.tree.map(jnp.zeros_like, params), offset, state, outer, none

        update, offset, memory, outer, variance = _when(
            moves, both, rest, offset, memory, outer, params
        )
    else:

        def wait(offset: PerWorker, state: Any, params: PyTree) -> tuple:
            return held, state, none

        def stay(made: PyTree, offset: PerWorker, outer: Any, params: PyTree) -> tuple:
            return nothing, offset, outer

        held, memory, variance = _when(taken, talk, wait, offset, memory, params)
        update, offset, outer = _when(moves, move, stay, held, offset, outer, params)
    after = FragmentState(offset, memory, outer, held, fragment.anchor)
    return update, after, variance


def outer_step(
    setup: Setup, mean: PyTree, offset: PyTree, outer: Any, params: PyTree
) -> tuple[PyTree, PyTree, Any]:
    """The centre's update, and this worker's offset from `mix · θ + (1 − mix) · φ`."""
    update, outer = setup.outer.update(mean, outer, params)
    update = jax.tree.map(lambda u, p: u.astype(p.dtype), update, params)
    if setup.mix == 0:
        return update, jax.tree.map(jnp.zeros_like, offset), outer
    if setup.mix == 1:
        return update, offset, outer  # From the anchor, which does not move.

    def mixed(by: Array, u: Array) -> Array:
        return jnp.asarray(setup.mix, by.dtype) * (by - u.astype(by.dtype))

    return update, jax.tree.map(mixed, offset, update), outer


def _when(go: Any, do: Callable[..., Any], rest: Callable[..., Any], *args: Any) -> Any:
    """`do(*args)` if `go`, else `rest(*args)`; without a conditional if `go` is a Python bool."""
    if isinstance(go, bool):
        return do(*args) if go else rest(*args)
    return conditional.either(go, do, rest, *args)


def _variance(delta: PyTree, mean: PyTree, axis_name: AxisName) -> Array:
    """The workers' mean of `‖Δᵢ − mean‖²`."""
    parts = jax.tree.leaves(jax.tree.map(jnp.subtract, delta, mean))
    own = sum(jnp.sum(jnp.square(part.astype(jnp.float32))) for part in parts)
    (found,) = Dense().dense((jnp.asarray(own, jnp.float32),), axis_name, None)
    return found


def together(
    setup: Setup, grads: PyTree, state: LocalUpdatesState, params: PyTree, extra: dict[str, Any]
) -> tuple[PyTree, LocalUpdatesState]:
    """A synchronous step: the inner optimizer sees the mean gradient, and moves the centre."""
    mean: Any = compressed_mean(Dense(), setup.axis_name)
    averaged, _ = mean.update(grads, mean.init(grads), params)
    update, shared = setup.inner.update(averaged, state.shared, params, **extra)
    return jax.tree.map(lambda u, p: u.astype(p.dtype), update, params), state._replace(
        taken=jnp.minimum(state.taken, _LAST) + 1,
        inner=PerWorker.wrap(shared, "local", setup.axis_name),
        shared=shared,
    )

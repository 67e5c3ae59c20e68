"""The state of `local_updates`, and the steps that a worker takes alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.backend import axes, xla
from jaxcomp.base import Period
from jaxcomp.exchange import guarding
from jaxcomp.gates.periods import Constant
from jaxcomp.mesh import kinds, specs as specs_
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.transforms import fragments as fragments_, remainder
from jaxcomp.transforms.mean import compressed_mean
from jaxcomp.types import Array, AxisName, PyTree

LAST = 2**31 - 2
"""The largest number of steps but one, which is where they stop being counted."""


@kinds.DISPLACED.register
class FragmentState(NamedTuple):
    """State of a fragment: leaves that are exchanged together, and None in place of all others.

    Attributes:
        offset: each worker's parameters minus the centre, at least in float32.
        mean: the state of the compressed mean.
        outer: the state of the outer optimizer, at least in float32.
        lost: how many exchanges each worker has lost, because they were not finite.
        rest: what the centre's dtype cannot hold of it; None for leaves of 32 bits or more.
        pending: the mean that waits for its delay, or `()`.
        anchor: what `offset` is added to, where no exchange moves a worker; else `()`, for the
            centre.
    """

    offset: PerWorker
    mean: Any
    outer: Any
    lost: PerWorker
    rest: Any
    pending: Any = ()
    anchor: Any = ()

    def here(self, params: PyTree) -> PyTree:
        """This worker's parameters, for the centre `params`; None for other fragments' leaves."""

        def own(by: Array | None, base: Array, p: Array) -> Array | None:
            return None if by is None else (base.astype(by.dtype) + by).astype(p.dtype)

        base = remainder.exact(params, self.rest) if self.anchor == () else self.anchor
        return jax.tree.map(own, self.offset.own(), base, params, is_leaf=lambda x: x is None)

    def moved(self, params: PyTree) -> PyTree:
        """The pseudo-gradient: the centre minus this worker's parameters."""
        return jax.tree.map(
            lambda by, at, p: (at.astype(by.dtype) - by).astype(p.dtype),
            self.offset.own(),
            self.center(params),
            params,
        )

    def center(self, params: PyTree) -> PyTree:
        """What the offset of a worker at the centre is."""
        if self.anchor == ():
            return jax.tree.map(jnp.zeros_like, self.offset.own())
        whole = remainder.exact(params, self.rest)
        return jax.tree.map(lambda p, base: p - base.astype(p.dtype), whole, self.anchor)


@kinds.MEANS.register
@kinds.STEPS.register
class LocalUpdatesState(NamedTuple):
    """State of `local_updates`.

    Attributes:
        taken: the number of steps, up to 2³¹ − 1.
        waited: the number of steps of the current round.
        left: the number of next steps in which no exchange is due.
        period: the state of the period.
        inner: each worker's state of the inner optimizer.
        skipped: how many steps each worker left out, because they were not finite, or because an
            exchange was due in them and `exchange=False` ruled it out.
        fragments: the state of each fragment.
        shared: the state of the inner optimizer in the synchronous steps, or `()`.
    """

    taken: Array
    waited: Array
    left: Array
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


class RoundOf(NamedTuple):
    """What `local_round` gives a step in place of `exchange`.

    Attributes:
        steps: the number of steps of the round.
        last: whether this is the last one.
    """

    steps: int
    last: bool

    def resolved(self, setup: Setup, number: int) -> bool | None:
        """`exchange` of this step of a model in so many fragments.

        Raises:
            ValueError: if rounds of the transformation have another number of steps.
        """
        period = setup.period
        if schedule(setup, number) or setup.synchronous or not isinstance(period, Constant):
            return None
        if period.k != self.steps:
            raise ValueError(
                f"`batches` must have a leading axis of every={period.k} steps, got {self.steps}; "
                "take a part of a round step by step"
            )
        return self.last


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


def left(setup: Setup, number: int, state: LocalUpdatesState) -> Array:
    """How many next steps, of a model in so many fragments, have no exchange."""
    times = schedule(setup, number)
    if times:
        ends = jnp.asarray(sorted({end for pair in times for end in pair}), jnp.int32)
        after = jnp.where(ends > state.waited, ends, LAST).min()
    else:
        after = setup.period.steps(state.period, state.taken - state.waited)
    found = jnp.maximum(after - state.waited - 1, 0)
    return jnp.where(state.taken < setup.synchronous, 0, found) if setup.synchronous else found


def means(setup: Setup, params: PyTree) -> list[optax.GradientTransformationExtraArgs]:
    """The compressed mean of each fragment."""
    number = fragments_.count(setup.fragments, params)
    if isinstance(setup.reducer, optax.GradientTransformation):
        return [optax.with_extra_args_support(setup.reducer)] * number
    specs: list[Any] = [setup.param_specs] * number
    if setup.param_specs is not None and number > 1:
        whole = specs_.spread("param_specs", setup.param_specs, params)
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
    setup: Setup,
    grads: PyTree,
    state: LocalUpdatesState,
    params: PyTree,
    extra: dict[str, Any],
    due: Array | None = None,
) -> LocalUpdatesState:
    """One step of this worker alone.

    Args:
        setup: the arguments of `local_updates`.
        grads: this worker's gradients.
        state: the state.
        params: the centre.
        extra: further arguments for the inner optimizer.
        due: whether an exchange is due in this step, whose program has none: then all workers leave
            the step out, and it is due in the next one.
    """
    axis_name = setup.axis_name
    parts = fragments_.split(setup.fragments, params, params)
    pairs = list(zip(state.fragments, parts, strict=True))
    own = fragments_.merged(tuple(fragment.here(part) for fragment, part in pairs))
    offset = fragments_.merged(tuple(fragment.offset.own() for fragment in state.fragments))
    before, skipped = state.inner.own(), state.skipped.own()
    if not setup.keep_inner:
        fresh = _anew(setup.inner.init(own), state.taken)
        before = guarding.where_finite(state.waited > 0, before, fresh)
    moved, inner, lost = stepped(
        setup.inner, grads, before, own, offset, extra, guard=setup.settings["guard"]
    )
    skipped = skipped + lost
    if setup.local_steps is not None:
        takes = state.waited < _own_number(setup.local_steps, axis_name)
        moved, inner = guarding.where_finite(takes, (moved, inner), (offset, before))
        skipped = jnp.where(takes, skipped, state.skipped.own())
    if due is not None:
        moved, inner = guarding.where_finite(due, (offset, before), (moved, inner))
        skipped = jnp.where(due, state.skipped.own() + 1, skipped)
    one = 1 if due is None else jnp.where(due, 0, 1)
    offsets = fragments_.split(setup.fragments, params, moved)
    return state._replace(
        taken=jnp.minimum(state.taken, LAST) + one,
        waited=state.waited + one,
        inner=PerWorker.wrap(inner, "local", axis_name),
        skipped=PerWorker.wrap(skipped, "local", axis_name),
        fragments=tuple(
            fragment._replace(offset=PerWorker.wrap(each, "offset", axis_name))
            for fragment, each in zip(state.fragments, offsets, strict=True)
        ),
    )


def _anew(inner: PyTree, taken: Array) -> PyTree:
    """A new state of the inner optimizer, whose schedules go on where the last round left them."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    def counted(node: Any) -> Any:
        return node._replace(count=taken.astype(node.count.dtype)) if is_schedule(node) else node

    return jax.tree.map(counted, inner, is_leaf=is_schedule)


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
    moved, after = guarding.where_finite(sound, (moved, after), (offset, before))
    return moved, after, jnp.where(sound, 0, 1)


def _own_number(numbers: tuple[int, ...], axis_name: AxisName) -> Array:
    """This worker's entry of a tuple."""
    if len(numbers) != axes.size(axis_name):
        raise ValueError(
            f"`local_steps` must be a number for each of the {axes.size(axis_name)} workers of "
            f"{axis_name!r}, got {len(numbers)}"
        )
    return jnp.asarray(numbers, jnp.int32)[lax.axis_index(axis_name)]

"""The state of `local_updates`, and the steps that a worker takes alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.backend import axes
from jaxcomp.base import Period
from jaxcomp.exchange import guarding
from jaxcomp.gates.periods import Constant
from jaxcomp.mesh import kinds, specs as specs_
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.transforms import fragments as fragments_, mean as mean_, remainder, worker_round
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
        base = remainder.exact(params, self.rest) if self.anchor == () else self.anchor
        return worker_round.here(base, self.offset.own(), params)

    def delta(self, params: PyTree) -> PyTree:
        """The pseudo-gradient: the centre minus this worker's parameters."""
        return worker_round.delta(self.offset.own(), params, self.center(params))

    def center(self, params: PyTree) -> PyTree:
        """The offset of a worker at the centre."""
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
    mean: "mean_.Setup | optax.GradientTransformationExtraArgs"
    keep_inner: bool
    local_steps: tuple[int, ...] | None
    synchronous: int
    fragments: fragments_.Fragments
    delay: int
    mix: float
    guard: bool
    seed: Any
    param_specs: PyTree


class RoundOf(NamedTuple):
    """A step of `local_round`, which gives it this in place of `exchange`.

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
    """The mean of each fragment's pseudo-gradients, which are checked as gradients of the step."""
    number, mean = fragments_.count(setup.fragments, params), setup.mean
    if isinstance(mean, optax.GradientTransformation):
        return [mean] * number
    specs: list[Any] = [setup.param_specs] * number
    if setup.param_specs is not None and number > 1:
        whole = specs_.spread("param_specs", setup.param_specs, params)
        specs = list(fragments_.split(setup.fragments, params, whole))
    seeds = [mean.seed, *(noise.fold(jnp.asarray(mean.seed), n) for n in range(1, number))]
    return [
        mean_.transformation(mean._replace(seed=seed), spec, trusted=True)
        for seed, spec in zip(seeds, specs, strict=True)
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
    own = fragments_.merge(tuple(fragment.here(part) for fragment, part in pairs))
    offset = fragments_.merge(tuple(fragment.offset.own() for fragment in state.fragments))
    before = state.inner.own()
    if not setup.keep_inner:
        fresh = _anew(setup.inner.init(own), state.taken)
        before = guarding.where_finite(state.waited > 0, before, fresh)
    takes = counts = None
    if setup.local_steps is not None:
        takes = counts = state.waited < _own_number(setup.local_steps, axis_name)
    if due is not None:
        takes = ~due if takes is None else takes & ~due
        counts = None if counts is None else counts | due
    moved, inner, taken = worker_round.step(
        setup.inner, grads, before, own, offset, takes=takes, guard=setup.guard, extra=extra
    )
    # Steps that a worker stalls by its number of them are not skipped ones.
    skips = ~taken if counts is None else counts & ~taken
    skipped = state.skipped.own() + jnp.where(skips, 1, 0)
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


def _own_number(numbers: tuple[int, ...], axis_name: AxisName) -> Array:
    """This worker's entry of a tuple."""
    if len(numbers) != axes.size(axis_name):
        raise ValueError(
            f"`local_steps` must be a number for each of the {axes.size(axis_name)} workers of "
            f"{axis_name!r}, got {len(numbers)}"
        )
    return jnp.asarray(numbers, jnp.int32)[lax.axis_index(axis_name)]

"""The one path of every gradient through any reducer: feedback, uplink, downlink."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import axes, conditional
from jaxcomp.base import Feedback, Gate, Opened, Reducer
from jaxcomp.feedback import NoFeedback
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker
from jaxcomp.reducers import accounting, gating, guarding, state as state_
from jaxcomp.reducers.gating import Participation
from jaxcomp.reducers.state import ReductionState
from jaxcomp.types import Array, AxisName, Batches, PyTree, Stacks


class Reduction(NamedTuple):
    """A mean, the memory for the next step, and what the step's statistics need.

    Attributes:
        mean: of the gradients.
        state: for the next step.
        given: the links' input, made of this worker's gradient.
        message: what the links sent in place of it.
        sent: this worker's message as the others decoded it.
        participation: who sent, under a gate.
        gate: the gate's state for the next step.
    """

    mean: PyTree
    state: ReductionState
    given: Stacks
    message: Stacks
    sent: Stacks
    participation: Participation | None = None
    gate: PyTree = ()


class _Memory(NamedTuple):
    """What an exchange goes on from, without the workers' axis."""

    feedback: PyTree
    aside: PyTree
    reducer: PyTree


class _Exchange(NamedTuple):
    """The arguments of an exchange that are arrays."""

    key: Array
    message: Stacks
    dense: Stacks
    memory: _Memory
    weight: Array | None
    counts: Array | None


class _Heard(NamedTuple):
    """The result of an exchange, or of its absence."""

    means: Stacks
    dense: Stacks
    memory: _Memory
    sent: Stacks
    senders: Array


class _Settings(NamedTuple):
    """The arguments of an exchange that are settings."""

    reducer: Reducer
    feedback: Feedback
    aside: Feedback
    batches: Batches
    axis_name: AxisName
    times: float
    guard: bool
    gated: bool


def reduce(
    reducer: Reducer,
    key: Array,
    grads: PyTree,
    state: ReductionState,
    axis_name: AxisName,
    *,
    gate: Gate | None = None,
    gate_key: Array | None = None,
    gate_state: PyTree = (),
    params: PyTree | None = None,
    weight: Array | None = None,
    guard: bool = True,
    everywhere: tuple[str, ...] = (),
) -> Reduction:
    """stack → compensate → collect → the uplink's feedback on this device's part → spread.

    The mirror of a shift memory is thus added before the downlink.

    Under a gate the reducer runs in open rounds only. In a closed round nothing is sent, and the
    mean is the one that every device knows already: the mirror of all shifts, or else zero. The
    leaves that are sent dense have a memory under a gate too, since what a closed round holds back
    would be lost with them.

    With `guard`, a mean that is not finite leaves every memory and the gate's state as they were,
    alike on all workers, since all see the same mean; and alike over the axes `everywhere`, which
    have a part of it each. If the memory of one worker would not be finite, a leaf of the mean is
    made NaN on all workers. A non-finite message on a non-participating worker shows in no mean; it
    does not update that worker's memory.

    Args:
        reducer: how the links become one mean.
        key: the key of the step.
        grads: this worker's gradients.
        state: the memory.
        axis_name: the axes of the workers.
        gate: when, and which workers, communicate; None for all workers in every step.
        gate_key: the key that the gate draws from.
        gate_state: the gate's state.
        params: the parameters, for gates that look at them.
        weight: without a gate, this worker's weight; None for 1.
        guard: keep the memory of a step that is not finite as it was.
        everywhere: axes over which the mean is split.
    """
    layout = accounting.plan_here(reducer, grads, axis_name)
    batches, feedback = layout.batches, accounting.feedback_of(reducer)
    whole, reducer = reducer, reducer.resolve(batches, axes.sizes(axis_name))
    aside = NoFeedback() if gate is None else accounting.aside_of(reducer)
    state = state_.fitted(whole, batches, state, axis_name)
    before = per_worker.unwrap(state)
    own_state = whole.resolved_state(reducer, state.reducer)
    xs, dense = trees.stacks(layout, grads)
    xs = reducer.pre_reduce(batches, xs, axis_name)
    message, memory = feedback.compensate(xs, before.feedback)
    dense, beside = aside.compensate(tuple(dense), before.dense)
    links = reducer.link_axis(axis_name)
    opened = Opened(jnp.ones((), bool), weight, ())
    times, closes = 1.0, False
    if gate is not None:
        assert gate_key is not None
        opened = gate.open(gate_key, (message, dense), gate_state, links, params)
        inner = reducer.within(batches, axis_name)
        times = gating.factor(gate, reducer, inner, axes.size(links))
        closes = gating.closes(gate, reducer)
    settings = _Settings(
        reducer, feedback, aside, batches, axis_name, times, guard, gate is not None
    )
    counts = gating.counts(opened.weight, times)
    given = _Exchange(
        key, message, dense, _Memory(memory, beside, own_state), opened.weight, counts
    )
    if closes:
        go = conditional.uniform(opened.go, axis_name)
        heard = conditional.either(
            go, lambda own: _talk(settings, own), lambda own: _silent(settings, own), given
        )
    else:
        go, heard = jnp.ones((), bool), _talk(settings, given)
    means = reducer.post_reduce(batches, heard.means, axis_name)
    own, beside = heard.memory.feedback, heard.memory.aside
    participation = None
    if gate is not None:
        taken = go if opened.weight is None else go & (opened.weight != 0)
        participation = Participation(go, taken, heard.senders)
        if guard and not feedback.mirrors:  # With a mirror, who does not send keeps its memory.
            sound = participation.taken | guarding.all_finite((message, dense))
            old = (before.feedback, before.dense)
            own, beside = guarding.kept(sound, (own, beside), old)
    new = ReductionState(
        state_.hold(reducer, own, axis_name),
        whole.unresolved_state(reducer, heard.memory.reducer, state.reducer),
        () if gate is None else state_.hold_aside(reducer, beside, axis_name),
    )
    after = opened.state
    if guard and jax.tree.leaves((new, after)):  # Without memory there is nothing to guard.
        finite = guarding.all_finite((means, heard.dense))
        if everywhere:
            finite = lax.pmin(finite.astype(jnp.int32), everywhere) == 1
        new, after = guarding.kept(finite, (new, after), (state, gate_state))
    mean = trees.assemble(layout, means, heard.dense)
    return Reduction(mean, new, xs, message, heard.sent, participation, after)


def _talk(settings: _Settings, given: _Exchange) -> _Heard:
    """An open round."""
    reducer, feedback, aside, batches, axis_name, times, guard, gated = settings
    key, message, dense, memory, weight, counts = given
    part, sent, share, after = reducer.collect(
        key, batches, message, memory.reducer, axis_name, weight
    )
    part, share = gating.scaled(part, times), share * times
    estimate, own = feedback.update(message, sent, part, share, counts, memory.feedback)
    if gating.forgets(feedback) and weight is not None:
        known = reducer.dense(memory.feedback.own, axis_name, weight)
        estimate = jax.tree.map(jnp.add, part, gating.scaled(tuple(known), times))
    means, after = reducer.spread(key, batches, estimate, after, axis_name)
    tells = guard and accounting.tells(reducer, batches)
    flag = None
    if tells and weight is None:  # With the dense leaves, so that it is no collective more.
        *known, flag = reducer.dense((*dense, guarding.unsound(own)), axis_name, weight)
    else:
        known = reducer.dense(dense, axis_name, weight)
        flag = guarding.told(own, axis_name) if tells else None
    part = gating.scaled(tuple(known), times)
    arrived = _as_sent(reducer, dense)
    known, beside = aside.update(dense, arrived, part, share, counts, memory.aside)
    if flag is not None:
        means, known = guarding.spoilt((means, known), flag)
    senders = jnp.zeros((), jnp.uint32)  # Counted in open rounds only: it takes a collective.
    if gated:
        senders = gating.senders(weight, reducer.link_axis(axis_name))
    return _Heard(tuple(means), tuple(known), _Memory(own, beside, after), tuple(sent), senders)


def _silent(settings: _Settings, given: _Exchange) -> _Heard:
    """A closed round: what every device knows without a message."""
    reducer, feedback, aside, batches, axis_name, *_ = settings
    message, dense, memory = given.message, given.dense, given.memory
    nothing, none = jnp.zeros((), jnp.float32), _zeros(message)
    part = _zeros(reducer.part_like(batches, axis_name))
    estimate, own = feedback.update(message, none, part, 0.0, nothing, memory.feedback)
    if feedback.mirrors and not gating.forgets(feedback):
        means = reducer.unchanged(batches, estimate, memory.reducer, axis_name)
    else:
        means = _zeros([batch.like for batch in reducer.within(batches, axis_name)])
    still, beside = aside.update(dense, _zeros(dense), _zeros(dense), 0.0, nothing, memory.aside)
    after = _Memory(own, beside, memory.reducer)
    return _Heard(tuple(means), tuple(still), after, none, jnp.zeros((), jnp.uint32))


def _as_sent(reducer: Reducer, dense: Stacks) -> Stacks:
    """Dense leaves as the others get them: rounded to the dtype that they travel in."""
    narrow = accounting.dense_dtype(reducer)
    return tuple(x.astype(narrow or x.dtype).astype(x.dtype) for x in dense)


def _zeros(likes: Sequence[Any]) -> Stacks:
    return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)

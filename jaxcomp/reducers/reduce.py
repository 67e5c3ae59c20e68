"""The one path of every gradient through any reducer: prepare, exchange, finish."""

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
from jaxcomp.types import Array, AxisName, PyTree, Stacks


class Reduction(NamedTuple):
    """A mean, the memory for the next step, and what the step's statistics need.

    Attributes:
        mean: the mean of the gradients.
        state: the memory for the next step.
        given: the links' input, made from this worker's gradient.
        message: the message that the links sent in place of it.
        sent: this worker's message as the others decoded it.
        participation: the participation under a gate.
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
    """The memory at the start of an exchange, without the workers' axis."""

    feedback: PyTree
    dense: PyTree
    reducer: PyTree


class _Exchange(NamedTuple):
    """The arrays of an exchange."""

    key: Array
    message: Stacks
    dense: Stacks
    memory: _Memory
    weight: Array | None


class _Heard(NamedTuple):
    """The result of an exchange, or of a closed round."""

    means: Stacks
    dense: Stacks
    memory: _Memory
    sent: Stacks
    senders: Array


class Settings(NamedTuple):
    """The static part of a reduction.

    Attributes:
        reducer: the given reducer.
        resolved: the reducer that reduces these batches over these workers.
        axis_name: the axes of the workers.
        gate: decides when, and which workers, communicate; None for all workers in every step.
        guard: keep the memory unchanged in a non-finite step.
        everywhere: axes over which the mean is split.
    """

    reducer: Reducer
    resolved: Reducer
    axis_name: AxisName
    gate: Gate | None
    guard: bool
    everywhere: tuple[str, ...]

    @property
    def feedback(self) -> Feedback:
        """The feedback of the compressed leaves."""
        return accounting.feedback_of(self.resolved)

    @property
    def dense_feedback(self) -> Feedback:
        """The feedback of the dense leaves, which have memory only under a gate."""
        return NoFeedback() if self.gate is None else accounting.dense_feedback_of(self.resolved)


class Prepared(NamedTuple):
    """A reduction before its exchange.

    Attributes:
        settings: the static part.
        layout: the plan: the batches of the leaves.
        factor: the factor on the sum of the messages, under a gate.
        state: the memory before the step.
        given: the links' input, made from this worker's gradient.
        opened: the gate's answer.
        gate_state: the gate's state before the step.
        exchange: the arrays of the exchange.
    """

    settings: Settings
    layout: trees.Layout
    factor: float
    state: ReductionState
    given: Stacks
    opened: Opened
    gate_state: PyTree
    exchange: _Exchange


def reduce(
    reducer: Reducer,
    key: Array,
    grads: PyTree,
    state: ReductionState,
    axis_name: AxisName,
    *,
    weight: Array | None = None,
) -> Reduction:
    """`finish(prepared, exchange(prepared))` of `prepare` with these arguments."""
    prepared = prepare(reducer, key, grads, state, axis_name, weight=weight)
    return finish(prepared, exchange(prepared))


def prepare(
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
) -> Prepared:
    """Computes the messages, and whether the gate opens: stack → compensate → open.

    Args:
        reducer: the reducer.
        key: the key of the step.
        grads: this worker's gradients.
        state: the memory.
        axis_name: the axes of the workers.
        gate: decides when, and which workers, communicate; None for all workers in every step.
        gate_key: the gate's random key.
        gate_state: the gate's state.
        params: the parameters, for gates that use them.
        weight: this worker's weight if there is no gate; None for 1.
        guard: keep the memory unchanged in a non-finite step.
        everywhere: axes over which the mean is split.
    """
    layout = accounting.plan_here(reducer, grads, axis_name)
    batches = layout.batches
    resolved = reducer.resolve(batches, axes.sizes(axis_name))
    settings = Settings(reducer, resolved, axis_name, gate, guard, everywhere)
    state = state_.fitted(reducer, batches, state, axis_name)
    before = per_worker.unwrap(state)
    xs, dense = trees.stacks(layout, grads)
    xs = resolved.pre_reduce(batches, xs, axis_name)
    message, memory = settings.feedback.compensate(xs, before.feedback)
    dense, dense_memory = settings.dense_feedback.compensate(tuple(dense), before.dense)
    opened, factor = Opened(jnp.ones((), bool), weight, ()), 1.0
    if gate is not None:
        assert gate_key is not None
        links = resolved.link_axis(axis_name)
        opened = gate.open(gate_key, (message, dense), gate_state, links, params)
        closes = gating.closes(gate, resolved)
        go = conditional.uniform(opened.go, axis_name) if closes else jnp.ones((), bool)
        opened = opened._replace(go=go)
        factor = gating.factor(gate, resolved, axes.size(links))
    own = _Memory(memory, dense_memory, reducer.resolved_state(resolved, state.reducer))
    arrays = _Exchange(key, message, dense, own, opened.weight)
    return Prepared(settings, layout, factor, state, xs, opened, gate_state, arrays)


def exchange(prepared: Prepared, *, opened: bool = False) -> _Heard:
    """Communicates in an open round: collect → feedback on this device's part → spread.

    The mirror of a shift is thus added before the downlink. In a closed round nothing is sent, and
    the mean is already known to every device: the mirror of all shifts, or zero. Under a gate dense
    leaves have memory too; otherwise their gradients of closed rounds would be lost.

    Args:
        prepared: the reduction.
        opened: True if the round is known to be open.
    """
    (_, reducer, axis_name, gate, guard, _), layout, times, *_ = prepared
    feedback, batches = prepared.settings.feedback, layout.batches
    dense_feedback = prepared.settings.dense_feedback
    if not opened and gate is not None and gating.closes(gate, reducer):
        return conditional.either(
            prepared.opened.go,
            lambda own: exchange(prepared._replace(exchange=own), opened=True),
            lambda own: _silent(prepared._replace(exchange=own)),
            prepared.exchange,
        )
    key, message, dense, memory, weight = prepared.exchange
    part, sent, share, after = reducer.collect(
        key, batches, message, memory.reducer, axis_name, weight
    )
    estimate, own = gating.remember(
        feedback, times, message, sent, part, share, weight, memory.feedback
    )
    if gating.forgets(feedback) and weight is not None:
        known = reducer.dense(memory.feedback.own, axis_name, weight)
        estimate = gating.scaled(jax.tree.map(jnp.add, part, tuple(known)), times)
    means, after = reducer.spread(key, batches, estimate, after, axis_name)
    tells, flag = guard and accounting.tells(reducer, batches), None
    if tells and weight is None:  # Sent with the dense leaves, so that it adds no collective.
        *known, flag = reducer.dense((*dense, guarding.unsound(own)), axis_name, weight)
    else:
        known = reducer.dense(dense, axis_name, weight)
        flag = guarding.told(own, axis_name) if tells else None
    arrived = _as_sent(reducer, dense)
    known, dense_memory = gating.remember(
        dense_feedback, times, dense, arrived, tuple(known), share, weight, memory.dense
    )
    if flag is not None:
        means, known = guarding.spoilt((means, known), flag)
    senders = jnp.zeros((), jnp.uint32)  # Counted only in open rounds, since it needs a collective.
    if gate is not None:
        senders = gating.senders(weight, reducer.link_axis(axis_name))
    return _Heard(
        tuple(means), tuple(known), _Memory(own, dense_memory, after), tuple(sent), senders
    )


def finish(prepared: Prepared, heard: _Heard, *, tell: bool = False) -> Reduction:
    """Returns the mean as a tree, and the memory for the next step.

    With `guard`, a non-finite mean leaves all memory and the gate's state unchanged on all workers,
    because all see the same mean; the same holds over the axes `everywhere`, whose devices have a
    part of the mean each. If the memory of one worker would not be finite, a leaf of the mean is
    set to NaN on all workers. A non-finite message on a non-participating worker does not affect
    the mean, and does not update that worker's memory; so it is with every worker under a reducer
    that excludes such messages.

    Args:
        prepared: the reduction.
        heard: the result of the exchange.
        tell: set a leaf of a non-finite mean to NaN, which no later function makes finite.
    """
    (reducer, resolved, axis_name, gate, guard, everywhere), layout, *_ = prepared
    _, _, _, state, given, opened, gate_state, arrays = prepared
    feedback = prepared.settings.feedback
    means = resolved.post_reduce(layout.batches, heard.means, axis_name)
    own, dense_memory = heard.memory.feedback, heard.memory.dense
    participation, needed = None, jnp.zeros((), bool)
    if gate is not None:
        taken = opened.go if opened.weight is None else opened.go & (opened.weight != 0)
        participation = Participation(opened.go, taken, heard.senders)
        needed = taken & (not resolved.excludes)
    alone = gate is not None or resolved.excludes
    # With a mirror, silent workers keep their memory.
    if alone and guard and not feedback.mirrors and jax.tree.leaves((own, dense_memory)):
        before = per_worker.unwrap(state)
        given_away = (arrays.message, arrays.dense, heard.sent if resolved.excludes else ())
        sound = needed | guarding.all_finite(given_away)
        kept = before.feedback, before.dense
        own, dense_memory = guarding.where_finite(sound, (own, dense_memory), kept)
    new = ReductionState(
        state_.hold(resolved, own, axis_name),
        reducer.unresolved_state(resolved, heard.memory.reducer, state.reducer),
        () if gate is None else state_.hold_dense_memory(resolved, dense_memory, axis_name),
    )
    # A closed round, or gradients of another dtype than the parameters, change no dtype of a state.
    new, after = guarding.retyped((new, opened.state), (state, gate_state))
    known = heard.dense
    # Without memory there is nothing to guard; where means differ, so would the decisions.
    if guard and resolved.alike and jax.tree.leaves((new, after)):
        finite = guarding.all_finite((means, known))
        if everywhere:
            finite = lax.pmin(finite.astype(jnp.int32), everywhere) == 1
        new, after = guarding.where_finite(finite, (new, after), (state, gate_state))
        if tell:
            means, known = guarding.spoilt((means, known), jnp.where(finite, 0, jnp.nan))
    mean = trees.assemble(layout, means, known)
    return Reduction(mean, new, given, arrays.message, heard.sent, participation, after)


def _silent(prepared: Prepared) -> _Heard:
    """The result of a closed round: the mean that every device knows without a message."""
    (_, reducer, axis_name, *_), layout, *_ = prepared
    feedback, batches = prepared.settings.feedback, layout.batches
    dense_feedback = prepared.settings.dense_feedback
    message, dense, memory = prepared.exchange[1:4]
    nothing, none = jnp.zeros((), jnp.float32), _zeros(message)
    part = _zeros(reducer.part_like(batches, axis_name))
    estimate, own = feedback.update(message, none, part, 0.0, nothing, memory.feedback)
    if feedback.mirrors and not gating.forgets(feedback):
        means = reducer.unchanged(batches, estimate, memory.reducer, axis_name)
    else:
        means = _zeros([batch.like for batch in reducer.within(batches, axis_name)])
    nobody = _zeros(dense), _zeros(dense), 0.0, nothing
    still, dense_memory = dense_feedback.update(dense, *nobody, memory.dense)
    after = _Memory(own, dense_memory, memory.reducer)
    return _Heard(tuple(means), tuple(still), after, none, jnp.zeros((), jnp.uint32))


def _as_sent(reducer: Reducer, dense: Stacks) -> Stacks:
    """Dense leaves as the others receive them: rounded to the dtype in which they are sent."""
    narrow = accounting.dense_dtype(reducer)
    return tuple(x.astype(narrow or x.dtype).astype(x.dtype) for x in dense)


def _zeros(likes: Sequence[Any]) -> Stacks:
    return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)

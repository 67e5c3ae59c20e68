"""The one path of every gradient through any reducer: compensate, exchange, remember."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import conditional
from jaxcomp.base import Feedback, Gate, Opened
from jaxcomp.exchange import gating, guarding, levels, state as state_
from jaxcomp.exchange.gating import Participation
from jaxcomp.exchange.plan import Plan, dense_feedback_of
from jaxcomp.exchange.state import ReductionState
from jaxcomp.exchange.stepping import SteppedState, Stepper
from jaxcomp.feedback import NoFeedback
from jaxcomp.layout import trees
from jaxcomp.mesh import per_worker
from jaxcomp.numerics import summing
from jaxcomp.types import Array, PyTree, Stacks


class Gated(NamedTuple):
    """The gate of a reduction, and what it decides by.

    Attributes:
        gate: decides when, and which workers, communicate.
        key: its random key.
        state: its state.
        params: the parameters, for gates that use them.
    """

    gate: Gate
    key: Array
    state: PyTree = ()
    params: PyTree | None = None


class Stepping(NamedTuple):
    """An optimizer between the two ways, which makes updates of the mean.

    Attributes:
        stepper: the optimizer.
        params: this device's replica of the parameters.
        state: its state.
        extra: further arguments of its update.
    """

    stepper: Stepper
    params: PyTree
    state: PyTree
    extra: dict[str, Any]


class Reduction(NamedTuple):
    """A mean, the memory for the next step, and what the step's statistics need.

    Attributes:
        mean: the mean of the gradients; with an optimizer, the update of the parameters.
        state: the memory for the next step.
        given: the links' input, made from this worker's gradient.
        message: the message that the links sent in place of it.
        sent: this worker's message as the others decoded it.
        participation: the participation under a gate.
        gate: the gate's state for the next step.
        stepped: the optimizer's state for the next step.
    """

    mean: PyTree
    state: ReductionState
    given: Stacks
    message: Stacks
    sent: Stacks
    participation: Participation | None = None
    gate: PyTree = ()
    stepped: PyTree = ()


class _Feedbacks(NamedTuple):
    """The feedback of the compressed leaves, that of the dense leaves, and the gate's factor."""

    links: Feedback
    dense: Feedback
    factor: float


class _Memory(NamedTuple):
    """Memory in a step, without the workers' axis."""

    feedback: PyTree
    dense: PyTree
    reducer: PyTree
    stepped: PyTree = ()


class _Message(NamedTuple):
    """What a worker brings to an exchange."""

    key: Array
    links: Stacks
    dense: Stacks
    memory: _Memory
    weight: Array | None
    params: PyTree


class _Means(NamedTuple):
    """What an exchange makes of the means.

    Attributes:
        stepper: the optimizer between the two ways, or None.
        guard: whether non-finite memory makes them NaN.
        count: whether senders are counted.
        everywhere: the axes over which the mean is split.
        extra: further arguments of the optimizer.
    """

    stepper: Stepper | None
    guard: bool
    count: bool
    everywhere: tuple[str, ...]
    extra: dict[str, Any]


class _Heard(NamedTuple):
    """What an exchange, or a closed round, leaves on a worker."""

    mean: Stacks
    dense: Stacks
    memory: _Memory
    sent: Stacks
    senders: Array


def reduce(
    plan: Plan,
    key: Array,
    grads: PyTree,
    state: ReductionState,
    *,
    gated: Gated | None = None,
    stepping: Stepping | None = None,
    weight: Array | None = None,
    guard: bool = True,
    everywhere: tuple[str, ...] = (),
    tell: bool = False,
) -> Reduction:
    """The mean of all workers' gradients, and the memory for the next step.

    Args:
        plan: the plan of the reduction.
        key: the key of the step.
        grads: this worker's gradients.
        state: the memory.
        gated: the gate, or None for all workers in every step.
        stepping: the optimizer between the two ways of a reducer of parts, or None.
        weight: this worker's weight if there is no gate; None for 1.
        guard: keep the memory unchanged in a non-finite step.
        everywhere: axes over which the mean is split.
        tell: set a leaf of a non-finite mean to NaN, which no later function makes finite.

    Raises:
        ValueError: for a state of other gradients, workers or settings.
    """
    reducer, before = plan.reducer, per_worker.unwrap(state)
    state_.check(plan, state, gated=gated is not None)
    stacks, dense = trees.stacks(plan.layout, grads)
    given = levels.scattered(plan, stacks)
    # Under a gate dense leaves have memory too: closed rounds would lose their gradients.
    of_dense = NoFeedback() if gated is None else dense_feedback_of(plan.given)
    message, memory = plan.feedback.compensate(given, before.feedback)
    dense, dense_memory = of_dense.compensate(tuple(dense), before.dense)
    opened, factor, closes = Opened(jnp.ones((), bool), weight, ()), 1.0, False
    if gated is not None:
        gate, gate_key, gate_state, params = gated
        opened = gate.open(gate_key, (message, dense), gate_state, plan.axis, params)
        closes = gating.closes(gate, reducer)
        go = conditional.uniform(opened.go, plan.axis_name) if closes else jnp.ones((), bool)
        opened = opened._replace(go=go)
        factor = gating.factor(gate, reducer, plan.workers)
    feedbacks = _Feedbacks(plan.feedback, of_dense, factor)
    stepper, params, stepped, extra = (None, None, (), {}) if stepping is None else stepping
    own = _Memory(memory, dense_memory, state_.of_reducer(plan, state.reducer), stepped)
    brought = _Message(levels.key_of(plan, key), message, dense, own, opened.weight, params)
    means = _Means(stepper, guard, gated is not None, everywhere, extra)
    exchange = functools.partial(_exchanged, plan, feedbacks, means)
    silence = functools.partial(_unchanged, plan, feedbacks)
    either = functools.partial(conditional.either, opened.go, exchange, silence)
    heard = either(brought) if closes else exchange(brought)
    participation = None
    if gated is not None:
        taken = opened.go if opened.weight is None else opened.go & (opened.weight != 0)
        participation = Participation(opened.go, taken, heard.senders)
    mean, dense = levels.gathered(plan, heard.mean), heard.dense
    settled = heard.memory.stepped
    if stepper is not None:
        settled = stepper.settle(plan, mean, dense, params, settled)
    new = _kept(plan, brought, heard, before, participation, guard=guard)
    # A closed round, or gradients of another dtype than the parameters, change no dtype of a state.
    held = state, () if gated is None else gated.state, stepped
    after = guarding.retyped((new, opened.state, settled), held)
    # Skipped if the workers' means differ: they would disagree on the rollback.
    if guard and plan.given.facts.same_on_all and jax.tree.leaves(after):
        finite = guarding.all_finite((mean, dense))
        if everywhere:
            finite = lax.pmin(finite.astype(jnp.int32), everywhere) == 1
        after = guarding.where_finite(finite, after, held)
        if tell:
            mean, dense = guarding.spoilt((mean, dense), jnp.where(finite, 0, jnp.nan))
    whole = trees.assemble(plan.layout, mean, dense)
    return Reduction(whole, after[0], given, message, heard.sent, participation, *after[1:])


def _exchanged(plan: Plan, feedbacks: _Feedbacks, means: _Means, brought: _Message) -> _Heard:
    """An open round: collect, feedback on this device's part, the optimizer if any, spread.

    The mirror of a shift is thus added before the downlink.
    """
    reducer, (feedback, of_dense, times) = plan.reducer, feedbacks
    key, message, dense, memory, weight, params = brought
    guard, stepped = means.guard, memory.stepped
    part, sent, share, after = reducer.collect(plan, key, message, memory.reducer, weight)
    estimate, own = gating.remember(
        feedback, times, message, sent, part, share, weight, memory.feedback
    )
    if gating.forgets(feedback) and weight is not None:
        known = plan.dense_mean(memory.feedback.own, weight)
        estimate = gating.scaled(jax.tree.map(jnp.add, part, known), times)
    flag = None
    if guard and plan.tells and weight is None:
        # Sent with the dense leaves, so that it adds no collective.
        *known, flag = plan.dense_mean((*dense, guarding.unsound(own)))
    else:
        known = plan.dense_mean(dense, weight)
        flag = guarding.told(own, plan.axis_name) if guard and plan.tells else None
    # Dense leaves as the others receive them: rounded to the dtype in which they are sent.
    arrived = tuple(x.astype(plan.dense_dtype or x.dtype).astype(x.dtype) for x in dense)
    known, dense_memory = gating.remember(
        of_dense, times, dense, arrived, tuple(known), share, weight, memory.dense
    )
    if means.stepper is not None:
        estimate, known, stepped = means.stepper.step(
            plan, estimate, known, params, stepped, means.everywhere, means.extra
        )
    whole, after = reducer.spread(plan, key, estimate, after)
    if flag is not None:
        whole, known = guarding.spoilt((whole, known), flag)
    # Counted only in open rounds, since it needs a collective.
    senders = gating.senders(weight, plan.axis) if means.count else jnp.zeros((), jnp.uint32)
    new = _Memory(own, dense_memory, after, stepped)
    return _Heard(tuple(whole), tuple(known), new, tuple(sent), senders)


def _unchanged(plan: Plan, feedbacks: _Feedbacks, brought: _Message) -> _Heard:
    """A closed round, whose mean every device knows: the mirror of all shifts, or zero."""
    feedback, of_dense, _ = feedbacks
    message, dense, memory = brought.links, brought.dense, brought.memory
    nothing, none = jnp.zeros((), jnp.float32), _zeros(message)
    part = _zeros(plan.part_like)
    estimate, own = feedback.update(message, none, part, 0.0, nothing, memory.feedback)
    if feedback.facts.mirrors and not gating.forgets(feedback):
        means = plan.reducer.known(plan, estimate, memory.reducer)
    else:
        means = _zeros(plan.likes)
    nobody = _zeros(dense), _zeros(dense), 0.0, nothing
    still, dense_memory = of_dense.update(dense, *nobody, memory.dense)
    if isinstance(memory.stepped, SteppedState):  # Updates are wider than gradients.
        still = tuple(x.astype(summing.wide(x.dtype)) for x in still)
    after = _Memory(own, dense_memory, memory.reducer, memory.stepped)
    return _Heard(tuple(means), tuple(still), after, none, jnp.zeros((), jnp.uint32))


def _kept(
    plan: Plan,
    brought: _Message,
    heard: _Heard,
    before: ReductionState,
    participation: Participation | None,
    *,
    guard: bool,
) -> ReductionState:
    """The memory for the next step, as a state stores it.

    If the memory of one worker would not be finite, a leaf of the mean is NaN on all workers, and
    all keep the memory that they had. A non-finite message on a non-participating worker does not
    affect the mean, and does not update that worker's memory; so it is with every worker under a
    reducer that excludes such messages.
    """
    own, dense_memory = heard.memory.feedback, heard.memory.dense
    excludes = plan.given.facts.excludes
    # With a mirror, silent workers keep their memory.
    alone = (participation is not None or excludes) and not plan.feedback.facts.mirrors
    if guard and alone and jax.tree.leaves((own, dense_memory)):
        given_away = (brought.links, brought.dense, heard.sent if excludes else ())
        sound = guarding.all_finite(given_away)
        if participation is not None and not excludes:
            sound = participation.taken | sound
        kept = before.feedback, before.dense
        own, dense_memory = guarding.where_finite(sound, (own, dense_memory), kept)
    of_dense: Any = ()
    if participation is not None:
        of_dense = state_.hold_dense(plan, dense_memory)
    return ReductionState(
        state_.hold(plan, own), state_.hold_reducer(plan, heard.memory.reducer), of_dense
    )


def _zeros(likes: Any) -> Stacks:
    return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)

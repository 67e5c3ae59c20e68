"""The one path of every gradient through any reducer: compensate, exchange, remember."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.backend import conditional
from jaxcomp.base import Feedback, Gate, Opened
from jaxcomp.exchange import fast_axis, gating, guarding, legs, state as state_
from jaxcomp.exchange.gating import Participation
from jaxcomp.exchange.plan import Plan, dense_feedback_of
from jaxcomp.exchange.state import ReductionState
from jaxcomp.exchange.stepping import Stepper
from jaxcomp.feedback import NoFeedback
from jaxcomp.layout import trees
from jaxcomp.numerics import addition
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
    before = state_.take(plan, state, gated=gated is not None)
    gate = None if gated is None else gated.gate
    closes = gate is not None and gating.closes(gate, plan.reducer)
    stepper, params, stepped, extra = (None, (), (), {}) if stepping is None else stepping
    # Closed rounds would lose the gradients of dense leaves.
    of_dense = NoFeedback() if gate is None else dense_feedback_of(plan.given)
    step = _Step(plan, gate, of_dense, stepper, extra, guard, everywhere)
    stacks, dense = trees.stacks(plan.layout, grads)
    given = stacks if plan.fast is None else fast_axis.scatter(plan, stacks)
    message, feedback = plan.feedback.compensate(given, before.feedback)
    dense, dense_memory = of_dense.compensate(tuple(dense), before.dense)
    opened, all_of_it = Opened(jnp.ones((), bool), weight, ()), (message, dense)
    if gated is not None:
        opened = gated.gate.open(gated.key, all_of_it, gated.state, plan.axis, gated.params)
    go = conditional.uniform(opened.go, plan.axis_name) if closes else jnp.ones((), bool)
    held = ReductionState(feedback, before.reducer, dense_memory)
    if plan.fast is not None:
        key = fast_axis.fold_key(plan, key)
    brought = _Brought(key, message, dense, held, stepped, opened.weight, params)
    either = functools.partial(conditional.either, go, step.exchange, step.stay)
    mean, dense_mean, held, settled, sent, senders = (either if closes else step.exchange)(brought)
    if plan.fast is not None:
        mean = fast_axis.gather(plan, mean)
    if stepper is not None:
        settled = stepper.settle(plan, mean, dense_mean, params, settled)
    participation = None
    if gated is not None:
        taken = go if opened.weight is None else go & (opened.weight != 0)
        participation = Participation(go, taken, senders)
    if guard:
        held = _own_kept(plan, (message, dense, sent), held, before, participation)
    new = state_.hold(plan, held, gated=gated is not None)
    # A closed round, or gradients of another dtype than the parameters, change no dtype of a state.
    old = state, () if gated is None else gated.state, stepped
    after = guarding.cast_like((new, opened.state, settled), old)
    # Skipped if the workers' means differ: they would disagree on the rollback.
    if guard and plan.facts.same_on_all and jax.tree.leaves(after):
        finite = guarding.all_finite((mean, dense_mean))
        if everywhere:
            finite = lax.pmin(finite.astype(jnp.int32), everywhere) == 1
        after = guarding.where_finite(finite, after, old)
        if tell:
            flag = jnp.where(finite, 0, jnp.nan)
            mean, dense_mean = guarding.poison((mean, dense_mean), flag)
    whole = trees.assemble(plan.layout, mean, dense_mean)
    return Reduction(whole, after[0], given, message, sent, participation, *after[1:])


class _Brought(NamedTuple):
    """The values that a worker brings to a round."""

    key: Array
    message: Stacks
    dense: Stacks
    held: ReductionState
    stepped: PyTree
    weight: Array | None
    params: PyTree


@dataclasses.dataclass(frozen=True)
class _Step:
    """The static settings of a round.

    Attributes:
        plan: the plan.
        gate: the gate, or None.
        of_dense: the feedback of dense leaves.
        stepper: the optimizer between the two ways, or None.
        extra: the further arguments of its update.
        guard: whether memory that is not finite makes the mean NaN.
        everywhere: the axes over which the mean is split.
    """

    plan: Plan
    gate: Gate | None
    of_dense: Feedback
    stepper: Stepper | None
    extra: dict[str, Any]
    guard: bool
    everywhere: tuple[str, ...]

    @property
    def factor(self) -> float:
        """The gate's factor on the messages."""
        plan, gate = self.plan, self.gate
        return 1.0 if gate is None else gating.factor(gate, plan.reducer, plan.workers)

    def exchange(self, brought: _Brought) -> tuple:
        """An open round: the first leg, feedback on this device's part, the optimizer, the rest.

        The mirror of a shift is thus added before a second leg.
        """
        plan, feedback = self.plan, self.plan.feedback
        key, message, dense, held, stepped, weight, params = brought
        got = legs.collect(plan, key, message, held.reducer, weight)
        part, own = gating.remember(
            feedback, self.factor, message, got.sent, got.value, got.share, weight, held.feedback
        )
        if gating.forgets(feedback) and weight is not None:
            known = plan.dense_mean(held.feedback.own, weight)
            part = gating.scale_sum(jax.tree.map(jnp.add, got.value, known), self.factor)
        flag = None
        if self.guard and plan.tells and weight is None:
            # Sent with the dense leaves, so that it adds no collective.
            *mean, flag = plan.dense_mean((*dense, guarding.flag_unsound(own)))
        else:
            mean = plan.dense_mean(dense, weight)
            if self.guard and plan.tells:
                flag = guarding.flag_any_unsound(own, plan.axis_name)
        # Dense leaves as the others receive them: rounded to the dtype in which they are sent.
        arrived = tuple(x.astype(plan.dense_dtype or x.dtype).astype(x.dtype) for x in dense)
        mean, of_dense = gating.remember(
            self.of_dense, self.factor, dense, arrived, tuple(mean), got.share, weight, held.dense
        )
        if self.stepper is not None:
            part, mean, stepped = self.stepper.step(
                plan, part, mean, params, stepped, self.everywhere, self.extra
            )
        whole, reducer = legs.spread(plan, key, part, got.state)
        if flag is not None:
            whole, mean = guarding.poison((whole, mean), flag)
        # Counted only in open rounds, since it needs a collective.
        senders = jnp.zeros((), jnp.uint32)
        if self.gate is not None:
            senders = gating.senders(weight, plan.axis)
        after = ReductionState(own, reducer, of_dense)
        return tuple(whole), tuple(mean), after, stepped, tuple(got.sent), senders

    def stay(self, brought: _Brought) -> tuple:
        """A closed round, whose mean every device knows: the mirror of all shifts, or zero."""
        plan, feedback = self.plan, self.plan.feedback
        _, message, dense, held, stepped, _, _ = brought
        nothing, none = jnp.zeros((), jnp.float32), _zeros(message)
        part = _zeros(plan.part_like)
        part, own = feedback.update(message, none, part, 0.0, nothing, held.feedback)
        if feedback.facts.mirrors and not gating.forgets(feedback):
            mean = legs.closed_mean(plan, part, held.reducer)
        else:
            mean = _zeros(plan.likes)
        nobody = _zeros(dense), _zeros(dense), 0.0, nothing
        still, of_dense = self.of_dense.update(dense, *nobody, held.dense)
        if self.stepper is not None:  # Updates are wider than gradients.
            still = tuple(x.astype(addition.wide(x.dtype)) for x in still)
        after = ReductionState(own, held.reducer, of_dense)
        senders = jnp.zeros((), jnp.uint32)
        return tuple(mean), tuple(still), after, stepped, none, senders


def _own_kept(
    plan: Plan,
    brought: tuple[Stacks, Stacks, Stacks],
    after: ReductionState,
    before: ReductionState,
    participation: Participation | None,
) -> ReductionState:
    """The memory without a non-finite message that does not affect the mean.

    If the memory of one worker would not be finite, a leaf of the mean is NaN on all workers, and
    all keep the memory that they had. But a non-finite message on a non-participating worker does
    not affect the mean, and does not update that worker's memory; so it is with every worker under
    a reducer that excludes such messages.
    """
    excludes = plan.facts.excludes
    memory, kept = (after.feedback, after.dense), (before.feedback, before.dense)
    # With a mirror, silent workers keep their memory.
    alone = (participation is not None or excludes) and not plan.feedback.facts.mirrors
    if not alone or not jax.tree.leaves(memory):
        return after
    sound = guarding.all_finite(brought if excludes else brought[:2])
    if participation is not None and not excludes:
        sound = participation.taken | sound
    own, of_dense = guarding.where_finite(sound, memory, kept)
    return after._replace(feedback=own, dense=of_dense)


def _zeros(likes: Any) -> Stacks:
    return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)

"""Runs the route of a reducer: every leg encodes, moves, and combines."""

from typing import NamedTuple

from jax import lax

from jaxcomp.base import Outcome
from jaxcomp.exchange import phases, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.exchange.stages import Stage
from jaxcomp.feedback import NoFeedback
from jaxcomp.mesh import per_worker
from jaxcomp.mesh.per_worker import PerWorker
from jaxcomp.numerics import noise
from jaxcomp.types import Array, AxisName, PyTree, Stacks

_DOWN = 0x646F776E
"""Folded into the key of a step for the legs after the first."""


class LegState(NamedTuple):
    """The memory of a leg.

    Attributes:
        codec: the states of this worker's codecs.
        memory: the memory of the link's feedback; `()` for the first leg, whose link's feedback
            the step runs.
        turn: the state of the move.
        held: the state of the combination.
    """

    codec: PerWorker
    memory: PyTree = ()
    turn: PyTree = ()
    held: PyTree = ()


def init(plan: Plan) -> PyTree:
    """The state of a reducer before the first step."""
    if plan.phases:
        return phases.init(plan, init)
    if not plan.stages:
        return plan.reducer.init(plan)
    return tuple(begin(stage, plan.axis_name) for stage in plan.stages)


def begin(stage: Stage, axis_name: AxisName) -> LegState:
    """The memory of a leg before the first step."""
    leg = stage.leg
    memory = leg.link.feedback.init(stage.likes, stage.whole_likes) if stage.later else ()
    return LegState(
        codec=PerWorker.wrap(send.init(stage.batches), stage.codecs_kind(), axis_name),
        memory=per_worker.wrap(memory, "slice", axis_name) if stage.later else (),
        turn=leg.move.init(),
        held=leg.combine.init(stage),
    )


def collect(
    plan: Plan, key: Array, message: Stacks, state: PyTree, weight: Array | None = None
) -> Outcome:
    """Runs the first leg: this device's part of the mean of all messages.

    Args:
        plan: the plan.
        key: the key of the step.
        message: this worker's message, an array for each batch.
        state: the reducer's state.
        weight: this worker's weight; None for 1.

    Returns:
        The part of `Σ wᵢ·cᵢ / n` over the decoded messages `cᵢ`, and the state for `spread`.
    """
    if plan.phases:
        return phases.collect(plan, collect, key, message, state, weight)
    if not plan.stages:
        return plan.reducer.collect(plan, key, message, state, weight)
    got, after = run(plan.stages[0], key, message, state[0], plan.axis_name, weight)
    return got._replace(state=(after, *state[1:]))


def spread(plan: Plan, key: Array, part: Stacks, state: PyTree) -> tuple[Stacks, PyTree]:
    """Runs the further legs: the whole mean, the same on every device."""
    if plan.phases:
        return phases.spread(plan, spread, key, part, state)
    if not plan.stages:
        return part, state
    after = [state[0]]
    for stage, own in zip(plan.stages[1:], state[1:], strict=True):
        got, one = run(stage, noise.fold(key, _DOWN), stage.enter(part), own, plan.axis_name)
        part = stage.leave(got.value)
        after.append(one)
    return part, tuple(after)


def known(plan: Plan, part: Stacks, state: PyTree) -> Stacks:
    """The mean in a closed round, from each device's part of a mirror.

    After a further leg, it is the memory of that leg's link, which all workers share.
    """
    for stage, own in zip(plan.stages[1:], state[1:], strict=False):
        part = stage.leave(per_worker.unwrap(own.memory).mirror)
    return part


def run(
    stage: Stage,
    key: Array,
    x: Stacks,
    state: LegState,
    axis_name: AxisName,
    weight: Array | None = None,
) -> tuple[Outcome, LegState]:
    """Runs a leg.

    Args:
        stage: the leg, with the rows that pass it.
        key: the key of the leg.
        x: the rows of this worker.
        state: the memory of the leg.
        axis_name: the axes over which memory differs.
        weight: this worker's weight; None for 1.
    """
    leg, worker = stage.leg, lax.axis_index(stage.axis)
    feedback = leg.link.feedback if stage.later else NoFeedback()
    memory = send.Memory(per_worker.unwrap(state.memory), state.codec.own())
    own = send.send(
        key, stage.batches, x, memory, worker, stage.axis,
        feedback=feedback, weight=weight, first=stage.later,
    )  # fmt: skip
    heard, turn = leg.move.run(stage, key, own, weight, state.turn)
    got = leg.combine.run(stage, key, heard, own, state.held)
    held = ()
    if stage.later:
        value, after = feedback.update(
            own.message, own.sent, got.value, 1.0, None, own.memory.feedback
        )
        got, held = got._replace(value=value), per_worker.wrap(after, "slice", axis_name)
    codecs = PerWorker.wrap(own.memory.codecs, state.codec.kind, axis_name)
    return got, LegState(codecs, held, turn, got.state)


def run_once(stage: Stage, key: Array, x: Stacks) -> Stacks:
    """Runs a leg whose codecs have no memory: the rows of the result."""
    got, _ = run(stage, key, x, begin(stage, stage.axis), stage.axis)
    return got.value

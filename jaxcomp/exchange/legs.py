"""Runs the route of a reducer: every leg encodes, moves, and combines."""

from typing import NamedTuple

from jax import lax

from jaxcomp.base import Outcome
from jaxcomp.exchange import phases, send
from jaxcomp.exchange.plan import Plan
from jaxcomp.exchange.stages import Stage
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
    stage, leg = plan.stages[0], state[0]
    memory, worker = send.Memory((), leg.codec.own()), lax.axis_index(stage.axis)
    own = send.send(key, stage.batches, message, memory, worker, stage.axis, weight=weight)
    got, after = _arrive(stage, key, own, leg, plan.axis_name, weight)
    return got._replace(state=(after, *state[1:]))


def spread(plan: Plan, key: Array, part: Stacks, state: PyTree) -> tuple[Stacks, PyTree]:
    """Runs the further legs: the whole mean, the same on every device."""
    if plan.phases:
        return phases.spread(plan, spread, key, part, state)
    if not plan.stages:
        return part, state
    key, axis_name, after = noise.fold(key, _DOWN), plan.axis_name, [state[0]]
    for stage, leg in zip(plan.stages[1:], state[1:], strict=True):
        feedback, worker = stage.leg.link.feedback, lax.axis_index(stage.axis)
        memory = send.Memory(per_worker.unwrap(leg.memory), leg.codec.own())
        own = send.send(
            key, stage.batches, stage.enter(part), memory, worker, stage.axis,
            feedback=feedback, first=True,
        )  # fmt: skip
        got, one = _arrive(stage, key, own, leg, axis_name)
        held = own.memory.feedback
        whole, held = feedback.update(own.message, own.sent, got.value, 1.0, None, held)
        after.append(one._replace(memory=per_worker.wrap(held, "slice", axis_name)))
        part = stage.leave(whole)
    return part, tuple(after)


def closed_mean(plan: Plan, part: Stacks, state: PyTree) -> Stacks:
    """The mean in a closed round, from each device's part of a mirror.

    After a further leg, it is the memory of that leg's link, which all workers share.
    """
    for stage, own in zip(plan.stages[1:], state[1:], strict=False):
        part = stage.leave(per_worker.unwrap(own.memory).mirror)
    return part


def run_once(stage: Stage, key: Array, x: Stacks) -> Stacks:
    """Runs a first leg whose codecs have no memory: the rows of the result."""
    move, combine, worker = stage.leg.move, stage.leg.combine, lax.axis_index(stage.axis)
    memory = send.Memory((), send.init(stage.batches))
    own = send.send(key, stage.batches, x, memory, worker, stage.axis)
    heard, _ = move.run(stage, key, own, None, move.init())
    return combine.run(stage, key, heard, own, combine.init(stage)).value


def _arrive(
    stage: Stage,
    key: Array,
    own: send.Sent,
    state: LegState,
    axis_name: AxisName,
    weight: Array | None = None,
) -> tuple[Outcome, LegState]:
    """Moves and combines the payloads of a leg; its memory of codecs, move and combination."""
    leg = stage.leg
    heard, turn = leg.move.run(stage, key, own, weight, state.turn)
    got = leg.combine.run(stage, key, heard, own, state.held)
    codecs = PerWorker.wrap(own.memory.codecs, state.codec.kind, axis_name)
    return got, LegState(codecs, (), turn, got.state)

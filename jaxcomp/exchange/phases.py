"""Runs the phase of a reducer that changes at given steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.base import Outcome
from jaxcomp.exchange.plan import Plan
from jaxcomp.types import Array, PyTree, Stacks

LAST_STEP = np.int32(2**31 - 1)
"""The count of steps ends below it, so that it never becomes negative."""


class PhasesState(NamedTuple):
    """The state of the current reducer, which the next phase takes over, and the step count.

    Attributes:
        phase_step: the number of counted steps; the same on all workers.
        current: the state of the current phase's reducer.
    """

    phase_step: Array
    current: PyTree


def init(plan: Plan, begin: Callable[[Plan], PyTree]) -> PhasesState:
    """The state of the first phase.

    Raises:
        ValueError: if phases have parts or states of other shapes.
    """
    plans = plan.phases
    if any(one.part_like != plan.part_like for one in plans):
        raise ValueError(
            "`phases` must have reducers that give a device equal parts of the mean, got "
            f"{[type(one.given).__name__ for one in plans]}; use one kind for all"
        )
    wanted = _shapes(jax.eval_shape(lambda: begin(plans[0])))
    for other in plans[1:]:
        if _shapes(jax.eval_shape(lambda plan=other: begin(plan))) != wanted:
            raise ValueError(
                "`phases` must have reducers with states of equal shapes, since each takes over "
                f"the state of the one before, got different states for {plans[0].given!r} and "
                f"{other.given!r}; use one kind of reducer and one kind of codec"
            )
    return PhasesState(jnp.zeros((), jnp.int32), begin(plans[0]))


def collect(
    plan: Plan,
    run: Callable[..., Outcome],
    key: Array,
    message: Stacks,
    state: PhasesState,
    weight: Array | None,
) -> Outcome:
    """Runs the first leg of the current phase."""

    def branch(own: Plan) -> Callable[..., Outcome]:
        def collect(key, message, state, weight):
            got = run(own, key, message, state, weight)
            return got._replace(share=jnp.asarray(got.share, jnp.float32))

        return collect

    given = (key, message, state.current, weight)
    got = lax.switch(_phase(plan, state), [branch(own) for own in plan.phases], *given)
    share = 1.0 if weight is None else got.share
    return got._replace(share=share, state=state._replace(current=got.state))


def spread(
    plan: Plan, run: Callable[..., Any], key: Array, part: Stacks, state: PhasesState
) -> tuple[Stacks, PhasesState]:
    """Runs the further legs of the current phase, and counts the step."""

    def branch(own: Plan) -> Callable[..., tuple[Stacks, PyTree]]:
        return lambda key, part, state: run(own, key, part, state)

    branches = [branch(own) for own in plan.phases]
    mean, current = lax.switch(_phase(plan, state), branches, key, part, state.current)
    return mean, PhasesState(jnp.minimum(state.phase_step, LAST_STEP - 1) + 1, current)


def _phase(plan: Plan, state: PhasesState) -> Array:
    """The index of the next step's phase."""
    starts = np.array([start for start, _ in plan.reducer.facts.phases[1:]], np.int32)
    return jnp.sum(state.phase_step >= starts, dtype=jnp.int32)


def _shapes(tree: PyTree) -> tuple:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]

"""Collectives under a condition that differs between workers.

Some workers would run such a collective, and wait for ever for the others.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxcomp.backend import axes, conditional
from jaxcomp.misuse import lineage, optax_wrappers
from jaxcomp.types import AxisName

_SAME = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
"""Collectives whose results are the same on all workers."""

_OTHERS = {"ppermute", "all_to_all", "psum_scatter", "reduce_scatter", "pgather", "pbroadcast"}
COLLECTIVES = frozenset(_SAME | _OTHERS)
"""The names of the primitives of all collectives."""


def check_program(
    steps: Sequence[lineage.Step], known: Iterable[tuple[Any, bool]], axis_name: AxisName
) -> None:
    """Refuses collectives under a condition that differs between the workers that take part.

    A value differs if it depends on an argument that does, or on the worker's index, and not only
    through collectives whose results are the same on all workers. JAX's types do not say it of all
    values: they ignore how often a loop runs.

    Args:
        steps: the equations of the mapped function.
        known: its arguments, each with whether it differs between workers.
        axis_name: the axes of the workers.

    Raises:
        ValueError: naming the conditional, and what makes its condition the same on all workers.
    """
    if not lineage.contain(steps, COLLECTIVES, within={"cond", "while"}):
        return
    rule, every = _Differs(axis_name), frozenset(axes.names(axis_name))
    lineage.flow(steps, rule, [(leaf, every if own else frozenset()) for leaf, own in known])
    if rule.found is not None:
        raise ValueError(_message(*rule.found, axis_name))


def are_same(
    leaves: Sequence[Any], known: Iterable[tuple[Any, bool]], axis_name: AxisName
) -> list[bool]:
    """Whether each value is known to be the same on all workers, whatever its type says.

    JAX types zeros like a gradient, and `jaxcomp.local` parameters, as different.

    Args:
        leaves: the traced values.
        known: the arguments of the mapped function, each with whether it differs between workers.
        axis_name: the axes of the workers.
    """
    rule, every = _Doubtful(axis_name), frozenset(axes.names(axis_name))
    facts = [(leaf, every if own else frozenset()) for leaf, own in known]
    return [not fact for fact in lineage.trace(leaves, rule, facts)]


def check_callers(axis_name: AxisName) -> None:
    """Refuses a call from a branch whose condition is known to differ between workers.

    Without JAX's types of replication it is known only of a condition that is computed from the
    worker's index: whether an argument of the mapped function differs cannot be seen from within.
    Conditions of loops cannot be seen either, nor the second use of a branch that JAX has traced
    already. `check_program` sees all of them.

    Raises:
        ValueError: naming what makes the condition the same on all workers.
    """
    if axes.size(axis_name) == 1:
        return
    for condition, line in optax_wrappers.conditions():
        if lineage.trace([condition], _Differs(axis_name))[0]:
            raise ValueError(
                "the update must run on all workers or on none, but the condition of the "
                f"jax.lax.cond or switch around it, at {line}, differs between the workers of "
                f"{axis_name!r}: " + _REMEDY.format(axis=axis_name)
            )


def differ(
    values: Sequence[Any], known: Iterable[tuple[Any, frozenset]], axis_name: AxisName
) -> list[bool]:
    """Which values differ between workers.

    Args:
        values: the values.
        known: inputs of the program, each with the axes of workers between which it differs.
        axis_name: the axes of the workers.
    """
    facts = lineage.trace(values, _Differs(axis_name), known)
    names = set(axes.names(axis_name))
    return [
        bool(fact or names & lineage.mapped_axes(value))
        for fact, value in zip(facts, values, strict=True)
    ]


_REMEDY = (
    "some workers would wait for the others for ever. Make the condition the same on all workers "
    "first, for instance jax.lax.pmin(jnp.isfinite(loss).astype(jnp.int32), {axis!r}) > 0. To skip "
    "steps that are not finite, use jaxcomp.skip_nonfinite(tx), without a condition."
)


def _message(condition: lineage.Step, inside: lineage.Step, axis_name: AxisName) -> str:
    what = "jax.lax.while_loop" if condition.name == "while" else "jax.lax.cond or switch"
    return (
        "`step` must communicate on all workers or on none, but the condition of a "
        f"{what}{_at(condition)} differs between the workers of {axis_name!r}, and the program "
        f"under it has a collective, {inside.name}{_at(inside)}: " + _REMEDY.format(axis=axis_name)
    )


def _at(step: lineage.Step) -> str:
    return f" at {line}" if (line := step.line()) else ""


class _Differs:
    """The axes of workers between which a value differs."""

    constant = frozenset()

    def __init__(self, axis_name: AxisName):
        self.names = frozenset(axes.names(axis_name))
        self.typed = axes.typed(axis_name)
        self.found: tuple[lineage.Step, lineage.Step] | None = None
        self.inside: dict[int, list[lineage.Step]] = {}

    def unknown(self, atom: Any) -> frozenset:
        # Without types, arguments that differ are known, and arrays from outside are the same.
        return axes.varying_axes(atom.aval) & self.names if self.typed and atom else frozenset()

    def literal(self, value: Any) -> frozenset:
        del value
        return frozenset()

    def join(self, one: frozenset, other: frozenset) -> frozenset:
        return one | other

    def decide(self, step: lineage.Step, by: frozenset, results: list[Any]) -> list[frozenset]:
        for inside in self.collectives(step) if by else ():
            if self.found is None and by & set(lineage.axes_of(inside)):
                self.found = step, inside
        return [by | fact for fact in results]

    def through(self, step: lineage.Step, inputs: list[frozenset]) -> frozenset:
        over = self.names & set(lineage.axes_of(step))
        fact = functools.reduce(frozenset.union, inputs, frozenset())
        if step.name == "name" and step.params["name"] == conditional.AGREED:
            return frozenset()
        if step.name == "axis_index" or step.name in _OTHERS:
            fact = fact | over
        elif step.name in _SAME and step.params.get("axis_index_groups") is None:
            fact = fact - over
        return fact

    def collectives(self, step: lineage.Step) -> list[lineage.Step]:
        """The collectives over the workers in the programs of an equation."""
        found = self.inside.get(id(step.params))
        if found is None:
            found = self.inside[id(step.params)] = [
                each
                for inner in step.inside()
                for each in ([inner] if self._communicates(inner) else self.collectives(inner))
            ]
        return found

    def _communicates(self, step: lineage.Step) -> bool:
        return step.name in _SAME | _OTHERS and bool(self.names & set(lineage.axes_of(step)))


class _Doubtful(_Differs):
    """The same, where whatever is not understood counts as different."""

    def unknown(self, atom: Any) -> frozenset:
        return super().unknown(atom) if atom else self.names

    def through(self, step: lineage.Step, inputs: list[frozenset]) -> frozenset:
        return self.names if any(step.inside()) else super().through(step, inputs)

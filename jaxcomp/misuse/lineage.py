"""The lineage of a traced value: the equations behind it, and conclusions from them.

JAX has no public way from a traced value to its equations. Only this module reads the private
attributes (JAX 0.10 to 0.12); where they are missing, a value has no history.
"""

import functools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.core import Tracer
from jax.extend.core import Literal

from jaxcomp.misuse import lines


class Step(NamedTuple):
    """One equation of a program.

    Attributes:
        name: of its primitive.
        params: of its primitive.
        inputs: variables or literals.
        outputs: variables.
        source: where the equation is from; its stack of names says whether `jax.grad` made it.
        reverse: whether the equation that holds its program is of a reverse pass.
    """

    name: str
    params: dict[str, Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    source: Any
    reverse: bool

    def is_reverse(self) -> bool:
        """Whether the equation belongs to the reverse pass of `jax.grad`."""
        scope = _text(self.source.name_stack)
        return "transpose(" in scope or (self.reverse and "rematted_computation" not in scope)

    def line(self) -> str:
        """The user's line that made the equation, or an empty string if it is unknown."""
        return lines.of_source(self.source)

    def inside(self) -> Iterator["Step"]:
        """The equations of the programs that the equation contains, not of those within these."""
        for value in self.params.values():
            for program in programs_in(value):
                yield from (_step(eqn, eqn.invars, self.reverse) for eqn in program.eqns)


@functools.lru_cache(maxsize=4096)
def _text(stack: Any) -> str:
    return str(stack)


def contain(steps: Iterable[Step], names: Set[str], within: Set[str] | None = None) -> bool:
    """Whether programs within the equations have an equation of one of these primitives.

    Args:
        steps: the equations.
        names: the primitives.
        within: only in programs of equations of these primitives, at any depth; None for all.
    """

    def has(params: dict[str, Any], inside: bool) -> bool:
        for value in params.values():
            for program in programs_in(value):
                for eqn in program.eqns:
                    name = eqn.primitive.name
                    if inside and name in names:
                        return True
                    if has(eqn.params, inside or name in (within or ())):
                        return True
        return False

    return any(has(step.params, within is None or step.name in within) for step in steps)


def programs_in(value: Any) -> list[Any]:
    """The programs that a parameter of an equation is, or contains."""
    if isinstance(value, str | int | float | None):
        return []
    parts = value if isinstance(value, tuple | list) else (value,)
    inner = (getattr(part, "jaxpr", part) for part in parts)
    return [part for part in inner if hasattr(part, "eqns")]


@runtime_checkable
class Rule(Protocol):
    """A property of values, and its propagation through equations."""

    constant: Any
    """The fact of an array that is part of the program."""

    def unknown(self, atom: Any) -> Any:
        """The fact of a variable without a history, such as an argument; None if it has none."""

    def literal(self, value: Any) -> Any:
        """The fact for a number that is part of the program."""

    def join(self, one: Any, other: Any) -> Any:
        """The fact for a value that depends on both, or is either of the two."""

    def through(self, step: Step, inputs: list[Any]) -> Any:
        """The facts for the results of an equation."""

    def decide(self, step: Step, by: Any, results: list[Any]) -> list[Any]:
        """The facts for the results of a conditional or loop, from that of its condition."""
        ...


def axes_of(step: Step) -> tuple:
    """The mapped axes that a collective is over; for `reduce_sum` and the like, dimensions."""
    over = step.params.get("axes", step.params.get("axis_name", ()))
    return over if isinstance(over, tuple) else (over,)


def trace(leaves: Sequence[Any], rule: Rule, known: Iterable[tuple[Any, Any]] = ()) -> list[Any]:
    """The property of each traced value, from the equations behind it, in linear time.

    All are unknown where JAX keeps its equations otherwise.

    Args:
        leaves: the traced values.
        rule: the property.
        known: as for `flow`.
    """
    try:
        found = flow(history(leaves), rule, known)
    except (AttributeError, KeyError):
        return [rule.unknown(None)] * len(leaves)
    return [_look(_origin(leaf)[0], rule, found) for leaf in leaves]


def flow(
    steps: Iterable[Step], rule: Rule, known: Iterable[tuple[Any, Any]] = ()
) -> dict[Hashable, Any]:
    """The property of the results of equations, by their variables.

    Args:
        steps: the equations, each after those that it depends on.
        rule: the property.
        known: pairs of a traced value, such as an argument, and its fact.
    """
    facts = ((_origin(argument)[0], fact) for argument, fact in known)
    # An argument may be a constant of the program, such as a scalar of a state made within it.
    found = {atom: fact for atom, fact in facts if not isinstance(atom, Literal | None)}
    _flow(steps, rule, found)
    return found


def mapped_axes(value: Any) -> set:
    """The named axes of `jax.vmap` along which a traced value differs."""
    found = set()
    while hasattr(value, "batch_dim") and hasattr(value, "val"):
        data = getattr(getattr(value, "_trace", None), "axis_data", None)
        if value.batch_dim is not None:
            found.add(getattr(data, "name", None))
        value = value.val
    return found


def is_computed(value: Any) -> bool:
    """Whether a value is one of the traced program, and not a constant that it begins with."""
    return isinstance(value, Tracer) and not isinstance(_origin(value)[0], Literal)


def _origin(value: Any) -> tuple[Any, Any]:
    """The variable or literal of a traced value, and the equation that made it, or None."""
    if not hasattr(value, "parent"):
        return None, None
    return getattr(value, "val", None), value.parent


def history(leaves: Iterable[Any]) -> list[Step]:
    """All equations behind traced values, each after the equations that it depends on."""
    order, begun = [], set()
    made = (_origin(leaf)[1] for leaf in leaves)
    todo = [(equation, False) for equation in made if equation is not None]
    while todo:
        equation, ready = todo.pop()
        if ready:
            atoms = [_origin(value)[0] for value in equation.in_tracers]
            order.append(_step(equation, atoms, reverse=False))
        elif id(equation) not in begun:
            begun.add(id(equation))
            todo.append((equation, True))
            before = (_origin(value)[1] for value in equation.in_tracers)
            todo += [(other, False) for other in before if other is not None]
    return order


def _step(equation: Any, inputs: Sequence[Any], reverse: bool) -> Step:
    source = equation.source_info
    return Step(equation.primitive.name, equation.params, inputs, equation.outvars, source, reverse)


def _look(atom: Any, rule: Rule, found: Mapping[Hashable, Any]) -> Any:
    if isinstance(atom, Literal):
        return rule.literal(atom.val)
    return found[atom] if atom in found else rule.unknown(atom)


def _flow(steps: Iterable[Step], rule: Rule, found: dict[Hashable, Any]) -> None:
    for step in steps:
        inputs = [_look(atom, rule, found) for atom in step.inputs]
        results = _inside(step, inputs, rule)
        if results is None:
            results = [rule.through(step, inputs)] * len(step.outputs)
        for atom, fact in zip(step.outputs, results, strict=True):
            found.setdefault(atom, fact)


def _inside(step: Step, inputs: list[Any], rule: Rule) -> list[Any] | None:
    """The facts for the results of an equation that contains programs; None for others."""
    params = step.params
    if step.name == "cond":
        which, *rest = inputs
        each = [_run(branch, rest, step, rule) for branch in params["branches"]]
        joined = [functools.reduce(rule.join, facts) for facts in zip(*each, strict=True)]
        return rule.decide(step, which, joined)
    if step.name == "while":
        return _while(step, inputs, rule)
    if step.name == "scan":
        consts, carry, rows = parts_of_scan(params, inputs)
        return _loop(params["jaxpr"], consts, carry, rows, step, rule)
    # The last is of this package's own primitives, such as a mean over workers.
    names = ("jaxpr", "call_jaxpr", "traced")
    body = next((params[name] for name in names if name in params), None)
    inner = getattr(body, "jaxpr", body)
    if len(getattr(inner, "invars", ())) != len(inputs) or not hasattr(inner, "eqns"):
        return None
    results = _run(body, inputs, step, rule)
    return results if len(results) == len(step.outputs) else None


def _while(step: Step, inputs: list[Any], rule: Rule) -> list[Any]:
    params = step.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    consts, carry = inputs[first : first + second], inputs[first + second :]
    while True:
        results = _loop(params["body_jaxpr"], consts, carry, [], step, rule)
        (goes_on,) = _run(params["cond_jaxpr"], [*inputs[:first], *results], step, rule)
        after = rule.decide(step, goes_on, results)
        if after == results:
            return after
        carry = after


def parts_of_scan(params: dict[str, Any], inputs: list[Any]) -> list[list[Any]]:
    """The constants, carries and scanned inputs of a scan."""
    if "ft_in" in params:  # Since JAX 0.11.
        return [list(part) for part in params["ft_in"].update(inputs).unpack()]
    first = params["num_consts"]
    second = first + params["num_carry"]
    return [inputs[:first], inputs[first:second], inputs[second:]]


def _loop(
    body: Any, consts: list[Any], carry: list[Any], rows: list[Any], step: Step, rule: Rule
) -> list[Any]:
    while True:
        results = _run(body, [*consts, *carry, *rows], step, rule)
        after = [rule.join(*pair) for pair in zip(carry, results[: len(carry)], strict=True)]
        if after == carry:
            return [*carry, *results[len(carry) :]]
        carry = after


def _run(body: Any, inputs: list[Any], step: Step, rule: Rule) -> list[Any]:
    """The facts for the results of a program within an equation."""
    inner = getattr(body, "jaxpr", body)
    found = dict.fromkeys(inner.constvars, rule.constant)
    found.update(zip(inner.invars, inputs, strict=True))
    reverse = step.is_reverse()
    _flow((_step(eqn, eqn.invars, reverse) for eqn in inner.eqns), rule, found)
    return [_look(atom, rule, found) for atom in inner.outvars]

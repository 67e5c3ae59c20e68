"""The lineage of a traced value: the equations behind it, and conclusions from them.

JAX has no public way from a traced value to its equations. Only this module reads the private
attributes (JAX 0.10 to 0.12); where they are missing, a value has no history.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.extend.core import Literal


class Step(NamedTuple):
    """One equation of a program.

    Attributes:
        name: of its primitive.
        params: of its primitive.
        inputs: variables or literals.
        outputs: variables.
        scope: the stack of names of its source, which says whether `jax.grad` made it.
        reverse: whether the equation that holds its program is of a reverse pass.
    """

    name: str
    params: dict[str, Any]
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    scope: Any
    reverse: bool

    def is_reverse(self) -> bool:
        """Whether the equation belongs to the reverse pass of `jax.grad`. Slow: call it rarely."""
        scope = str(self.scope)
        return "transpose(" in scope or (self.reverse and "rematted_computation" not in scope)


@runtime_checkable
class Rule(Protocol):
    """A property of values, and its propagation through equations."""

    unknown: Any
    """The fact of a value without a history, such as an argument of the mapped function."""

    constant: Any
    """The fact of an array that is part of the program."""

    def literal(self, value: Any) -> Any:
        """The fact for a number that is part of the program."""

    def join(self, one: Any, other: Any) -> Any:
        """The fact for a value that depends on both, or is either of the two."""

    def through(self, step: Step, inputs: list[Any]) -> Any:
        """The facts for the results of an equation."""


def trace(leaves: Iterable[Any], rule: Rule) -> list[Any]:
    """The property of each traced value, from the equations behind it, in linear time.

    All are unknown where JAX keeps its equations otherwise.
    """
    values = [_origin(leaf) for leaf in leaves]
    found = {}
    try:
        _flow(_history(values), rule, found)
    except (AttributeError, KeyError):
        return [rule.unknown] * len(values)
    return [_look(atom, rule, found) for atom, _ in values]


def _origin(value: Any) -> tuple[Any, Any]:
    """The variable or literal of a traced value, and the equation that made it, or None."""
    if not hasattr(value, "parent"):
        return None, None
    return getattr(value, "val", None), value.parent


def _history(values: list[tuple[Any, Any]]) -> list[Step]:
    """All equations behind the given values, each after the equations that it depends on."""
    order, begun = [], set()
    todo = [(equation, False) for _, equation in values if equation is not None]
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
    scope = equation.source_info.name_stack
    return Step(equation.primitive.name, equation.params, inputs, equation.outvars, scope, reverse)


def _look(atom: Any, rule: Rule, found: dict[Hashable, Any]) -> Any:
    return rule.literal(atom.val) if isinstance(atom, Literal) else found.get(atom, rule.unknown)


def _flow(steps: Iterable[Step], rule: Rule, found: dict[Hashable, Any]) -> None:
    for step in steps:
        inputs = [_look(atom, rule, found) for atom in step.inputs]
        results = _inside(step, inputs, rule)
        if results is None:
            results = [rule.through(step, inputs)] * len(step.outputs)
        found.update(zip(step.outputs, results, strict=True))


def _inside(step: Step, inputs: list[Any], rule: Rule) -> list[Any] | None:
    """The facts for the results of an equation that contains programs; None for others."""
    params = step.params
    if step.name == "cond":
        which, *rest = inputs
        each = [_run(branch, rest, step, rule) for branch in params["branches"]]
        return [_joined([which, *results], rule) for results in zip(*each, strict=True)]
    if step.name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = inputs[first : first + second], inputs[first + second :]
        return _loop(params["body_jaxpr"], consts, carry, [], step, rule)
    if step.name == "scan":
        consts, carry, rows = _of_scan(params, inputs)
        return _loop(params["jaxpr"], consts, carry, rows, step, rule)
    body = params.get("jaxpr", params.get("call_jaxpr"))
    inner = getattr(body, "jaxpr", body)
    if len(getattr(inner, "invars", ())) != len(inputs) or not hasattr(inner, "eqns"):
        return None
    results = _run(body, inputs, step, rule)
    return results if len(results) == len(step.outputs) else None


def _of_scan(params: dict[str, Any], inputs: list[Any]) -> list[list[Any]]:
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


def _joined(values: Sequence[Any], rule: Rule) -> Any:
    result = values[0]
    for value in values[1:]:
        result = rule.join(result, value)
    return result

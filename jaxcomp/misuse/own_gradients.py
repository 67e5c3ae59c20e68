"""Gradients that were summed or averaged over the workers before a compressed mean sees them.

JAX's types of replication say it of a gradient that is already summed, until an operation with
other data hides it. The equations behind a gradient say the rest:

* A loss that was averaged within the differentiated function has gradients that differ between
  workers and are too small (`_Loss`).
* The gradient of a replicated parameter ends with a sum over the workers that JAX adds to the
  reverse pass. A gradient is refused if it comes from such a sum, however it was scaled, cast,
  added to other data or carried through loops since, and does not also depend on a gradient that
  was not summed (`_Pooled`). A sum *within* a reverse pass is no mistake: it is the transpose of
  batch statistics, of gathered features or of a loss over all workers, and is multiplied by
  this worker's data before it becomes a gradient, which therefore differs between workers.
* A gradient that the program itself has summed is refused in the same way; one that it has averaged
  is right but was sent dense, so it is refused only if nothing of this worker's own was added, and
  warned about elsewhere (`_Pooled`).
"""

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.ad_checkpoint import checkpoint_name

from jaxcomp.backend import axes
from jaxcomp.misuse import lineage
from jaxcomp.types import AxisName, PyTree

_SUMS = {"psum", "psum_invariant"}
_REDUCTIONS = _SUMS | {"pmax", "pmin", "all_gather", "all_gather_invariant"}
"""Their results are the same on all workers."""

_SAME_VALUE = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "name",
    "optimization_barrier",
    "reshape",
    "squeeze",
}

_MARK = "jaxcomp.own_gradients"
"""The name of an identity on checked gradients, by which the whole program is checked later."""


def check(updates: PyTree, axis_name: AxisName) -> PyTree:
    """Refuses gradients that the program has summed or averaged already.

    It reads the equations behind traced gradients, so it finds nothing where a gradient is an
    argument of a compiled function, or where nothing is compiled. Where the gradients are an
    argument of an inner program, such as a branch of a conditional, `check_program` finds them.

    Returns:
        The gradients, marked for `check_program`.

    Raises:
        ValueError: for gradients of a loss that was averaged before it was differentiated, and for
            gradients that are the same on all workers, or were before other data was added.
    """
    typed = axes.typed(axis_name)
    if typed:
        _check_types(updates, axis_name)
    names, size = axes.names(axis_name), axes.size(axis_name)
    if size == 1:
        return updates
    leaves = jax.tree.leaves(updates)
    if typed:
        rule = _Loss(names)
        lineage.trace(leaves, rule)
        if rule.found:
            raise ValueError(
                "`updates` are gradients of a loss that was averaged over the workers of "
                f"{axis_name!r} inside the differentiated function (jax.lax.pmean, or psum and a "
                f"division). JAX divides their gradients by {size} then, and their mean is "
                f"{size} times too small. Return this worker's own loss from the function, and "
                "average its value after jax.value_and_grad. A mean over unequal counts: return "
                "sum(losses) * axis_size / psum(count)."
            )
    pooled = _Pooled(axis_name)
    _refuse(pooled, [fact.bits for fact in lineage.trace(leaves, pooled)])
    floats = [isinstance(x, core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    marked = [
        checkpoint_name(x, pooled.mark) if floating else x
        for x, floating in zip(leaves, floats, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(updates), marked)


def _check_types(updates: PyTree, axis_name: AxisName) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if jnp.size(leaf) and not axes.varies(leaf, axis_name):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"`updates` must be this worker's own gradients, but '{name}' is already the same "
                f"on all workers of {axis_name!r}. Either JAX has summed it: take the gradient "
                f"with jaxcomp.value_and_grad(loss_fn, {axis_name!r}), or at jaxcomp.local(params, "
                f"{axis_name!r}). Or the step has averaged it: leave out the jax.lax.pmean (or "
                "psum) of the gradients before compressed_mean."
            )


def check_program(
    steps: Sequence[lineage.Step], known: Iterable[tuple[Any, bool]], axis_name: AxisName
) -> None:
    """Refuses gradients in inner programs, where `check` could not see how they were made.

    Args:
        steps: the equations of the mapped function.
        known: its arguments, each with whether it differs between workers.
        axis_name: the axes of the workers.

    Raises:
        ValueError: as `check` does.
    """
    if not lineage.contain(steps, {"name"}):
        return
    rule = _Pooled(axis_name)
    lineage.flow(steps, rule, [(leaf, _Fact(_LOCAL if own else 0)) for leaf, own in known])
    for bits in rule.marked.values():
        _refuse(rule, [bits])


def _refuse(rule: "_Pooled", found: Sequence[int]) -> None:
    """Raises for gradients that were summed already, and warns of those that were averaged.

    Gradients that do not depend on this worker's data, nor on pooled data, are ignored.
    """
    axis_name = rule.axis_name
    summed = [bits for bits in found if bits & (_JAX | _SUM) and not bits & _OWN]
    if any(bits & _JAX for bits in summed):
        raise ValueError(
            "`updates` must be this worker's own gradients, and JAX has summed them over the "
            f"workers of {axis_name!r} already, because they are gradients of replicated "
            f"parameters: take them with jaxcomp.value_and_grad(loss_fn, {axis_name!r}), or at "
            f"jaxcomp.local(params, {axis_name!r})."
        )
    same = any(bits & _OF_ALL for bits in found) and not any(bits & _DIFFERS for bits in found)
    averaged = [bits for bits in found if bits & _MEAN and not bits & _OWN]
    if summed or same or (rule.typed and any(not bits & _LOCAL for bits in averaged)):
        raise ValueError(
            "`updates` must be this worker's own gradients, and the program has averaged them over "
            f"the workers of {axis_name!r} already: leave out the jax.lax.pmean (or psum) of the "
            "gradients, or of the parameters' update, before compressed_mean."
        )
    if averaged:
        warnings.warn(
            f"`updates` are gradients that the program has averaged over the workers of "
            f"{axis_name!r} already, uncompressed, so that nothing is saved: leave out the "
            "jax.lax.pmean (or psum) of the gradients before compressed_mean",
            stacklevel=5,
        )


_OWN, _LOCAL, _POOLED, _JAX, _SUM, _MEAN = (1 << bit for bit in range(6))
_DIFFERS = _OWN | _LOCAL
_OF_ALL = _POOLED | _SUM | _MEAN


class _Fact(NamedTuple):
    """Bit flags, and the value of a constant number.

    A value depends on: a gradient of this worker (`_OWN`), other data of one worker (`_LOCAL`),
    other data of all workers (`_POOLED`), a gradient that a reverse pass has summed over the
    workers (`_JAX`), and one that the program has summed (`_SUM`) or averaged (`_MEAN`).
    """

    bits: int
    number: float | None = None


class _Pooled:
    """The sources of a value; see the module's description for the rule."""

    constant = _Fact(0)

    def __init__(self, axis_name: AxisName):
        self.axis_name = axis_name
        self.names, self.typed = set(axes.names(axis_name)), axes.typed(axis_name)
        self.size, self.mark = axes.size(axis_name), f"{_MARK}:{axes.names(axis_name)}"
        self.marked: dict[Any, int] = {}

    def unknown(self, atom: Any) -> _Fact:
        return _Fact(_LOCAL if atom is None or not self._is_same(atom) else 0)

    def literal(self, value: Any) -> _Fact:
        return _Fact(0, _number(value))

    def join(self, one: _Fact, other: _Fact) -> _Fact:
        number = one.number if one.number == other.number else None
        return _Fact(one.bits | other.bits, number)

    def decide(self, step: lineage.Step, by: _Fact, results: list[_Fact]) -> list[_Fact]:
        del step
        bits = _as_data(by.bits)
        return [_Fact(fact.bits | bits, None if bits else fact.number) for fact in results]

    def through(self, step: lineage.Step, inputs: list[_Fact]) -> _Fact:
        bits = self._bits(step, inputs)
        if step.outputs and self._is_same(*step.outputs):
            bits &= ~_DIFFERS
        if not _holds_gradients(step.outputs):
            bits = _as_data(bits)
        if step.name == "name" and step.params["name"] == self.mark:
            self.marked[step.outputs[0]] = bits
        known = step.name in _SAME_VALUE and len(inputs) == 1
        return _Fact(bits, inputs[0].number if known else None)

    def _bits(self, step: lineage.Step, inputs: list[_Fact]) -> int:
        if step.name == "axis_index":
            return _LOCAL
        each = [fact.bits for fact in inputs]
        if step.name == "select_n":
            each[0] = _as_data(each[0])
        bits = functools.reduce(int.__or__, each, 0)
        if not bits:
            return 0
        if step.is_reverse():
            return self._reverse(step, bits)
        if _reduces(step, self.names):
            summed = bits & _OWN and step.name in _SUMS
            pooled = _SUM if summed else _POOLED if bits & _DIFFERS else 0
            return bits & ~_DIFFERS | pooled
        if bits & _SUM and self._averages(step, inputs):
            return bits & ~_SUM | _MEAN
        return bits

    def _reverse(self, step: lineage.Step, bits: int) -> int:
        """The flags of a result of a reverse pass."""
        if not self.typed:
            return bits | _OWN if bits & _DIFFERS else bits
        if step.name in _SUMS and self.names & set(lineage.axes_of(step)):
            return bits & ~_DIFFERS | _JAX
        return bits & ~_DIFFERS if self._is_same(*step.outputs) else bits | _OWN

    def _averages(self, step: lineage.Step, inputs: list[_Fact]) -> bool:
        """Whether it divides a sum over the workers by their number, or by a sum over them."""
        if step.name == "div":
            by = inputs[1]
            if by.number is not None:
                return is_multiple(by.number, self.size)
            return not by.bits & _DIFFERS and bool(by.bits & _OF_ALL)
        numbers = [fact.number for fact in inputs if fact.number is not None]
        return step.name == "mul" and any(is_multiple(_inverse(x), self.size) for x in numbers)

    def _is_same(self, *atoms: Any) -> bool:
        """Whether the types say that the values are the same on all workers."""
        return self.typed and not any(self.names <= axes.varying_axes(atom.aval) for atom in atoms)


def _as_data(bits: int) -> int:
    """The flags of a value that gradients decide, but are no part of: a predicate or a count."""
    return (_LOCAL if bits & _DIFFERS else 0) | (_POOLED if bits & (_OF_ALL | _JAX) else 0)


def _holds_gradients(outputs: Sequence[Any]) -> bool:
    dtypes = [getattr(atom.aval, "dtype", None) for atom in outputs]
    return any(d is None or jnp.issubdtype(d, jnp.inexact) for d in dtypes)


_SUMMED, _DIVIDED = "summed", "divided"


class _Loss:
    """Follows the initial cotangent of a reverse pass up to the transpose of a sum.

    A number, of a constant; `_SUMMED`, of a sum over the workers; `_DIVIDED`, of a constant that a
    reverse pass has divided by the number of workers, or by such a sum; else None. The transpose of
    a sum over workers types its cotangent as varying. If that cotangent is such a quotient, it is
    the mean of the workers' losses that was differentiated.
    """

    constant = None

    def __init__(self, names: tuple):
        self.names, self.found = set(names), False
        self.size = math.prod(axes.size(name) for name in names)

    def unknown(self, atom: Any) -> None:
        del atom

    def literal(self, value: Any) -> float | None:
        return _number(value)

    def join(self, one: Any, other: Any) -> Any:
        return one if one == other else None

    def decide(self, step: lineage.Step, by: Any, results: list[Any]) -> list[Any]:
        return [self.join(by, fact) for fact in results] if step.name == "cond" else results

    def through(self, step: lineage.Step, inputs: list[Any]) -> Any:
        if step.name in _SAME_VALUE and len(inputs) >= 1:
            return inputs[0] if len(step.outputs) == 1 else None
        if step.name in ("pvary", "pcast"):
            if (
                inputs[0] == _DIVIDED
                and self.names & set(lineage.axes_of(step))
                and step.is_reverse()
            ):
                self.found = True
            return None
        if _reduces(step, self.names):
            return _SUMMED
        if step.name in ("div", "mul"):
            return self._scale(step, *inputs)
        if step.name == "neg" and isinstance(inputs[0], float):
            return -inputs[0]
        if step.name in ("max", "add") and _SUMMED in inputs and _DIVIDED not in inputs:
            return _SUMMED if any(isinstance(each, float) for each in inputs) else None
        return _DIVIDED if _DIVIDED in inputs else None

    def _scale(self, step: lineage.Step, one: Any, other: Any) -> Any:
        if _DIVIDED in (one, other):
            return _DIVIDED
        if step.name == "mul" and not isinstance(one, float):
            one, other = other, one
        if not isinstance(one, float):
            return None
        by = other if step.name == "div" or not isinstance(other, float) else _inverse(other)
        counts = isinstance(by, float) and is_multiple(by, self.size)
        mean = counts or (by == _SUMMED and step.name == "div")
        if mean and one != 0 and step.is_reverse():
            return _DIVIDED
        return one / by if isinstance(by, float) and by != 0 else None


def _number(value: Any) -> float | None:
    number = np.asarray(value)
    return float(number) if number.ndim == 0 and number.dtype.kind in "iuf" else None


def is_multiple(number: float, size: int) -> bool:
    """Whether it is a multiple of the number of workers, such as the number of all examples."""
    parts = number / size
    return math.isfinite(parts) and parts > 0.5 and abs(parts - round(parts)) < 1e-4 * parts


def _inverse(number: float) -> float:
    return 1 / number if number else math.inf


def _reduces(step: lineage.Step, names: set) -> bool:
    whole = step.params.get("axis_index_groups") is None
    return step.name in _REDUCTIONS and whole and names <= set(lineage.axes_of(step))

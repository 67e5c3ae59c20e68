"""Mistakes in the loss of a sharded model, found in its equations.

* It computes with a part of a leaf, or with the key of its messages, as a norm over all parameters
  does. Parts may be moved and carried into loops, and must be made whole before anything else
  depends on them (`_PART`).
* It divides a sum over this worker's examples by a sum over all workers, or by the number of all
  examples. The loss is averaged over the workers afterwards, and is then too small (`_SHRUNK`).
* It divides by a count of this worker's own examples, which may differ from others' (`_UNEVEN`).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxcomp.backend import axes
from jaxcomp.misuse import lineage
from jaxcomp.misuse.own_gradients import is_multiple
from jaxcomp.types import PyTree

_WHOLE = "jaxcomp.whole"
"""The name of an identity on parts, and on the keys of their messages, where they are gathered."""


def mark(tree: PyTree) -> PyTree:
    """Parts and keys, marked as those that are made whole from here on."""
    return jax.tree.map(lambda x: checkpoint_name(x, _WHOLE), tree)


def check(
    loss: Any,
    averaged: Sequence[Any],
    others: Sequence[Any],
    parts: Iterable[Any],
    examples: Iterable[Any],
    names: tuple[str, ...],
) -> None:
    """Refuses a loss, and values beside it, that are wrong after the mean over the workers.

    Args:
        loss: the loss.
        averaged: the numbers beside it that are averaged over the workers, too.
        others: all other values that the loss returns.
        parts: the parts of leaves, and the key of their messages.
        examples: this worker's batch.
        names: the axes of the workers.

    Raises:
        ValueError: naming the line of the user's program.
    """
    known = [(x, _Fact(_PART | _PLAIN)) for x in parts]
    known += [(x, _Fact(_EXAMPLES | _PLAIN)) for x in examples]
    facts = lineage.trace([loss, *averaged, *others], _Scale(names), known)
    means = facts[: 1 + len(averaged)]
    if at := _lines(facts, _PART):
        raise ValueError(
            f"`params` must be made whole where the loss uses them, got a loss that computes with "
            f"this device's parts{at[0]}, as a norm over all parameters does: use jaxcomp.gathered "
            "inside the function of a layer, and add up there what each layer contributes. For a "
            "penalty of the weights chain optax.add_decayed_weights(...) with the optimizer"
        )
    over = repr(names[0] if len(names) == 1 else names)
    right = f"total * jax.lax.axis_size({over}) / jax.lax.psum(count, {over})"
    if math.prod(axes.size(name) for name in names) == 1:
        return
    if at := _lines(means, _SHRUNK):
        raise ValueError(
            "`loss_fn` must return means over this worker's own batch, got a sum over it, divided "
            f"by that of all workers{at[0]}: the workers' mean is then too small by their number. "
            f"A mean over unequal counts is {right}"
        )
    if at := _lines(means[1:], _COUNT):
        raise ValueError(
            "`loss_fn` must return means over this worker's own batch beside its value, got "
            f"a sum or a count{at[0]}, which would be averaged: return jax.lax.psum(sum, "
            f"{over}) of it"
        )
    if at := _lines(means, _UNEVEN):
        raise ValueError(
            f"`loss_fn` divides by a count of this worker's own batch{at[0]}: where counts differ, "
            "the workers' mean is not the mean over all examples, nor are gradients. Return "
            f"{right} instead"
        )


def _lines(facts: Iterable["_Fact"], bit: int) -> list[str]:
    """Where the values came to have this flag."""
    return [f" at {fact.at}" if fact.at else "" for fact in facts if fact.bits & bit]


_PART, _EXAMPLES, _WEIGHTS, _PLAIN, _SUM, _OVER, _SHRUNK, _WHOLES, _COUNT, _UNEVEN = (
    1 << bit for bit in range(10)
)
_SOURCES = _PART | _EXAMPLES | _WEIGHTS
_ADDED = {"add", "add_any", "concatenate", "max", "min", "scatter-add", "select_n", "sub"}
_MOVED = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "name", "neg"),
    *("optimization_barrier", "pcast", "pvary", "reshape", "rev", "slice", "squeeze", "transpose"),
}


class _Fact(NamedTuple):
    """The sources of a value, and its scale.

    Attributes:
        bits: it depends on parts of leaves (`_PART`), examples (`_EXAMPLES`), or whole leaves
            (`_WEIGHTS`); and it is linear in something that is not multiplied by the number of
            workers (`_PLAIN`), in a sum over all workers (`_SUM`), in a quotient by one (`_OVER`)
            of something plain (`_SHRUNK`), in numbers of an integer dtype (`_WHOLES`), in a sum of
            these or of own examples (`_COUNT`), or in a quotient by one (`_UNEVEN`).
        number: the value of a constant.
        terms: how many elements were added up; 0 where it is not known.
        at: the user's line from which the value has `_PART`, `_SHRUNK` or `_UNEVEN`.
    """

    bits: int = _PLAIN
    number: float | None = None
    terms: int = 1
    at: str = ""


class _Scale:
    """The rule of these facts."""

    constant = _Fact()

    def __init__(self, names: tuple[str, ...]):
        self.names, self.size = set(names), math.prod(axes.size(name) for name in names)

    def unknown(self, atom: Any) -> _Fact:
        del atom
        return _Fact()

    def literal(self, value: Any) -> _Fact:
        number = np.asarray(value)
        finite = number.ndim == 0 and number.dtype.kind in "iuf" and np.isfinite(number)
        return _Fact(0 if finite and number == 0 else _PLAIN, float(number) if finite else None)

    def join(self, one: _Fact, other: _Fact) -> _Fact:
        number = one.number if one.number == other.number else None
        terms = one.terms if one.terms == other.terms else 0
        return _Fact(one.bits | other.bits, number, terms, one.at or other.at)

    def decide(self, step: lineage.Step, by: _Fact, results: list[_Fact]) -> list[_Fact]:
        del step
        more = by.bits & _SOURCES
        return [x._replace(bits=x.bits | more, at=x.at or by.at) for x in results]

    def through(self, step: lineage.Step, inputs: list[_Fact]) -> _Fact:
        if step.name == "name" and step.params["name"] == _WHOLE:
            return _Fact(_WEIGHTS | _PLAIN)
        if not inputs:
            return _Fact()
        sources = functools.reduce(int.__or__, (x.bits for x in inputs)) & _SOURCES
        at = next((x.at for x in inputs if x.at), "")
        if sources & _PART and step.name not in _MOVED:
            at = at or step.line()
        found = self._scale(step, inputs)
        if found.bits & (_SHRUNK | _UNEVEN | _COUNT):
            at = at or step.line()
        return found._replace(bits=found.bits | sources, at=at)

    def _scale(self, step: lineage.Step, inputs: list[_Fact]) -> _Fact:
        """The result's scale; its sources are known already."""
        one = inputs[0]
        if step.name in _SUMS and self.names <= set(lineage.axes_of(step)):
            return _Fact(_PLAIN | _SUM)
        if step.name == "reduce_sum":
            shape = step.inputs[0].aval.shape
            terms = one.terms * math.prod(shape[i] for i in lineage.axes_of(step))
            own = one.bits & _EXAMPLES
            counts = own and (one.bits & _WHOLES or not one.bits & _WEIGHTS)
            return _Fact(one.bits | (_COUNT if counts else 0), None, terms)
        if step.name == "div":
            return self._quotient(one, inputs[1], step.inputs[1].aval.shape)
        if step.name == "integer_pow" and step.params["y"] == -1:
            return self._quotient(_Fact(), one, step.inputs[0].aval.shape)
        if step.name in ("mul", "dot_general"):
            return self._product(one, inputs[1])
        if step.name == "convert_element_type" and step.inputs[0].aval.dtype.kind in "iub":
            return one._replace(bits=one.bits | _WHOLES)
        if step.name in _MOVED:
            return one
        if step.name in _ADDED:
            given = inputs[1:] if step.name == "select_n" else inputs
            summands = [x for x in given if x.number is None] or given
            return functools.reduce(self.join, summands)._replace(number=None)
        return _Fact()

    def _quotient(self, one: _Fact, by: _Fact, shape: tuple[int, ...]) -> _Fact:
        bits = one.bits & ~(_COUNT | _WHOLES)
        if by.number:
            return self._multiple(one._replace(bits=bits), 1 / by.number)
        if by.bits & _SUM:
            shrunk = bits & _PLAIN and not bits & _SUM
            bits = bits & ~_SUM | _OVER | (_SHRUNK if shrunk else 0)
        elif by.bits & _COUNT and not by.bits & _WEIGHTS and math.prod(shape) == 1:
            bits |= _UNEVEN
        return _Fact(bits, None, 0)

    def _product(self, one: _Fact, other: _Fact) -> _Fact:
        if other.number is not None:
            return self._multiple(one, other.number)
        if one.number is not None:
            return self._multiple(other, one.number)
        bits = (one.bits | other.bits) & (_OVER | _UNEVEN | _WHOLES)
        bits |= one.bits & other.bits & _PLAIN
        for x, y in ((one, other), (other, one)):
            if x.bits & _SHRUNK and y.bits & _PLAIN and not y.bits & (_SUM | _SHRUNK):
                bits |= _SHRUNK
            if x.bits & _UNEVEN and y.bits & _OVER:
                bits &= ~_UNEVEN  # Weighted by a worker's share of all examples.
        return _Fact(bits)

    def _multiple(self, x: _Fact, by: float) -> _Fact:
        """A value that is multiplied by a constant."""
        if by == 0:
            return _Fact(0, 0.0)
        bits, terms, n, inverse = x.bits, x.terms, self.size, 1 / by
        if not by.is_integer():
            bits &= ~(_COUNT | _WHOLES)
        if is_multiple(by, n):
            bits &= ~(_PLAIN | _SHRUNK)
        elif is_multiple(inverse, n) and bits & _SUM:
            bits &= ~_SUM
        elif bits & _EXAMPLES and terms > 1 and math.isclose(inverse, n * terms):
            bits |= _SHRUNK
        if terms > 1 and 1 <= inverse < math.inf:
            each = round(inverse)
            terms = terms // each if math.isclose(each, inverse) and terms % each == 0 else 0
        number = None if x.number is None else x.number * by
        return _Fact(bits, number, terms)


_SUMS = {"psum", "psum_invariant", "all_gather", "all_gather_invariant"}

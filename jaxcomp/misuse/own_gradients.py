"""Gradients that were averaged over the workers before a compressed mean sees them.

JAX's types of replication say it of a gradient that is already summed. Two mistakes they do not
say: a loss that was averaged within the differentiated function, whose gradients differ between
workers and are too small, and, without those types, a mean that was left in the program.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxcomp.backend import axes
from jaxcomp.misuse import lineage
from jaxcomp.types import AxisName, PyTree

_REDUCTIONS = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
"""Their results are the same on all workers."""

_SAME_VALUE = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "optimization_barrier",
    "reshape",
    "squeeze",
}


def check(updates: PyTree, axis_name: AxisName) -> None:
    """Refuses gradients that the program has averaged already.

    It reads the equations behind traced gradients, so it finds nothing where a gradient is an
    argument of the compiled function, or where nothing is compiled.

    Raises:
        ValueError: for gradients of a loss that was averaged before it was differentiated, and for
            gradients that are the same on all workers.
    """
    names, size = axes.names(axis_name), axes.size(axis_name)
    if size == 1:
        return
    leaves = jax.tree.leaves(updates)
    if axes.typed(axis_name):
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
    elif _all_same(lineage.trace(leaves, _Sameness(names))):
        raise ValueError(
            "`updates` must be this worker's own gradients, and the program has averaged them over "
            f"the workers of {axis_name!r} already: leave out the jax.lax.pmean (or psum) of the "
            "gradients, or of the parameters' update, before compressed_mean."
        )


def _all_same(found: list[int]) -> bool:
    """Whether some gradients are pooled and none varies; constants, such as zeros, are ignored."""
    return _POOLED in found and not any(each & _VARIES for each in found)


_VARIES, _POOLED = 1, 2


class _Sameness:
    """Bit flags: a value depends on data of one worker, or on pooled data of all workers."""

    unknown, constant = _VARIES, 0

    def __init__(self, names: tuple):
        self.names = set(names)

    def literal(self, value: Any) -> int:
        del value
        return 0

    def join(self, one: int, other: int) -> int:
        return one | other

    def through(self, step: lineage.Step, inputs: list[int]) -> int:
        if step.name == "axis_index":
            return _VARIES
        depends = 0
        for each in inputs:
            depends |= each
        if depends & _VARIES and _reduces(step, self.names):
            return _POOLED
        return depends


_SUMMED, _DIVIDED = "summed", "divided"


class _Loss:
    """Follows the initial cotangent of a reverse pass up to the transpose of a sum.

    A number, of a constant; `_SUMMED`, of a sum over the workers; `_DIVIDED`, of a constant that a
    reverse pass has divided by the number of workers, or by such a sum; else None. The transpose of
    a sum over workers types its cotangent as varying. If that cotangent is such a quotient, it is
    the mean of the workers' losses that was differentiated.
    """

    unknown = constant = None

    def __init__(self, names: tuple):
        self.names, self.found = set(names), False
        self.size = math.prod(axes.size(name) for name in names)

    def literal(self, value: Any) -> float | None:
        number = np.asarray(value)
        return float(number) if number.ndim == 0 and number.dtype.kind in "iuf" else None

    def join(self, one: Any, other: Any) -> Any:
        return one if one == other else None

    def through(self, step: lineage.Step, inputs: list[Any]) -> Any:
        if step.name in _SAME_VALUE and len(inputs) >= 1:
            return inputs[0] if len(step.outputs) == 1 else None
        if step.name in ("pvary", "pcast"):
            if inputs[0] == _DIVIDED and self.names & set(_over(step)) and step.is_reverse():
                self.found = True
            return None
        if _reduces(step, self.names):
            return _SUMMED
        if step.name in ("div", "mul"):
            return self._scaled(step, *inputs)
        if step.name == "neg" and isinstance(inputs[0], float):
            return -inputs[0]
        if step.name in ("max", "add") and _SUMMED in inputs and _DIVIDED not in inputs:
            return _SUMMED if any(isinstance(each, float) for each in inputs) else None
        return _DIVIDED if _DIVIDED in inputs else None

    def _scaled(self, step: lineage.Step, one: Any, other: Any) -> Any:
        if _DIVIDED in (one, other):
            return _DIVIDED
        if step.name == "mul" and not isinstance(one, float):
            one, other = other, one
        if not isinstance(one, float):
            return None
        by = other if step.name == "div" or not isinstance(other, float) else _inverse(other)
        mean = self._counts(by) if isinstance(by, float) else by == _SUMMED and step.name == "div"
        if mean and one != 0 and step.is_reverse():
            return _DIVIDED
        return one / by if isinstance(by, float) and by != 0 else None

    def _counts(self, number: float) -> bool:
        """Whether it is a multiple of the number of workers, such as the number of all examples."""
        parts = number / self.size
        return math.isfinite(parts) and parts > 0.5 and abs(parts - round(parts)) < 1e-4 * parts


def _inverse(number: float) -> float:
    return 1 / number if number else math.inf


def _reduces(step: lineage.Step, names: set) -> bool:
    whole = step.params.get("axis_index_groups") is None
    return step.name in _REDUCTIONS and whole and names <= set(_over(step))


def _over(step: lineage.Step) -> tuple:
    over = step.params.get("axes", step.params.get("axis_name", ()))
    return over if isinstance(over, tuple) else (over,)

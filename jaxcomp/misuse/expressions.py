"""The expression by which a program computes each element of its results.

Programs that compute an element by the same expression compute the same value, whatever the shapes
of their arrays are. Nothing is computed here, so arrays of any size cost nothing.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

_IN_PLACE = {
    "copy",
    "copy_p",
    "expand_dims",
    "name",
    "optimization_barrier",
    "pcast",
    "pvary",
    "squeeze",
}
"""Primitives whose results are their operands, perhaps in another shape."""

# fmt: off
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp",
    "clz", "conj", "convert_element_type",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "sub", "tan", "tanh", "xor",
}
# fmt: on
"""Primitives that compute each element of the result from the same element of the operands."""

_CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that run a program on their operands, and the parameter that is the program."""

_OF_SHAPES = {"dimensions", "out_sharding", "shape", "sharding"}
"""Parameters of elementwise primitives that do not change the value of an element."""


class NotElementwiseError(Exception):
    """A program combines elements of a leaf, or treats them by their place."""


class Value(NamedTuple):
    """An array, by how its elements are computed.

    Attributes:
        expression: the number of the expression of an element.
        shape: the shape.
        leaf: the leaf from whose elements, each in its own place, the elements are computed; None
            if they do not depend on a leaf.
        uniform: whether all elements are equal.
    """

    expression: int
    shape: tuple[int, ...]
    leaf: Hashable = None
    uniform: bool = False


class Expressions:
    """Numbers the expressions of several programs: equal expressions have equal numbers.

    Args:
        exact: whether expressions in other dtypes are others.
    """

    def __init__(self, exact: bool = True) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._exact = exact

    def leaf(self, name: Hashable, like: Any, leaf: Hashable) -> Value:
        """An array of a leaf whose element is the variable `name`."""
        return Value(self._number("variable", name), tuple(like.shape), leaf)

    def scalar(self, name: Hashable) -> Value:
        """A number that is the variable `name`."""
        return Value(self._number("variable", name), (), uniform=True)

    def run(self, program: Any, inputs: Sequence[Value]) -> list[Value]:
        """The results of a traced program.

        Args:
            program: the program, with its constants.
            inputs: its arguments.

        Raises:
            NotElementwiseError: if a result needs other elements of a leaf than its own.
        """
        inner = getattr(program, "jaxpr", program)
        consts = map(self._constant, getattr(program, "consts", ()))
        held = dict(zip(inner.constvars, consts, strict=True))
        held.update(zip(inner.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return self._constant(atom.val) if isinstance(atom, Literal) else held[atom]

        for eqn in inner.eqns:
            found = self._apply(eqn, [read(atom) for atom in eqn.invars])
            held.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _number(self, *key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _constant(self, value: Any) -> Value:
        shape = tuple(np.shape(value))
        try:
            array = np.asarray(value)
        except Exception:  # A traced number, or a key of JAX: it is itself only.
            return Value(self._number("object", id(value)), shape, uniform=not shape)
        if not self._exact and array.dtype.kind in "fV":  # V: of 16 bits.
            array = array.astype(jnp.bfloat16)
        if array.size and (array == array.flat[0]).all():
            key = "constant", array.dtype.str, array.flat[0].tobytes()
            return Value(self._number(*key), shape, uniform=True)
        known = array.dtype.str, array.tobytes()
        return Value(self._number("constants", *known, *shape), shape)

    def _apply(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """The results of one equation."""
        name, params = eqn.primitive.name, eqn.params
        if name == "cond":
            return self._conditional(params["branches"], *inputs)
        if name in _CALLS:
            return self.run(params[_CALLS[name]], inputs)
        shapes = [tuple(atom.aval.shape) for atom in eqn.outvars]
        moves = name in ("broadcast_in_dim", "reshape") and params.get("dimensions") is None
        same = name in _IN_PLACE or (not self._exact and name == "convert_element_type")
        sums_nothing = name.startswith("reduce_") and params.get("axes") == ()  # As of a number.
        if same or sums_nothing or (moves and _fits(inputs, shapes)):
            return [
                x._replace(shape=shape)
                for x, shape in zip(inputs[: len(shapes)], shapes, strict=True)
            ]
        if any(x.leaf is not None for x in inputs):
            return [self._elementwise(name, params, inputs, *shapes[:1])]
        elementwise = name in _ELEMENTWISE and all(x.uniform for x in inputs)
        operands = [x.expression if elementwise else (x.expression, x.shape) for x in inputs]
        known = name, _text(params, elementwise), *operands
        return [
            Value(
                self._number(*known, at, *(() if elementwise else shape)),
                shape,
                uniform=elementwise or not shape,
            )
            for at, shape in enumerate(shapes)
        ]

    def _elementwise(
        self, name: str, params: dict[str, Any], inputs: list[Value], shape: tuple[int, ...] = ()
    ) -> Value:
        """A result of which each element is computed from the same element of its leaf."""
        rows = [x for x in inputs if x.leaf is not None]
        if name in ("scan", "while"):
            raise NotElementwiseError(f"`{name}` runs on a leaf, and loops are not read")
        if name not in _ELEMENTWISE or any(x.shape != shape for x in rows):
            raise NotElementwiseError(f"`{name}` combines elements of a leaf")
        if len({x.leaf for x in rows}) > 1:
            raise NotElementwiseError(f"`{name}` combines two leaves")
        if not all(x.uniform for x in inputs if x.leaf is None):
            raise NotElementwiseError(f"`{name}` treats elements by their place, as noise does")
        operands = [x.expression for x in inputs]
        return Value(self._number(name, _text(params, True), *operands), shape, rows[0].leaf)

    def _conditional(self, branches: Sequence[Any], which: Value, *inputs: Value) -> list[Value]:
        """The results of a conditional, which are those of either branch."""
        if which.leaf is not None:
            raise NotElementwiseError("`cond` decides by elements of a leaf")
        found = []
        for each in zip(*(self.run(branch, inputs) for branch in branches), strict=True):
            leaves = {x.leaf for x in each} - {None}
            if len(leaves) > 1:
                raise NotElementwiseError("`cond` combines two leaves")
            if leaves and not all(x.uniform for x in each if x.leaf is None):
                raise NotElementwiseError("`cond` treats elements by their place, as noise does")
            if len(set(each)) > 1:
                number = self._number("cond", which.expression, *(x.expression for x in each))
                uniform = all(x.uniform for x in each)
                each = (Value(number, each[0].shape, *leaves, uniform=uniform),)
            found.append(each[0])
        return found


def _fits(inputs: list[Value], shapes: list[tuple[int, ...]]) -> bool:
    """Whether an array of another shape has the same elements in the same order."""
    (shape,), x = shapes, inputs[0]
    return x.uniform or (x.leaf is not None and np.prod(x.shape) == np.prod(shape))


def _text(params: dict[str, Any], elementwise: bool) -> str:
    """The parameters of a primitive on which the value of an element depends."""
    left_out = _OF_SHAPES if elementwise else set()
    return str({key: value for key, value in params.items() if key not in left_out})

"""How the results of a loss change if each example of its batch occurs twice.

A mean stays what it is, a sum doubles, and rows of examples become twice as many. So the program
is traced for the batch and for one of twice the length, and the two are read equation by equation:

    sum over an axis of n, then of 2 n elements: · 2      a constant that was n and is 2 n: · 2
    product: product of the factors                      quotient: their quotient

A quotient of two sums is a mean. If the second one is computed from the examples, as a count of
tokens that are no padding is, the mean over the workers is another one than that over all examples
wherever counts differ.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from jaxcomp.misuse import lineage, lines
from jaxcomp.types import PyTree


class Scale(NamedTuple):
    """The change of a value if each example of the batch occurs twice.

    Attributes:
        by: the factor by which it is multiplied; None if it is not known.
        batch: whether it depends on the batch.
        fixed: whether it is a constant of the program.
        counted: the user's line of a quotient by a sum that depends on the batch, or "".
        at: the user's line of the last sum over examples, or "".
        each: of a constant with few elements, such as a shape, the factor of each.
    """

    by: float | None = 1.0
    batch: bool = False
    fixed: bool = False
    counted: str = ""
    at: str = ""
    each: tuple[float, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether it is known to grow, or to shrink, with the number of examples, by powers of two.

        A mean that is divided by n - 1 changes too, by another factor.
        """
        return self.by not in (1, None) and math.frexp(self.by)[0] == 0.5


class Found(NamedTuple):
    """The change of one result.

    Attributes:
        scale: what becomes of it.
        rows: the dimension along which it has examples; None if it has none.
    """

    scale: Scale
    rows: int | None


class _OtherError(Exception):
    """The two programs do not have the same equations."""


def results(
    function: Callable[..., PyTree], args: Sequence[Any], batches: Iterable[int]
) -> list[Found] | None:
    """How each result of a function changes with the number of examples.

    Args:
        function: the function, of trees of arrays.
        args: its arguments, or their shapes.
        batches: the numbers of those of which each array has examples along its first dimension.

    Returns:
        One for each leaf of the results, in their order; None if the program is not the same for
        twice the number of examples.
    """
    batches = set(batches)
    likes = [jax.tree.map(_like, arg) for arg in args]
    longer = [jax.tree.map(_twice, arg) if n in batches else arg for n, arg in enumerate(likes)]
    one = jax.make_jaxpr(function)(*likes)
    try:
        two = jax.make_jaxpr(function)(*longer)
    except Exception:  # Whatever a program may raise that is written for one number of examples.
        return None
    try:
        begin = [
            Scale(batch=n in batches) for n, arg in enumerate(likes) for _ in jax.tree.leaves(arg)
        ]
        scales = _run(one, two, begin)
        rows = [_grown(x.shape, y.shape) for x, y in _pairs(one.out_avals, two.out_avals)]
    except _OtherError:
        return None
    return [Found(*pair) for pair in zip(scales, rows, strict=True)]


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _twice(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) if x.shape else x


def _grown(one: tuple[int, ...], two: tuple[int, ...]) -> int | None:
    """The dimension that is twice as long."""
    found = [at for at, (n, m) in enumerate(zip(one, two, strict=True)) if n != m]
    if len(found) > 1 or any(two[at] != 2 * one[at] for at in found):
        raise _OtherError
    return found[0] if found else None


def _pairs(one: Sequence[Any], two: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    if len(one) != len(two):
        raise _OtherError
    return zip(one, two, strict=True)


def _constants(one: Any, two: Any) -> Scale:
    """Of a constant of both programs."""
    x, y = (None if isinstance(c, Tracer) else c for c in (one, two))
    if x is None or y is None or jnp.shape(x) != jnp.shape(y):
        return Scale(fixed=x is not None)
    return _literals(x, y)


def _literals(one: Any, two: Any) -> Scale:
    if jnp.size(one) > _FEW or jnp.shape(one) != jnp.shape(two):
        return Scale(fixed=True)
    x, y = np.asarray(one), np.asarray(two)
    known = x.dtype.kind in "iuf" and np.isfinite(x).all() and np.isfinite(y).all()
    if not known or (x == y).all():
        return Scale(fixed=True)
    pairs = zip(x.ravel().tolist(), y.ravel().tolist(), strict=True)
    each = tuple(1.0 if a == b else b / a if a else math.nan for a, b in pairs)
    same = each[0] if len({*each}) == 1 and not math.isnan(each[0]) else None
    return Scale(same, fixed=True, each=each)


def _run(of_one: Any, of_two: Any, args: list[Scale]) -> list[Scale]:
    """The scales of the results of a program."""
    one, two = (getattr(found, "jaxpr", found) for found in (of_one, of_two))
    consts = [getattr(found, "consts", ()) for found in (of_one, of_two)]
    known = dict(
        zip([*one.constvars, *one.invars], [*map(_constants, *consts), *args], strict=True)
    )

    def read(x: Any, y: Any) -> Scale:
        return _literals(x.val, y.val) if isinstance(x, Literal) else known[x]

    for x, y in _pairs(one.eqns, two.eqns):
        if x.primitive.name != y.primitive.name:
            raise _OtherError
        inputs = [read(*pair) for pair in _pairs(x.invars, y.invars)]
        known.update(zip(x.outvars, _step(x, y, inputs), strict=True))
    return [read(*pair) for pair in _pairs(one.outvars, two.outvars)]


def _step(one: Any, two: Any, inputs: list[Scale]) -> list[Scale]:
    """The scales of the results of an equation."""
    name, count = one.primitive.name, len(one.outvars)
    batch = any(x.batch for x in inputs)
    if name == "scan":
        return _scan(one, two, inputs)
    if name == "while":
        return _while(one, two, inputs)
    if name == "cond":
        branches = _pairs(one.params["branches"], two.params["branches"])
        each = [_run(a, b, inputs[1:]) for a, b in branches]
        return [_join(found) for found in zip(*each, strict=True)]
    programs = [found for eqn in (one, two) if (found := _program(eqn.params, inputs))]
    if len(programs) == 2:
        found = _run(programs[0], programs[1], inputs)
        if len(found) == count:
            return found
    if not inputs:
        return [Scale(fixed=True)] * count
    counted = next((x.counted for x in inputs if x.counted), "")
    at = next((x.at for x in inputs if x.at), "")
    found = Scale(_factor(one, two, inputs), batch, all(x.fixed for x in inputs), counted, at)
    if name == "div" and inputs[1].batch and (inputs[1].by or 1) != 1:
        found = found._replace(counted=counted or lines.of_source(one.source_info) or "a quotient")
    if name in ("convert_element_type", "copy"):
        found = found._replace(each=inputs[0].each)
    if name in ("reduce_sum", "dot_general") and found.by != inputs[0].by:
        found = found._replace(at=lines.of_source(one.source_info))
    return [found] * count


def _factor(one: Any, two: Any, inputs: list[Scale]) -> float | None:
    """The factor of the result of an equation without a program inside."""
    name = one.primitive.name
    given = inputs[1:] if name == "select_n" else inputs  # A condition is no number.
    if name == "reduce_prod" and inputs[0].each:  # As of a shape.
        product = math.prod(inputs[0].each)
        return None if math.isnan(product) else product
    by = [x.by for x in given if x.by is not None]
    if len(by) < len(given):
        return None
    if name == "mul":
        return by[0] * by[1]
    if name == "div":
        return by[0] / by[1] if by[1] else None
    if name == "reduce_sum":
        return by[0] * _longer(one, two, one.params["axes"])
    if name == "dot_general":
        contracted = one.params["dimension_numbers"][0][0]
        return by[0] * by[1] * _longer(one, two, contracted)
    if name == "integer_pow":
        return by[0] ** one.params["y"] if by[0] else None
    if name in _ADDED:
        rest = {x.by for x in given if not x.fixed} or {x.by for x in given}
        if name == "select_n" and all(x.fixed for x in given):  # The other one is for n = 0.
            rest = rest - {1.0} or rest
        return rest.pop() if len(rest) == 1 else None
    if all(b == 1 for b in by):
        return 1.0
    return by[0] if name in _LINEAR and all(b == 1 for b in by[1:]) else None


def _longer(one: Any, two: Any, axes: Sequence[int]) -> float:
    """How many more elements are added up."""
    x, y = (eqn.invars[0].aval.shape for eqn in (one, two))
    sizes = [(x[at], y[at]) for at in axes]
    return float(np.prod([m / n if n else 1 for n, m in sizes])) if sizes else 1.0


def _scan(one: Any, two: Any, inputs: list[Scale]) -> list[Scale]:
    consts, begin, rows = lineage.parts_of_scan(one.params, inputs)

    def body(carry: list[Scale]) -> list[Scale]:
        return _run(one.params["jaxpr"], two.params["jaxpr"], [*consts, *carry, *rows])

    carry = _settled(begin, body)
    found = body(carry)
    if one.params["length"] != two.params["length"]:  # Whether the loop adds up is not known.
        carry = [x if x.fixed else x._replace(by=None) for x in carry]
    return [*carry, *found[len(carry) :]]


def _while(one: Any, two: Any, inputs: list[Scale]) -> list[Scale]:
    before, inside = one.params["cond_nconsts"], one.params["body_nconsts"]
    consts, begin = inputs[before : before + inside], inputs[before + inside :]

    def body(carry: list[Scale]) -> list[Scale]:
        return _run(one.params["body_jaxpr"], two.params["body_jaxpr"], [*consts, *carry])

    return _settled(begin, body)


def _settled(carry: list[Scale], body: Callable[[list[Scale]], list[Scale]]) -> list[Scale]:
    """The scales of what a loop carries, which hold before and after each turn."""
    for _ in range(4):
        after = [_join(pair) for pair in zip(carry, body(carry)[: len(carry)], strict=True)]
        if after == carry:
            return carry
        carry = after
    return [x._replace(by=None) for x in carry]


def _join(each: Sequence[Scale]) -> Scale:
    """Of a value that is one of these."""
    vary = [x for x in each if not x.fixed] or list(each)
    by = {x.by for x in vary}
    return Scale(
        by.pop() if len(by) == 1 else None,
        any(x.batch for x in each),
        all(x.fixed for x in each),
        next((x.counted for x in each if x.counted), ""),
        next((x.at for x in each if x.at), ""),
    )


def _program(params: dict[str, Any], inputs: list[Scale]) -> Any:
    """The program in an equation that has these inputs; None if there is none."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner: Any = getattr(params.get(name), "jaxpr", params.get(name))
        if hasattr(inner, "eqns") and len(inner.invars) == len(inputs):
            return params[name]
    return None


_FEW = 16
"""Elements of the largest constant that is compared."""
_ADDED = {"add", "add_any", "concatenate", "max", "min", "select_n", "sub", "scatter-add", "clamp"}
_LINEAR = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "gather", "name", "neg"),
    *("optimization_barrier", "pcast", "pvary", "reshape", "rev", "slice", "squeeze", "transpose"),
    *("abs", "reduce_max", "reduce_min", "psum", "psum_invariant", "real", "sharding_constraint"),
    *("cumsum", "dynamic_update_slice", "expand_dims", "reduce_precision", "split"),
}

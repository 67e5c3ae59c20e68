"""Codecs and reducers as a user types them, read without running the text as Python.

Only names that a user types are known: those of `jaxcomp` and of its public families, with and
without their module. Calls of them, literals and arithmetic of numbers are read; nothing else is.
"""

import ast
import difflib
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

_FAMILIES = ("codecs", "aggregates", "gates", "graphs", "federated", "optimizers", "reducers")
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_LARGEST = 1024
"""Largest base and exponent of a power, so that it is computed at once."""


def evaluate(text: str) -> Any:
    """Builds a codec or reducer from an expression, such as its `repr`.

    Args:
        text: calls of public names with literals, `jaxcomp.` before them or not; a name alone is
            called without arguments.

    Raises:
        ValueError: for another name, other syntax, or arguments that the call does not take.

    Example:
        >>> import jaxcomp
        >>> evaluate("top_k(fraction=1/100)") == evaluate("jaxcomp.top_k(0.01)")
        True
        >>> evaluate("sign") == jaxcomp.sign()
        True
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError):
        raise _wrong(text) from None
    try:
        return _value(tree, text)
    except (TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{text!r} cannot be built: {error}") from None


def import_named(text: str) -> Any:
    """Imports `module:name`; modules of the working directory are found too.

    Raises:
        ValueError: if there is no such module or name.
    """
    module, _, name = text.partition(":")
    sys.path.insert(0, "")
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot find {text!r}: {error}") from None
    finally:
        sys.path.remove("")


@functools.cache
def names() -> dict[str, Any]:
    """Every public class and function, by its name."""
    found, jaxcomp = {}, importlib.import_module("jaxcomp")
    for module in (*(getattr(jaxcomp, family) for family in _FAMILIES), jaxcomp):
        for name, value in inspect.getmembers(module):
            own = getattr(value, "__module__", "").startswith("jaxcomp.")
            if name[0] != "_" and callable(value) and own:
                found[name] = value
    return found


def _value(node: ast.expr, text: str) -> Any:
    """The value of a part of the expression."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Tuple(items) | ast.List(items):
            return tuple(_value(item, text) for item in items)
        case ast.Dict(keys, values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {_value(key, text): _value(value, text) for key, value in pairs if key}
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, text)
        case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
            return _number(type(op), _value(left, text), _value(right, text), text)
        case ast.Name("inf" | "nan" as name):
            return float(name)
        case ast.Name() | ast.Attribute():
            return _call(_made(node, text), [], {}, text)
        case ast.Call(function, args, keywords) if all(word.arg for word in keywords):
            settings = {str(word.arg): _value(word.value, text) for word in keywords}
            return _call(_made(function, text), [_value(a, text) for a in args], settings, text)
    raise _wrong(text)


def _number(op: type, left: Any, right: Any, text: str) -> Any:
    if not all(isinstance(value, int | float) for value in (left, right)):
        raise _wrong(text)
    if op is ast.Pow and max(abs(left), abs(right)) > _LARGEST:
        raise ValueError(f"powers in {text!r} must be of numbers up to {_LARGEST}")
    return _ARITHMETIC[op](left, right)


def _made(node: ast.expr, text: str) -> Any:
    """The class or function of a dotted name."""
    dotted = ast.unparse(node)
    parts = dotted.removeprefix("jaxcomp.").split(".")
    if len(parts) == 2 and parts[0] in _FAMILIES:
        own = vars(importlib.import_module(f"jaxcomp.{parts[0]}"))
        found = names().get(parts[1]) if parts[1] in own else None
    else:
        found = names().get(dotted.removeprefix("jaxcomp."))
    if found is None:
        near = difflib.get_close_matches(parts[-1], names(), 1)
        said = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"{dotted!r}{_within(dotted, text)} must be a public name of jaxcomp or "
            f"jaxcomp.codecs, such as qsgd_inf; `jaxcomp codecs` lists the recipes{said}"
        )
    return found


def _call(made: Any, args: list[Any], settings: dict[str, Any], text: str) -> Any:
    signature = inspect.signature(made)
    try:
        signature.bind(*args, **settings)
    except TypeError as error:
        taken = ", ".join(
            str(p).partition(":")[0] + ("" if p.default is p.empty else f"={p.default!r}")
            for p in signature.parameters.values()
        )
        raise ValueError(
            f"{made.__name__!r}{_within(made.__name__, text)} must have the arguments ({taken}): "
            f"{error}"
        ) from None
    return made(*args, **settings)


def _within(name: str, text: str) -> str:
    """Where a name is, unless it is all of the text."""
    return "" if name == text.strip() else f" in {text!r}"


def _wrong(text: str) -> ValueError:
    return ValueError(
        f"{text!r} must be an expression such as sign, 'qsgd_inf(bits=4)' or "
        "'top_k(fraction=1/100)'"
    )

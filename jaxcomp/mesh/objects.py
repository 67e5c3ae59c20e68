"""Arguments with objects that change in place, or with leaves that are not arrays.

Frameworks have such objects, and modules with leaves that JAX does not take, such as functions.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxcomp.backend import axes
from jaxcomp.base import adapter
from jaxcomp.base.adapter import Objects
from jaxcomp.types import AxisName, PyTree

_ARRAY = "array"
"""Stands for an array among the static leaves of a tree."""


def dynamic(tree: PyTree) -> list[bool]:
    """Marks the leaves that JAX computes with: arrays, and numbers outside of modules."""
    modules = tuple(kind for one in adapter.present() for kind in one.modules)

    def is_module(node: Any) -> bool:
        return isinstance(node, modules)

    found = []
    for node in jax.tree.leaves(tree, is_leaf=is_module if modules else None):
        numbers = () if is_module(node) else (bool, int, float, complex)
        found += [
            (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))
            or hasattr(leaf, "__jax_array__")
            or isinstance(leaf, numbers)
            for leaf in jax.tree.leaves(node)
        ]
    return found


def select(tree: PyTree, marks: Iterable[bool]) -> tuple[PyTree, tuple]:
    """Splits a tree into its marked leaves, with None elsewhere, and the rest; see `combine`."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = list(zip(leaves, marks, strict=True))
    kept = jax.tree.unflatten(treedef, [leaf if mark else None for leaf, mark in pairs])
    return kept, (treedef, tuple(_ARRAY if mark else (leaf,) for leaf, mark in pairs))


def combine(kept: PyTree, rest: tuple, is_leaf: Callable[[Any], bool] | None = None) -> PyTree:
    """The inverse of `select`; nodes that `is_leaf` names may stand in the place of leaves."""
    treedef, others = rest
    leaves = iter(jax.tree.leaves(kept, is_leaf=is_leaf))
    return jax.tree.unflatten(treedef, [next(leaves) if o is _ARRAY else o[0] for o in others])


def vary(tree: PyTree, axis_name: AxisName) -> PyTree:
    """The tree with its arrays typed as different on each worker, where such types exist."""
    kept, rest = select(tree, dynamic(tree))
    return combine(axes.vary(kept, axis_name), rest)


class Rest(NamedTuple):
    """The leaves of a step's arguments that are not arrays; hashable.

    Attributes:
        numbers: the arguments with objects.
        kind: who knows these objects.
        structure: that of those arguments together, since they may share arrays.
        static: the leaves that are not arrays, by argument.
    """

    numbers: tuple[int, ...] = ()
    kind: Objects | None = None
    structure: Any = None
    static: tuple = ()


class _Root:
    """A path key that prints as nothing."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
class Returned:
    """The results of a step with such arguments: arrays, static leaves, and state of objects."""

    def __init__(self, results: PyTree, states: PyTree, static: tuple):
        self.results = results
        self.states = states
        self.static = static

    def tree_flatten_with_keys(self):
        return ((_Root(), self.results), (_Root(), self.states)), self.static

    @classmethod
    def tree_unflatten(cls, static, children):
        results, states = children
        return cls(results, states, static)


def part(args: tuple, batches: Iterable[int]) -> tuple[list, Rest]:
    """Arguments as trees of arrays, and the rest of them.

    A batch is a tree of arrays already: a string in it would compile the step for each batch.
    """
    plain, found, static = list(args), [], []
    kind = adapter.objects_of(tuple(arg for n, arg in enumerate(args) if n not in batches))
    for number, arg in enumerate(args):
        if number in batches:
            continue
        if kind is not None and kind.found(arg):
            found.append(number)
        elif not all(marks := dynamic(arg)):
            plain[number], rest = select(arg, marks)
            static.append((number, rest))
    structure = None
    if kind is not None:
        structure, trees = kind.split(tuple(args[number] for number in found))
        for number, tree in zip(found, trees, strict=True):
            plain[number] = tree
    return plain, Rest(tuple(found), kind, structure, tuple(static))


def call(step: Callable[..., Any], args: list, rest: Rest, axis_name: AxisName) -> PyTree:
    """Calls the step with whole arguments, inside the mapped function."""
    for number, others in rest.static:
        args[number] = combine(args[number], others)
    if rest.kind is None:
        results, states = step(*args), ()
        _check_none(results)
    else:
        results, states = _with_objects(rest.kind, step, args, rest, axis_name)
    marks = dynamic(results)
    if rest.kind is None and all(marks):
        return results
    kept, static = select(results, marks)
    return Returned(kept, states, static)


def _with_objects(
    kind: Objects, step: Callable[..., Any], args: list, rest: Rest, axis_name: AxisName
) -> tuple[PyTree, list[PyTree]]:
    """The results of a step, and the arrays of the objects after it."""
    held = kind.merge(rest.structure, [args[number] for number in rest.numbers])
    for number, one in zip(rest.numbers, held, strict=True):
        args[number] = one
    with kind.averaged(held, axis_name):
        results = step(*args)
        _check_none(results)
    structure, states = kind.split(held)
    if structure != rest.structure:
        raise ValueError(
            f"`step` must not change the structure of {kind.name} objects, got one that adds or "
            "removes variables, or changes attributes that are not arrays. Call model.train() "
            "before the step, and return intermediate values instead of sowing them."
        )
    return results, states


def _check_none(results: PyTree) -> None:
    kind = adapter.objects_of(results)
    if kind is not None:
        raise ValueError(
            f"`step` must not return {kind.name} objects, since those among its arguments change "
            "in place. Return the loss and other arrays."
        )


def finish(args: tuple, rest: Rest, returned: PyTree) -> PyTree:
    """Returns the step's results and updates the objects among its arguments."""
    if not isinstance(returned, Returned):
        return returned
    if rest.kind is not None:
        rest.kind.update(tuple(args[number] for number in rest.numbers), returned.states)
    return combine(returned.results, returned.static)

"""Arguments with nnx objects, or with leaves that are not arrays.

Objects of flax's nnx change in place, and may share variables. Modules of equinox have leaves that
JAX does not take, such as functions. Neither library is imported here.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import core, lax

from jaxcomp.backend import axes
from jaxcomp.mesh import per_worker
from jaxcomp.types import AxisName, PyTree

_ARRAY = "array"
"""Stands for an array among the static leaves of a tree."""


def nnx() -> Any:
    """flax's nnx, if it is in use; None otherwise."""
    return sys.modules.get("flax.nnx")


def _is_object(node: Any) -> bool:
    flax = nnx()
    return flax is not None and isinstance(node, flax.Pytree | flax.Variable)


def _is_state(node: Any) -> bool:
    flax = nnx()
    return flax is not None and isinstance(node, flax.State)


def _objects(tree: PyTree) -> list:
    if nnx() is None:
        return []
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: _is_object(node) or _is_state(node))
    return list(filter(_is_object, nodes))


def holds(tree: PyTree) -> bool:
    """Whether a tree contains nnx objects: modules, optimizers, metrics, variables.

    An `nnx.State`, as `nnx.split` returns it, is a tree of arrays.
    """
    return bool(_objects(tree))


def _is_module(node: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def dynamic(tree: PyTree) -> list[bool]:
    """Marks the leaves that JAX computes with: arrays, and numbers outside of equinox modules."""
    found = []
    for node in jax.tree.leaves(tree, is_leaf=_is_module if "equinox" in sys.modules else None):
        numbers = () if _is_module(node) else (bool, int, float, complex)
        found += [
            _is_array(leaf) or hasattr(leaf, "__jax_array__") or isinstance(leaf, numbers)
            for leaf in jax.tree.leaves(node)
        ]
    return found


def select(tree: PyTree, marks: Iterable[bool]) -> tuple[PyTree, tuple]:
    """Splits a tree into its marked leaves, with None elsewhere, and the rest; see `combine`."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = list(zip(leaves, marks, strict=True))
    kept = jax.tree.unflatten(treedef, [leaf if mark else None for leaf, mark in pairs])
    return kept, (treedef, tuple(_ARRAY if mark else (leaf,) for leaf, mark in pairs))


def combine(kept: PyTree, rest: tuple) -> PyTree:
    """The inverse of `select`."""
    treedef, others = rest
    leaves = iter(jax.tree.leaves(kept))
    return jax.tree.unflatten(treedef, [next(leaves) if o is _ARRAY else o[0] for o in others])


def vary(tree: PyTree, axis_name: AxisName) -> PyTree:
    """The tree with its arrays typed as different on each worker, where such types exist."""
    kept, rest = select(tree, dynamic(tree))
    return combine(axes.vary(kept, axis_name), rest)


def renew(args: tuple, init: Callable[[Any, PyTree], PyTree]) -> None:
    """Makes the state of new nnx optimizers for all workers, if its shapes depend on their number.

    An optimizer does not know its parameters. They are taken from the object for which the
    optimizer's transformation makes a state of the same shapes.
    """
    found = _objects(args)
    for optimizer in found:
        if not isinstance(optimizer, nnx().Optimizer):
            continue
        leaves = jax.tree_util.tree_leaves_with_path(optimizer.opt_state)
        alone = [leaf.shape[0] == 1 for path, leaf in leaves if per_worker.shared_out(path)]
        if not any(alone) or isinstance(optimizer.step[...], core.Tracer) or optimizer.step[...]:
            continue
        for model in found:
            params = nnx().as_pure(nnx().state(model, optimizer.wrt))
            like = jax.eval_shape(optimizer.tx.init, params)
            if _likes(like) == _likes(nnx().as_pure(optimizer.opt_state)):
                nnx().update(optimizer.opt_state, nnx().state(init(optimizer.tx, params)))
                break


def _likes(tree: PyTree) -> list[tuple]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), leaf.shape, leaf.dtype) for path, leaf in found]


class Rest(NamedTuple):
    """The leaves of a step's arguments that are not arrays; hashable.

    Attributes:
        numbers: the arguments with nnx objects.
        graph: the nnx graph of those arguments together, since they may share variables.
        static: the leaves that are not arrays, by argument.
    """

    numbers: tuple[int, ...] = ()
    graph: Any = None
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
    for number, arg in enumerate(args):
        if number in batches:
            continue
        if holds(arg):
            found.append(number)
        elif not all(marks := dynamic(arg)):
            plain[number], rest = select(arg, marks)
            static.append((number, rest))
    graph = None
    if found:
        graph, state = nnx().split(tuple(args[number] for number in found))
        for position, number in enumerate(found):
            plain[number] = state.get(position, nnx().State({}))
    return plain, Rest(tuple(found), graph, tuple(static))


def call(step: Callable[..., Any], args: list, rest: Rest, axis_name: AxisName) -> PyTree:
    """Calls the step with whole arguments, inside the mapped function."""
    for number, others in rest.static:
        args[number] = combine(args[number], others)
    held, before = (), {}
    if rest.numbers:
        state = {position: args[number] for position, number in enumerate(rest.numbers)}
        held = nnx().merge(rest.graph, nnx().State(state))
        before = values(held)
        for position, number in enumerate(rest.numbers):
            args[number] = held[position]
    results = step(*args)
    if holds(results):
        raise ValueError(
            "`step` must not return nnx objects, since those among its arguments change in place. "
            "Return the loss and other arrays."
        )
    marks = dynamic(results)
    if not rest.numbers and all(marks):
        return results
    kept, static = select(results, marks)
    states = ()
    if rest.numbers:
        average(held, axis_name, before)
        graph, states = nnx().split(held)
        if graph != rest.graph:
            raise ValueError(
                "`step` must not change the structure of nnx objects, got one that adds or removes "
                "variables, or changes attributes that are not arrays. Call model.train() before "
                "the step, and return intermediate values instead of sowing them."
            )
    return Returned(kept, states, static)


def finish(args: tuple, rest: Rest, returned: PyTree) -> PyTree:
    """Returns the step's results and updates the nnx objects among its arguments."""
    if not isinstance(returned, Returned):
        return returned
    if rest.numbers:
        nnx().update(tuple(args[number] for number in rest.numbers), returned.states)
    return combine(returned.results, returned.static)


def values(held: PyTree) -> dict[int, Any]:
    """The value of each variable by identity, to detect later which variables were written."""
    found = nnx().iter_graph(held)
    return {id(node): _value(node) for _, node in found if isinstance(node, nnx().Variable)}


def average(held: PyTree, axis_name: AxisName, before: dict[int, Any]) -> None:
    """Averages, in place, the batch statistics and metrics of nnx objects that workers wrote.

    Args:
        held: the objects, within the mapped function.
        axis_name: the axis of the workers.
        before: their `values` before the workers wrote.

    Raises:
        ValueError: for a metric whose mean over the workers may not be that of all data.
    """
    flax, typed = nnx(), axes.typed(axis_name)

    def differs(variable: Any) -> bool:
        value = _value(variable)
        if typed:
            return any(axes.varies(x, axis_name) for x in jax.tree.leaves(value))
        return value is not before.get(id(variable))

    for path, node in list(flax.iter_graph(held)):
        if isinstance(node, flax.BatchStat) and differs(node):
            _set_mean(node, axis_name)
        if not isinstance(node, flax.metrics.Average | flax.metrics.Welford):
            continue
        own = [x for _, x in flax.iter_graph(node) if isinstance(x, flax.Variable)]
        if not any(map(differs, own)):
            continue
        if isinstance(node, flax.metrics.Welford) or not typed:
            raise ValueError(
                f"the metric at {_shown(path)} differs between the workers of {axis_name!r}, and "
                "its mean over them may not be the metric of all data: give it values that are the "
                "same on all workers (jax.lax.pmean), or use nnx.metrics.Average or Accuracy with "
                "`check_vma=True`"
            )
        if not differs(node.count):
            _set_mean(node.total, axis_name)


class DiffersError(ValueError):
    """A result is typed as different between workers."""


def check_alike(returned: PyTree, axis_name: AxisName) -> None:
    """Raises a `DiffersError` for variables of nnx objects that are typed as different."""
    states = returned.states if isinstance(returned, Returned) else ()
    for path, leaf in jax.tree_util.tree_leaves_with_path(states):
        if not per_worker.marked(path) and axes.varies(leaf, axis_name):
            raise DiffersError(
                f"the variable at {jax.tree_util.keystr(path)} differs between the workers of "
                f"{axis_name!r} after the call. Batch statistics (nnx.BatchStat) and metrics that "
                "count the same number of values on each worker are averaged; average anything "
                "else with jax.lax.pmean where it is written"
            )


def _set_mean(variable: Any, axis_name: AxisName) -> None:
    variable.set_value(jax.tree.map(lambda x: mean(x, axis_name), _value(variable)))


def _value(variable: Any) -> Any:
    return variable.get_value()


def mean(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The mean over the workers, in the array's dtype."""
    return lax.pmean(x, axis_name).astype(jnp.result_type(x))


def _shown(path: tuple) -> str:
    return ".".join(map(str, path))

"""Flax's nnx: objects that change in place, and may share variables."""

import contextlib
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxcomp.backend import axes
from jaxcomp.base.adapter import Adapter, Objects
from jaxcomp.types import AxisName, PyTree

_OF_COPIES = (
    "jaxcomp: an nnx object was made outside of the function that changes it. Merge it inside of "
    "the loss with nnx.merge(graphdef, state, copy=True) and return its new state with "
    "has_aux=True, or pass the object itself to the step and to the loss of "
    "jaxcomp.value_and_grad, which change it in place."
)


def _nnx() -> Any:
    """The module, which the user has imported."""
    return sys.modules["flax.nnx"]


@final
class NnxObjects(Objects):
    """Modules, optimizers, metrics and variables."""

    name = "nnx"
    averages = (
        "Batch statistics (nnx.BatchStat) and metrics that count the same number of values on "
        "each worker"
    )

    def found(self, tree: PyTree) -> list:
        """An `nnx.State`, as `nnx.split` returns it, is a tree of arrays."""
        nnx = _nnx()
        kinds = (nnx.Pytree, nnx.Variable)
        nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, (*kinds, nnx.State)))
        return [node for node in nodes if isinstance(node, kinds)]

    def split(self, held: tuple) -> tuple[Hashable, list[PyTree]]:
        graph, state = _nnx().split(held)
        return graph, _by_object(state, len(held))

    def part(
        self, held: tuple, at: Sequence[int], wrt: Any
    ) -> tuple[Hashable, list[PyTree], list[PyTree], list[PyTree]]:
        nnx = _nnx()
        wanted = nnx.filterlib.to_predicate(nnx.Param if wrt is None else wrt)

        def is_differentiated(path: tuple, variable: Any) -> bool:
            return path[0] in at and wanted(path[1:], variable)

        graph, *states = nnx.split(held, is_differentiated, nnx.RngKey, ...)
        chosen, keys, rest = (_by_object(state, len(held)) for state in states)
        return graph, chosen, keys, rest

    def merge(self, structure: Hashable, *parts: Sequence[PyTree]) -> tuple:
        nnx = _nnx()
        states = [nnx.State(dict(enumerate(trees))) for trees in parts]
        return nnx.merge(structure, *states, copy=True)

    def update(self, held: tuple, trees: Sequence[PyTree]) -> None:
        nnx = _nnx()
        nnx.update(held, nnx.State(dict(enumerate(trees))))

    @contextlib.contextmanager
    def averaged(self, held: tuple, axis_name: AxisName) -> Iterator[None]:
        nnx = _nnx()
        variables = [node for _, node in nnx.iter_graph(held) if isinstance(node, nnx.Variable)]
        before = {id(variable): variable.get_value() for variable in variables}
        yield
        _average(held, axis_name, before)


@final
class Nnx(Adapter):
    """Objects can be arguments of a step; their variables may be boxes of arrays."""

    module = "flax.nnx"
    complete = "Variable"
    objects = NnxObjects()
    hints = {("Cannot mutate", "from a different trace level"): _OF_COPIES}
    # A model is a tree with its counters; nothing else says there that it is one.
    of_leaves = "Of an nnx model, take nnx.state(model, nnx.Param)."

    def boxed(self, tree: PyTree, *, add: bool) -> PyTree:
        kind = _nnx().Variable

        def rename(node: Any) -> Any:
            names = node.get_metadata().get("out_sharding") if isinstance(node, kind) else None
            if names:
                after = (None, *names) if add else tuple(names)[1:]
                spec = isinstance(names, PartitionSpec)
                node.set_metadata(out_sharding=PartitionSpec(*after) if spec else after)
            return node

        return jax.tree.map(rename, tree, is_leaf=lambda node: isinstance(node, kind))

    def plain(self, tree: PyTree) -> PyTree:
        """`nnx.Optimizer` keeps its state in variables of other types than `nnx.Param`."""
        kind = _nnx().Variable

        def value(node: Any) -> Any:
            return node.get_value() if isinstance(node, kind) else node

        return jax.tree.map(value, tree, is_leaf=lambda node: isinstance(node, kind))


def _by_object(state: Any, count: int) -> list[PyTree]:
    """The part of the state of all objects that belongs to each of them."""
    return [state.get(place, _nnx().State({})) for place in range(count)]


def _average(held: tuple, axis_name: AxisName, before: dict[int, Any]) -> None:
    """Averages batch statistics and metrics that differ from their values before."""
    nnx, typed = _nnx(), axes.typed(axis_name)

    def differs(variable: Any) -> bool:
        value = variable.get_value()
        if typed:
            return any(axes.varies(x, axis_name) for x in jax.tree.leaves(value))
        return value is not before.get(id(variable))

    for path, node in list(nnx.iter_graph(held)):
        if isinstance(node, nnx.BatchStat) and differs(node):
            _set_mean(node, axis_name)
        if not isinstance(node, nnx.metrics.Average | nnx.metrics.Welford):
            continue
        own = [x for _, x in nnx.iter_graph(node) if isinstance(x, nnx.Variable)]
        if not any(map(differs, own)):
            continue
        if isinstance(node, nnx.metrics.Welford) or not typed:
            raise ValueError(
                f"the metric at {'.'.join(map(str, path))} differs between the workers of "
                f"{axis_name!r}, and its mean over them may not be the metric of all data: give "
                "it values that are the same on all workers (jax.lax.pmean), or use "
                "nnx.metrics.Average or Accuracy with `check_vma=True`"
            )
        if not differs(node.count):
            _set_mean(node.total, axis_name)


def _set_mean(variable: Any, axis_name: AxisName) -> None:
    """The mean over the workers, in the array's dtype."""

    def mean(x: jax.Array) -> jax.Array:
        return lax.pmean(x, axis_name).astype(jnp.result_type(x))

    variable.set_value(jax.tree.map(mean, variable.get_value()))

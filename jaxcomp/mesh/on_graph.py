"""Memory over a graph of workers, which knows the graph that it belongs to."""

import hashlib
import textwrap
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.base import Graph, Mirrored, adapter
from jaxcomp.mesh import axis_types, per_worker
from jaxcomp.types import Array, PyTree


@jax.tree_util.register_pytree_with_keys_class
class OnGraph(metaclass=adapter.Stored):
    """The memory of links whose mirrors are sums with the weights of one graph.

    The name of the graph is part of the tree and of every path, hence of a checkpoint: memory over
    another graph has another tree, wherever it comes from.

    Args:
        tree: the memory.
        graph: the graph.
    """

    def __init__(self, tree: PyTree, graph: Graph):
        self.tree = tree
        self.graph = graph

    @property
    def stored(self) -> str:
        """The name of the graph: that of its class, and a digest of its settings."""
        digest = hashlib.sha256(repr(self.graph).encode()).hexdigest()
        return f"on_{type(self.graph).__name__}_{digest[:16]}"

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey(self.stored), self.tree),), self.graph

    @classmethod
    def tree_unflatten(cls, graph, children):
        return cls(children[0], graph)

    def __repr__(self) -> str:
        return f"OnGraph({self.tree!r}, graph={self.graph!r})"


def is_on_graph(node: Any) -> bool:
    """Whether a node of a tree is an `OnGraph`."""
    return isinstance(node, OnGraph)


def own(memory: PyTree, graph: Graph) -> PyTree:
    """The tree of an `OnGraph`, which must belong to this graph.

    Raises:
        ValueError: if it belongs to another graph.
    """
    if not is_on_graph(memory) or memory.graph != graph:
        held = _name_of(memory.graph) if is_on_graph(memory) else "an unnamed graph"
        raise ValueError(
            f"`state` must be one over the graph {_name_of(graph)}, got one over {held}: the "
            "mirrors of jaxcomp.Shift are sums with the weights of one graph. Move it with "
            "jaxcomp.resize_workers(tx, state, params, workers), where `tx` has the new graph and "
            "`workers` may be the same number"
        )
    return memory.tree


def nodes(tree: PyTree) -> list[OnGraph]:
    """All memory over graphs in a tree."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_on_graph) if is_on_graph(node)]


@axis_types.automatically
def move_memory(state: PyTree, like: PyTree, counts: set, workers: int) -> PyTree:
    """The state with its memory over the graphs of `like`.

    Of as many workers as before, each keeps its own memory, and every mirror is summed anew. For
    other numbers of workers the memory only changes its name: all of them get the mean of all
    memories and mirrors, which is right on every graph.

    Args:
        state: a state, outside of the mapped function.
        like: a state, or its shapes and dtypes, with the new graphs, as many as in the state.
        counts: the leading axes of the memory in the state.
        workers: the new number of workers.
    """
    graphs = iter([node.graph for node in nodes(like)])

    def change(node: Any) -> Any:
        if not is_on_graph(node):
            return node
        graph = next(graphs)
        same = graph == node.graph or counts != {(workers,)}
        return OnGraph(node.tree if same else _sum_mirrors(node.tree, graph, workers), graph)

    return jax.tree.map(change, state, is_leaf=is_on_graph)


def _sum_mirrors(memory: PyTree, graph: Graph, workers: int) -> PyTree:
    """The memory of these workers with the mirrors `sᵢ = Σⱼ wᵢⱼ hⱼ`."""
    (matrix,) = graph.matrices(workers)

    def total(own: Array) -> Array:
        wide = jnp.promote_types(own.dtype, jnp.float32)
        weights = jnp.asarray(matrix, wide)
        return jnp.tensordot(weights, own.astype(wide), 1, precision="highest").astype(own.dtype)

    def again(node: Any) -> Any:
        if not isinstance(node, Mirrored):
            return node
        mirror = jax.tree.map(total, node.own.tree)
        kind, order = node.mirror.kind, node.mirror.order
        return Mirrored(node.own, per_worker.PerWorker(mirror, kind, order))

    return jax.tree.map(again, memory, is_leaf=lambda node: isinstance(node, Mirrored))


def _name_of(graph: Graph) -> str:
    return textwrap.shorten(repr(graph), 80, placeholder="…")

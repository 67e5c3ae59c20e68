"""What differs between workers: the memory in an optimizer state, and how to tell it apart."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcomp import axes
from jaxcomp.protocols import AxisName, PyTree

_MARK = "per_worker"
"""In a leaf's path, says that it differs between workers, even where a library (flax's nnx) has
turned the `PerWorker` node itself into a plain mapping."""


@jax.tree_util.register_pytree_with_keys_class
class PerWorker:
    """A tree that differs between workers.

    Its arrays carry a leading axis: of length 1 inside the mapped function, of length `workers`
    outside. Everything in an optimizer state that is not inside a `PerWorker` is replicated.

    Args:
        tree: arrays with that leading axis.
        kind: what they are ("residual", "momentum", "shift", "codec", "local"); `resize_workers`
            reads it.
    """

    def __init__(self, tree: PyTree, kind: str):
        self.tree = tree
        self.kind = kind
        _tell_flax()

    @classmethod
    def wrap(cls, tree: PyTree, kind: str, axis_name: AxisName | None = None) -> "PerWorker":
        """One worker's tree, without the leading axis, as a `PerWorker`."""
        tree = jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
        if axis_name is not None and axes.bound(axis_name):
            tree = axes.vary(tree, axis_name)
        return cls(tree, kind)

    def own(self) -> PyTree:
        """This worker's tree, without the leading axis.

        Raises:
            ValueError: if the leading axis is not of length 1.
        """
        for leaf in jax.tree.leaves(self.tree):
            if leaf.ndim == 0 or leaf.shape[0] != 1:
                raise ValueError(
                    "`state` holds the memory of several workers where one worker's was expected "
                    f"(a leaf of shape {leaf.shape}). Inside the mapped function the leading axis "
                    "is 1: pass the state with in_specs=jaxcomp.state_specs(state, axis_name), or "
                    "let jaxcomp.data_parallel do it."
                )
        return jax.tree.map(lambda x: x[0], self.tree)

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey(_MARK), self.tree),), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(children[0], kind)

    def __repr__(self) -> str:
        return f"PerWorker({self.tree!r}, kind={self.kind!r})"


def _tell_flax() -> None:
    """Lets flax's msgpack checkpoints hold a `PerWorker`, if flax is in use at all."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or PerWorker in serialization._STATE_DICT_REGISTRY:
        return
    serialization.register_serialization_state(
        PerWorker,
        lambda node: {_MARK: serialization.to_state_dict(node.tree)},
        lambda node, state: PerWorker(
            serialization.from_state_dict(node.tree, state[_MARK]), node.kind
        ),
    )


def is_per_worker(node: Any) -> bool:
    """Whether a node of a tree is a `PerWorker`."""
    return isinstance(node, PerWorker)


def marked(path: tuple) -> bool:
    """Whether the leaf at this path differs between workers."""
    return any(_MARK in (getattr(k, "name", None), getattr(k, "key", None)) for k in path)


def replicated(state: PyTree) -> PyTree:
    """The part of a state that is the same on every worker; None in place of the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if marked(path) else leaf, state
    )


def state_specs(state: PyTree, axis_name: AxisName) -> PyTree:
    """PartitionSpecs for any tree: `PerWorker` split over the axis, everything else replicated."""

    return jax.tree_util.tree_map_with_path(
        lambda path, _: PartitionSpec(axis_name) if marked(path) else PartitionSpec(), state
    )


def resize_workers(tx: Any, state: PyTree, params: PyTree, workers: int) -> PyTree:
    """Moves a state to another number of workers.

    Replicated state stays. Of the memory of `n` workers, each of the new ones gets the mean, so
    that the mean residual, the mean momentum and velocity (both are sums of gradients), and the
    mean shift that the mirror must equal, stay what they were; counters, which are equal on all
    workers, are kept.

    Args:
        tx: the transformation that the state belongs to.
        state: its state, outside of the mapped function (leading axis `n`).
        params: the parameters.
        workers: the new number of workers.

    Raises:
        ValueError: if `workers` is not positive or `state` is not a state of `tx`.

    Returns:
        The state with leading axis `workers`; place it with `jax.device_put` and `state_specs`.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"`workers` must be a positive integer, got {workers!r}")
    expected = jax.eval_shape(tx.init, params)
    same = jax.tree.structure(state) == jax.tree.structure(expected)
    if not same or _shapes(state) != _shapes(expected):
        raise ValueError(
            f"`state` must be a state of `tx` for these `params`: expected {expected}, got "
            f"{jax.tree.map(jnp.shape, state)}"
        )

    def move(path, x):
        if not marked(path):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            kept = jnp.mean(x, axis=0, dtype=wide).astype(x.dtype)
        else:
            kept = x[0]
        return jnp.broadcast_to(kept, (workers, *x.shape[1:]))

    return jax.tree_util.tree_map_with_path(move, state)


def _shapes(state: PyTree) -> list[tuple]:
    """What must agree between states of different worker counts."""
    return [
        (leaf.shape[1:] if marked(path) else leaf.shape, jnp.dtype(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]

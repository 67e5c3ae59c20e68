"""Trees as pieces for workers along one dimension of each leaf, and trees made of such pieces."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.collectives.arguments import dimension
from jaxcomp.layout import trees
from jaxcomp.types import PyTree

Places = int | tuple[int, ...]
"""A dimension of every leaf, or one for each leaf in their order."""


def split(tree: PyTree, name: str, at: Places, workers: int, *, tiled: bool) -> PyTree:
    """The pieces of each leaf along a dimension, `[workers, …]`.

    Args:
        tree: arrays.
        name: the name of the argument that says the dimension, for errors.
        at: the dimension, or one for each leaf.
        workers: the number of pieces.
        tiled: whether pieces keep the dimension, which is then `workers` times as long as theirs;
            otherwise it has one entry for each worker.

    Raises:
        ValueError: if the dimension cannot be split so.
    """

    def cut(path: Any, x: Any, at: int) -> Any:
        place = dimension(path, name, at, x.ndim)
        size = x.shape[place]
        if size % workers or (not tiled and size != workers):
            wanted = "divisible by" if tiled else "as long as"
            raise ValueError(
                f"`{name}` must be a dimension {wanted} the number of workers, {workers}, got {at} "
                f"for '{trees.path_name(path)}' of shape {x.shape}"
            )
        if tiled:
            x = x.reshape(*x.shape[:place], workers, size // workers, *x.shape[place + 1 :])
        return jnp.moveaxis(x, place, 0)

    return jax.tree_util.tree_map_with_path(cut, tree, _each(tree, at))


def join(tree: PyTree, name: str, at: Places, *, tiled: bool) -> PyTree:
    """The inverse of `split`.

    Raises:
        ValueError: if a leaf would have no such dimension.
    """

    def whole(path: Any, x: Any, at: int) -> Any:
        place = dimension(path, name, at, x.ndim - 1 if tiled else x.ndim)
        x = jnp.moveaxis(x, 0, place)
        if not tiled:
            return x
        merged = x.shape[place] * x.shape[place + 1]
        return x.reshape(*x.shape[:place], merged, *x.shape[place + 2 :])

    return jax.tree_util.tree_map_with_path(whole, tree, _each(tree, at))


def likes(like: PyTree, name: str, at: Places, workers: int, *, tiled: bool) -> PyTree:
    """The shapes and dtypes of one worker's pieces."""

    def one(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[0], split(tree, name, at, workers, tiled=tiled))

    return jax.eval_shape(one, like)


def _each(tree: PyTree, at: Places) -> PyTree:
    """A dimension for each leaf."""
    treedef = jax.tree.structure(tree)
    every = at if isinstance(at, tuple) else (at,) * treedef.num_leaves
    return jax.tree.unflatten(treedef, every)

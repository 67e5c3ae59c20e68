"""Trees in which leaves are missing: masked by optax, or filtered out of a module."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxcomp.types import PyTree


def absent(node: Any) -> bool:
    """Whether a node stands for leaves that a transformation does not see."""
    return node is None or isinstance(node, optax.MaskedNode)


def visible_part(
    given: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """The part of a user's tree for a tree in which leaves are absent.

    Args:
        given: a tree like the whole one, or a prefix of it, such as specs or a mask.
        tree: the tree of which a transformation within `freeze` or `optax.partition` sees a part.
        is_leaf: what is a leaf of `given`.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=absent)
    hidden = {path: node for path, node in flat if absent(node)}

    def stops(path: tuple, node: Any) -> bool:
        return path in hidden or (is_leaf is not None and is_leaf(node))

    return jax.tree_util.tree_map_with_path(
        lambda path, node: hidden.get(path, node), given, is_leaf=stops, is_leaf_takes_path=True
    )

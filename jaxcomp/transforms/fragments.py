"""Fragments: a model's leaves in parts that are exchanged at different times."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp import checks
from jaxcomp.layout import trees
from jaxcomp.types import PyTree

Fragments = int | Callable[[PyTree], PyTree]


def balanced(number: int) -> Callable[[PyTree], PyTree]:
    """Fragments of about equal bytes: the largest leaf first, each into the smallest fragment.

    Args:
        number: how many.

    Returns:
        A function from parameters to a tree of fragment numbers.

    Raises:
        ValueError: if `number` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> balanced(2)({"a": jnp.ones(10), "b": jnp.ones(6), "c": jnp.ones(5)})
        {'a': 0, 'b': 1, 'c': 1}
    """
    checks.integer("number", number, 1)

    def numbers(params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        sizes = [math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize for x in leaves]
        held, found = [0] * number, [0] * len(leaves)
        for leaf in sorted(range(len(leaves)), key=lambda leaf: -sizes[leaf]):
            found[leaf] = held.index(min(held))
            held[found[leaf]] += sizes[leaf]
        return jax.tree.unflatten(treedef, found)

    return numbers


def strided(number: int) -> Callable[[PyTree], PyTree]:
    """Fragments of every `number − 1`-th layer, and one more of the leaves outside of all layers.

    A layer is what has the same first number in its path, such as `block7` or `layers/7`. Leaves
    without a number, such as an embedding and a head, are the last fragment.

    Args:
        number: how many, with the last; at least two.

    Returns:
        A function from parameters to a tree of fragment numbers.

    Raises:
        ValueError: if `number` is below two; on use, if a fragment has no leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.ones(4)
        >>> strided(3)({"embedding": x, "block0": x, "block1": x, "block2": x})
        {'block0': 0, 'block1': 1, 'block2': 0, 'embedding': 2}

    References:
        Douillard et al., `Streaming DiLoCo with overlapping communication: towards a distributed
        free lunch <https://arxiv.org/abs/2501.18512>`_, 2025.
    """
    checks.integer("number", number, 2)

    def numbers(params: PyTree) -> PyTree:
        flat, treedef = jax.tree_util.tree_flatten_with_path(params)
        layers = [re.search(r"\d+", trees.path_name(path)) for path, _ in flat]
        known = sorted({int(layer.group()) for layer in layers if layer})
        found = [
            known.index(int(layer.group())) % (number - 1) if layer else number - 1
            for layer in layers
        ]
        return jax.tree.unflatten(treedef, found)

    return numbers


def count(fragments: Fragments, params: PyTree) -> int:
    """The number of fragments of these parameters."""
    return 1 if fragments == 1 else 1 + max(jax.tree.leaves(numbers(fragments, params)), default=0)


def split(fragments: Fragments, params: PyTree, tree: PyTree) -> tuple[PyTree, ...]:
    """For each fragment of `params`, the leaves of `tree` that it has; None in place of others.

    Raises:
        ValueError: if the fragments are not numbered from 0 without gaps, a number for each leaf.
    """
    if fragments == 1:
        return (tree,)
    found = jax.tree.leaves(numbers(fragments, params))
    leaves, treedef = jax.tree.flatten(tree)
    return tuple(
        jax.tree.unflatten(
            treedef, [x if at == fragment else None for x, at in zip(leaves, found, strict=True)]
        )
        for fragment in range(max(found, default=0) + 1)
    )


def merge(parts: tuple[PyTree, ...]) -> PyTree:
    """The tree of which these are the fragments."""
    if len(parts) == 1:
        return parts[0]

    def own(*found: Any) -> Any:
        return next((x for x in found if x is not None), None)

    return jax.tree.map(own, *parts, is_leaf=lambda x: x is None)


def numbers(fragments: Fragments, params: PyTree) -> PyTree:
    """The number of the fragment of each leaf.

    Raises:
        ValueError: if the fragments are not numbered from 0 without gaps, a number for each leaf.
    """
    number = balanced(fragments) if isinstance(fragments, int) else fragments
    found = number(params)
    used = set(jax.tree.leaves(found))
    wanted = fragments if isinstance(fragments, int) else max(used, default=0) + 1
    same = jax.tree.structure(found) == jax.tree.structure(params)
    if not same or (used and used != set(range(wanted))):
        raise ValueError(
            "`fragments` must give every leaf a number, and each fragment a leaf: a tree like the "
            f"parameters with the numbers 0 to {wanted - 1}, got {sorted(used, key=str)} for "
            f"{len(jax.tree.leaves(params))} leaves; use fewer fragments"
        )
    return found

"""Trees of `PartitionSpec`, as users give them."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxcomp.base import adapter
from jaxcomp.layout import masked
from jaxcomp.types import PyTree


def is_spec(node: Any) -> bool:
    """Whether a node is a spec, a `NamedSharding`, or None for a replicated leaf."""
    return node is None or isinstance(getattr(node, "spec", node), PartitionSpec)


def is_partition(node: Any) -> bool:
    """Whether a node is a spec itself."""
    return isinstance(node, PartitionSpec)


def of_axes(names_: tuple[str, ...], given: PartitionSpec) -> PartitionSpec:
    """The part of a spec that names some axes."""
    return PartitionSpec(
        *(tuple(n for n in names(entry) if n in names_) or None for entry in given)
    )


def spec(node: Any) -> PartitionSpec:
    """The spec of a spec, of a `NamedSharding`, or of None for a replicated leaf."""
    return PartitionSpec() if node is None else getattr(node, "spec", node)


def names(entry: Any) -> tuple[str, ...]:
    """The axes of one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def named_axes(given: PartitionSpec) -> tuple[str, ...]:
    """All axes of a spec."""
    return tuple(name for entry in given for name in names(entry))


def spread(argument: str, specs: PyTree, tree: PyTree) -> PyTree:
    """A spec for each leaf of a tree, from a prefix of such a tree.

    Boxes, such as variables of nnx, may be around specs, leaves, both or neither, and a tree of
    other nodes fits if it has a spec at the path of every leaf, as an `nnx.State` for a dictionary.

    Args:
        argument: the name of the argument, for the error.
        specs: the specs.
        tree: the tree.

    Raises:
        ValueError: if the specs are no prefix.
    """
    treedef = jax.tree.structure(tree)
    for one in adapter.present():
        specs, tree = one.plain(specs), one.plain(tree)
    given = jax.tree.map(spec, masked.visible_part(specs, tree, is_spec), is_leaf=is_spec)
    try:  # Where the tree has no leaf, as in a filtered module, it gets no spec.
        found = jax.tree.leaves(
            jax.tree.broadcast(given, tree, is_leaf=is_spec), is_leaf=is_partition
        )
    except ValueError as error:
        paths, found = _by_path(tree), _by_path(given)
        if not paths.keys() <= found.keys():
            raise ValueError(
                f"`{argument}` must be a tree of PartitionSpecs like the parameters, or a prefix "
                f"of one: {error}"
            ) from None
        found = [found[path] for path in paths]
    return jax.tree.unflatten(treedef, found)


def _by_path(tree: PyTree) -> dict[tuple[str, ...], Any]:
    """The leaves by their paths, in names."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_partition)
    return {tuple(jax.tree_util.keystr((k,), simple=True) for k in path): x for path, x in flat}

"""Trees of `PartitionSpec`, as users give them."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

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

    Args:
        argument: the name of the argument, for the error.
        specs: the specs.
        tree: the tree.

    Raises:
        ValueError: if the specs are no prefix.
    """
    given = jax.tree.map(spec, masked.visible_part(specs, tree, is_spec), is_leaf=is_spec)
    try:  # Where the tree has no leaf, as in a filtered module, it gets no spec.
        return jax.tree.broadcast(given, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"`{argument}` must be a tree of PartitionSpecs like the parameters, or a prefix of "
            f"one: {error}"
        ) from None

"""Kinds of nodes of a state, which are recognised by their type.

Nodes of a user's tree may have fields and attributes of any name. States are named tuples, which
have no base classes of their own, so that each type is registered for its kinds, as in
`@kinds.MEANS.register`.
"""

from typing import Any, TypeVar

_Type = TypeVar("_Type", bound=type)


class Kind:
    """The types of states of one kind."""

    def __init__(self):
        self._types: set[type] = set()

    def register(self, cls: _Type) -> _Type:
        """Adds a type; a decorator of its class."""
        self._types.add(cls)
        return cls

    def has(self, node: Any) -> bool:
        """Whether a node of a tree is of this kind."""
        return type(node) in self._types


MEANS = Kind()
"""States of transformations that average over the workers; they count their steps."""

REDUCTIONS = Kind()
"""Memory of a reduction, with the methods `check_resizable` and `carried`."""

DISPLACED = Kind()
"""States with the field `offset`, by which workers take gradients beside the centre."""

EVERYONES = Kind()
"""States with the field `everyones`: a row for each worker, the same on all of them."""

STEPS = Kind()
"""States of transformations that average and take the descent step themselves."""

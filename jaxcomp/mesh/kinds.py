"""Kinds of nodes of a state, which are recognised by their type.

Nodes of a user's tree may have fields and attributes of any name. States are named tuples, which
have no base classes of their own, so that each is registered for its kind:
`@kinds.Mean.register`.
"""

import abc


class Mean(abc.ABC):
    """The state of a transformation that averages over the workers; it counts its steps."""


class Reduction(abc.ABC):
    """The memory of a reduction, with the methods `carried` and `is_slice`."""


class Displaced(abc.ABC):
    """A state with the field `offset`, by which workers take gradients beside the centre."""


class Everyones(abc.ABC):
    """A state with the field `everyones`: a row for each worker, the same on all of them."""

"""The types that every part speaks in: arrays, trees, names of axes, keys."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

Array = jax.Array
PyTree = Any
Batches = Sequence[Any]
"""The static plan of a tree's compressed leaves: a `trees.Batch` for each array of a `Stacks`."""
Stacks = Sequence[Array]
"""The compressed leaves of a tree: one `[buckets, size]` array for each batch."""
AxisName = Hashable | tuple[Hashable, ...]


@runtime_checkable
class ArrayLike(Protocol):
    """Anything with a shape and a dtype: an array or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class Key(NamedTuple):
    """The randomness of one encoding; every receiver can rebuild it, so it never travels.

    Attributes:
        shared: `uint32[2]`, the same on all workers: random coordinates, common rotations.
        own: `uint32[2]`, this worker's: private dither.
        first: `uint32` scalar, the number of bucket 0 of the array at hand, so that a part of a
            batch draws the noise that the whole batch would have drawn there.
    """

    shared: Array
    own: Array
    first: Array

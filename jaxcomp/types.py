"""Types used throughout the library: arrays, trees, names of axes, keys."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

Array = jax.Array
PyTree = Any
Batches = Sequence[Any]
"""The static plan of a tree's compressed leaves: a `Batch` of `layout.batches` for each array."""
Stacks = Sequence[Array]
"""The compressed leaves of a tree: one `[buckets, size]` array for each batch."""
Weights = Array | None
"""The weight of each worker, `[workers]`; None for all ones."""
AxisName = Hashable | tuple[Hashable, ...]


@runtime_checkable
class ArrayLike(Protocol):
    """Anything with a shape and a dtype: an array or a `jax.ShapeDtypeStruct`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


class Key(NamedTuple):
    """The random key of one encoding; every receiver can derive it, so it is never sent.

    Attributes:
        shared: `uint32[2]`, the same on all workers: for random coordinates and common rotations.
        own: `uint32[2]`, this worker's key: for private dither.
        first: `uint32` scalar, the index of the array's first bucket in the whole batch, so that a
            slice of a batch draws the same noise as the whole batch does there.
    """

    shared: Array
    own: Array
    first: Array

"""Which elements of a bucket to send: each rule is a setting of the one sparsifier.

A rule finds at most `room` places in each bucket and says how many it found. Its room is static;
what does not fit is not sent, and stays in the feedback's residual.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, UInt32

from jaxcomp import checks
from jaxcomp.protocols import Array
from jaxcomp.sparsify import bitmap, selection


class Chosen(NamedTuple):
    """What a rule found.

    Attributes:
        places: ascending; those beyond the number found mean nothing.
        number: how many were found, or None where the room is always filled.
        state: of the rule, for the next step.
    """

    places: UInt32[Array, "n room"]
    number: Int32[Array, " n"] | None
    state: Any


@runtime_checkable
class Choice(Protocol):
    """A frozen dataclass that chooses elements of each bucket."""

    @property
    def fills(self) -> bool:
        """Whether the room is always filled."""
        ...

    @property
    def homogeneous(self) -> bool:
        """Whether an input `2^k` times as large has the same places chosen."""
        ...

    def room(self, size: int) -> int:
        """Places for a bucket of this size."""
        ...

    def init(self, buckets: int, size: int) -> Any:
        """State of the rule; `()` for those that have none."""
        ...

    def choose(self, x: Array, count: Array, start: UInt32[Array, " n"], state: Any) -> Chosen:
        """Places in each of the buckets `x`, of which `count` elements are real.

        Args:
            x: `[n, size]`.
            count: `[n]`.
            start: a random word for each bucket.
            state: of the rule.
        """
        ...


def share(fraction: int | float, size: int) -> int:
    """`⌈fraction · size⌉`, at least one; not one more because a fraction is not a binary number."""
    return min(size, max(1, math.ceil(round(fraction * size, 6))))


@dataclasses.dataclass(frozen=True)
class Largest:
    """The `⌈fraction · size⌉` largest `|x|` of each bucket; equal ones by the lower place.

    Args:
        fraction: share of the elements that is sent, in (0, 1].
    """

    fraction: int | float
    fills = True
    homogeneous = True

    def __post_init__(self):
        checks.fraction(self.fraction)

    def room(self, size: int) -> int:
        return share(self.fraction, size)

    def init(self, buckets: int, size: int) -> tuple:
        del buckets, size
        return ()

    def choose(self, x: Array, count: Array, start: UInt32[Array, " n"], state: tuple) -> Chosen:
        del count, start
        return Chosen(selection.top_k(x, self.room(x.shape[1])), None, state)


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """All `|x| ≥ value` of each bucket, and what is not finite, as far as there is room.

    Args:
        value: the threshold, positive.
        fraction: share of the elements that there is room for, in (0, 1].
    """

    value: int | float
    fraction: int | float
    fills = False
    homogeneous = False

    def __post_init__(self):
        checks.positive("value", self.value)
        checks.fraction(self.fraction)

    def room(self, size: int) -> int:
        return share(self.fraction, size)

    def init(self, buckets: int, size: int) -> tuple:
        del buckets, size
        return ()

    def choose(self, x: Array, count: Array, start: UInt32[Array, " n"], state: tuple) -> Chosen:
        del count
        low = int(np.float32(self.value).view(np.int32))
        hits = bitmap.of(selection.size_bits(x) >= jnp.int32(low))
        return Chosen(*_some(x, hits, self.room(x.shape[1]), start), state)


def _some(
    x: Array, hits: UInt32[Array, "n words"], room: int, start: UInt32[Array, " n"]
) -> tuple[UInt32[Array, "n room"], Int32[Array, " n"]]:
    """As many hits as there is room for; what is not finite must be seen."""
    return selection.some(hits, room, start, selection.nonfinite(x))

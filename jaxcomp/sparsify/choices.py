"""Rules that choose the elements of a bucket to send; each is a setting of the sparsifier.

A rule returns at most `room` indices in each bucket, and their number. The room (capacity) is
static; elements that do not fit are not sent, and stay in the feedback's residual.
"""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int32, UInt32

from jaxcomp import checks
from jaxcomp.base.interface import Interface
from jaxcomp.sparsify import bitmap, selection
from jaxcomp.types import Array


class Chosen(NamedTuple):
    """The result of a rule.

    Attributes:
        places: the indices, ascending; unspecified beyond `number`.
        number: the number of chosen elements, or None if the room is always filled.
        state: the state of the rule for the next step.
    """

    places: UInt32[Array, "n room"]
    number: Int32[Array, " n"] | None
    state: Any


class Choice(Interface, abstract=True):
    """A frozen dataclass that chooses elements of each bucket.

    Attributes:
        fills: whether the room is always filled.
        span: the largest ratio of the largest element to a chosen element.
        homogeneous: whether the choice is the same for an input `2^k` times as large.
    """

    fills: bool
    homogeneous: bool
    span = math.inf

    @abc.abstractmethod
    def room(self, size: int) -> int:
        """The capacity for a bucket of this size."""

    @abc.abstractmethod
    def init(self, buckets: int, size: int) -> Any:
        """The state of the rule; `()` for a rule without state."""

    @abc.abstractmethod
    def choose(self, x: Array, count: Array, start: UInt32[Array, " n"], state: Any) -> Chosen:
        """Chooses elements in each bucket of `x`.

        Args:
            x: `[n, size]`.
            count: `[n]`, the number of real elements of each bucket.
            start: a random word for each bucket.
            state: the state of the rule.
        """


def share(fraction: int | float, size: int) -> int:
    """`⌈fraction · size⌉`, at least one, without the rounding error of a binary fraction."""
    return min(size, max(1, math.ceil(round(fraction * size, 6))))


@dataclasses.dataclass(frozen=True)
class Largest(Choice):
    """The `⌈fraction · size⌉` largest `|x|` of each bucket; ties go to the lower index.

    Args:
        fraction: the fraction of elements that is sent, in (0, 1].
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
class AtLeast(Choice):
    """All `|x| ≥ value` of each bucket, and non-finite elements, up to the capacity.

    Args:
        value: the threshold, positive.
        fraction: the capacity as a fraction of the elements, in (0, 1].
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
        # Zeros reach no threshold, not even one below the smallest float32.
        low = max(1, int(np.float32(self.value).view(np.int32)))
        hits = bitmap.of(selection.size_bits(x) >= jnp.int32(low))
        return Chosen(*as_many_as_fit(x, hits, self.room(x.shape[1]), start), state)


@dataclasses.dataclass(frozen=True)
class Sampled(Choice):
    """All `|x|` above a threshold, estimated from a sample for a given fraction.

    If more than `most` times the fraction exceed the threshold, exactly the fraction of largest
    elements is sent (hierarchical re-selection). If less than `least` times the fraction exceed it,
    the threshold is lowered by a fifth, up to ten times.

    Args:
        fraction: the fraction of elements to send, in (0, 1].
        sample: the fraction of elements in the sample, which has at least about 400 above the
            threshold.
        least: the smallest accepted multiple of the fraction, in [0, 1].
        most: the largest accepted multiple, at least 1, which is also the capacity.
    """

    fraction: int | float
    sample: float = 0.01
    least: float = 0.8
    most: float = 1.3
    fills = False
    homogeneous = True

    def __post_init__(self):
        checks.fraction(self.fraction)
        checks.number("sample", self.sample, 0.0, 1.0)
        checks.number("least", self.least, 0.0, 1.0)
        checks.number("most", self.most, 1.0)

    def room(self, size: int) -> int:
        return share(min(1.0, self.most * self.fraction), size)

    def init(self, buckets: int, size: int) -> tuple:
        del buckets, size
        return ()

    def choose(self, x: Array, count: Array, start: UInt32[Array, " n"], state: tuple) -> Chosen:
        del count
        room, k = self.room(x.shape[1]), share(self.fraction, x.shape[1])
        low = selection.estimate(x, k, max(400, round(self.sample * k)))
        reached = selection.count(selection.size_bits(x) >= low)

        def few(state: Any) -> Array:
            turn, _, reached = state
            return (turn < 10) & jnp.any(reached < math.ceil(self.least * k))

        def lower(state: Any) -> Any:
            turn, low, reached = state
            value = lax.bitcast_convert_type(low, jnp.float32) * jnp.float32(0.8)
            low = jnp.where(
                reached < math.ceil(self.least * k),
                jnp.maximum(lax.bitcast_convert_type(value, jnp.int32), 1),
                low,
            )
            # Depends on the threshold; otherwise XLA stores the bits of all elements first.
            elements, low = lax.optimization_barrier((x, low))
            return turn + 1, low, selection.count(selection.size_bits(elements) >= low)

        _, low, reached = lax.while_loop(few, lower, (0, low, reached))
        hits = bitmap.of(selection.size_bits(x) >= low)
        places, number = as_many_as_fit(x, hits, room, start)

        def exactly(x: Array) -> Array:
            largest = selection.top_k(x, k)
            return jnp.pad(largest, ((0, 0), (0, room - k)))

        many = reached[:, 0] > room
        places = lax.cond(
            jnp.any(many),
            lambda x: jnp.where(many[:, None], exactly(x), places),
            lambda _: places,
            x,
        )
        return Chosen(places, jnp.where(many, k, number), state)


@dataclasses.dataclass(frozen=True)
class NearLargest(Choice):
    """All `|x| ≥ M b^-(τ + ½)` of each bucket, `M` its largest and `b = 2^(1 / per_octave)`.

    These are the elements whose logarithm to the base `b` is at most `τ` below that of `M`, after
    rounding to an integer; `τ` is the largest value up to `most` for which they fit the capacity.

    Args:
        fraction: the capacity as a fraction of the elements, in (0, 1].
        most: the largest `τ`, 0 to 254.
        per_octave: the number of steps of `b` that halve a value.
    """

    fraction: int | float
    most: int = 15
    per_octave: int = 2
    fills = False
    homogeneous = True

    def __post_init__(self):
        checks.fraction(self.fraction)
        checks.integer("most", self.most, 0, 254)
        checks.integer("per_octave", self.per_octave, 1, 8)

    def room(self, size: int) -> int:
        return share(self.fraction, size)

    def init(self, buckets: int, size: int) -> tuple:
        del buckets, size
        return ()

    @property
    def span(self) -> float:
        """The largest ratio of the largest element to a chosen element."""
        return 2 ** ((self.most + 0.5) / self.per_octave)

    def choose(self, x: Array, count: Array, start: UInt32[Array, " n"], state: tuple) -> Chosen:
        del count
        room = self.room(x.shape[1])
        top = selection.largest(x)
        ratios = jnp.asarray(np.exp2(-(np.arange(self.most + 1) + 0.5) / self.per_octave))

        def level(step: Array) -> Array:
            low = lax.bitcast_convert_type(top, jnp.float32) * ratios.astype(jnp.float32)[step]
            low = lax.bitcast_convert_type(low, jnp.int32)
            # If there are non-finite elements, choose only those; never choose a zero.
            return jnp.where(top >= selection.INF, selection.INF, jnp.maximum(low, 1))

        def bisect(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            fits, fails = bounds
            middle = (fits + fails) // 2
            elements, middle = lax.optimization_barrier((x, middle))
            few = selection.count(selection.size_bits(elements) >= level(middle)) <= room
            return jnp.where(few, middle, fits), jnp.where(few, fails, middle)

        lowest = jnp.zeros_like(top)
        turns = self.most.bit_length()
        fits, _ = lax.fori_loop(0, turns, bisect, (lowest, lowest + self.most + 1))
        hits = bitmap.of(selection.size_bits(x) >= level(fits))
        return Chosen(*as_many_as_fit(x, hits, room, start), state)


def as_many_as_fit(
    x: Array, hits: UInt32[Array, "n words"], room: int, start: UInt32[Array, " n"]
) -> tuple[UInt32[Array, "n room"], Int32[Array, " n"]]:
    """As many hits as fit, by `selection.some`, including a non-finite element if there is one."""

    def none(x: Array) -> Array:
        return jnp.zeros_like(x[:, 0], jnp.int32) - 1

    over = jnp.any(bitmap.count(hits) > room)
    return selection.some(hits, room, start, lax.cond(over, selection.nonfinite, none, x))

"""Rules that choose the elements of a bucket to send; each is a setting of the sparsifier.

A rule finds at most `room` places in each bucket, or in each leaf of a bucket of several leaves,
and says how many it found. Its room is static; what does not fit is not sent, and stays in the
feedback's residual.
"""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import UInt32

from jaxcomp import checks
from jaxcomp.base.interface import Interface
from jaxcomp.numerics.segments import Segments, change_width
from jaxcomp.sparsify import bitmap, leaves, selection
from jaxcomp.sparsify.bitmap import Words
from jaxcomp.sparsify.competitors import INF, Leaves, Parts, PerPart, size_bits
from jaxcomp.types import Array


class Chosen(NamedTuple):
    """The result of a rule.

    Attributes:
        places: ascending, those of one part after those of another; those beyond the number found
            of all parts mean nothing.
        number: how many of each part were found, or None where the room is always filled.
        state: of the rule, for the next step.
        values: the elements at these places, or None where the rule did not read them.
    """

    places: UInt32[Array, "n room"]
    number: PerPart | None
    state: Any
    values: Array | None = None


class Choice(Interface, abstract=True):
    """A frozen dataclass that chooses elements of each bucket, or of each leaf in a bucket.

    Attributes:
        fills: whether the room is always filled.
        guided: whether the state is guesses, `[alternatives, n, size]`, that a caller may give
            instead of what `init` makes.
        span: the largest ratio of the largest element to a chosen element.
        homogeneous: whether the choice is the same for an input `2^k` times as large.
        unjoined: whether it can read leaves that are not joined, as `UnjoinedLeaves`.
    """

    fills: bool
    guided = False
    homogeneous: bool
    span = math.inf
    unjoined = False

    @abc.abstractmethod
    def room(self, size: int) -> int:
        """Places for a bucket, or a leaf, of this size."""

    def init(self, buckets: int, parts: int) -> Any:
        """State of the rule for buckets of so many parts each; `()` for those that have none."""
        del buckets, parts
        return ()

    @abc.abstractmethod
    def choose(self, x: Any, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        """Places in each of the buckets `x`.

        Args:
            x: `[n, size]`, filled up with zeros; or an `Unjoined`.
            start: a random word for each part of a bucket.
            state: of the rule.
            parts: which elements compete: those of a bucket, or of each leaf in it.
        """

    def _rooms(self, parts: Parts) -> tuple[int, ...]:
        return tuple(self.room(size) for size in parts.sizes)


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
    unjoined = True

    def __post_init__(self):
        checks.fraction(self.fraction)

    def room(self, size: int) -> int:
        return share(self.fraction, size)

    def choose(self, x: Any, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        del start
        places, values = _largest(x, self._rooms(parts), parts)
        return Chosen(places, None, state, values)


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
    unjoined = True

    def __post_init__(self):
        checks.positive("value", self.value)
        checks.fraction(self.fraction)

    def room(self, size: int) -> int:
        return share(self.fraction, size)

    def choose(self, x: Any, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        # Zeros reach no threshold, not even one below the smallest float32.
        low = max(1, int(np.float32(self.value).view(np.int32)))
        hits = parts.reach(x, jnp.full((len(start), len(parts.sizes)), low, jnp.int32))
        return Chosen(*as_many_as_fit(x, hits, self._rooms(parts), start, parts), state)


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

    @property
    def unjoined(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Not where zeros are sent, among which zeros that fill rows would count."""
        return self.most * self.fraction < 0.9

    def room(self, size: int) -> int:
        return share(min(1.0, self.most * self.fraction), size)

    def choose(self, x: Any, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        rooms, ks = self._rooms(parts), tuple(share(self.fraction, size) for size in parts.sizes)
        above = tuple(max(400, round(self.sample * k)) for k in ks)
        least = jnp.asarray([math.ceil(self.least * k) for k in ks], jnp.int32)[None]

        def few(state: Any) -> Array:
            turn, _, hits = state
            return (turn < 0) | (turn < 10) & jnp.any(parts.ones(hits) < least)

        def lower(state: Any) -> Any:
            turn, low, hits = state
            value = lax.bitcast_convert_type(low, jnp.float32) * jnp.float32(0.8)
            lowered = jnp.maximum(lax.bitcast_convert_type(value, jnp.int32), 1)
            low = jnp.where((turn >= 0) & (parts.ones(hits) < least), lowered, low)
            # The barrier keeps the compiler from storing the bits of all elements first.
            elements, low = lax.optimization_barrier((x, low))
            return turn + 1, low, parts.reach(elements, low)

        if isinstance(parts, Leaves):  # Read in the loop alone: each leaf may be a kernel.
            low = leaves.estimate(x, ks, above, parts)
            begin = -1, low, parts.none(low)
        else:
            low = selection.estimate(x, ks[0], above[0])
            begin = 0, low, parts.reach(x, low)
        _, low, hits = lax.while_loop(few, lower, begin)
        if isinstance(parts, Leaves):
            places, number = leaves.first(hits, rooms, parts)
        else:
            places, number = as_many_as_fit(x, hits, rooms, start, parts)
        reached = parts.ones(hits)
        many = reached > jnp.asarray(rooms, jnp.int32)[None]
        slots, exact = Segments(rooms, 1), Segments(ks, 1)

        kept = jnp.where(many, jnp.asarray(ks, jnp.int32), number)

        def exactly(x: Any) -> Array:
            largest, _ = _largest(x, ks, parts, low)
            largest = change_width(largest, exact, slots)
            found = leaves.slots(places, number, slots)
            found = jnp.where(slots.per_element(many), largest, found)
            return leaves.from_slots(found, kept, slots)

        places = lax.cond(jnp.any(many), exactly, lambda _: places, x)
        return Chosen(places, kept, state)


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

    @property
    def span(self) -> float:
        """The largest ratio of the largest element to a chosen element."""
        return 2 ** ((self.most + 0.5) / self.per_octave)

    def choose(self, x: Any, start: UInt32[Array, "n parts"], state: Any, parts: Parts) -> Chosen:
        rooms, top = self._rooms(parts), parts.largest(x)
        ratios = jnp.asarray(np.exp2(-(np.arange(self.most + 1) + 0.5) / self.per_octave))

        def level(step: Array) -> Array:
            low = lax.bitcast_convert_type(top, jnp.float32) * ratios.astype(jnp.float32)[step]
            low = lax.bitcast_convert_type(low, jnp.int32)
            # Where the largest is not finite, only non-finite elements count; never a zero.
            return jnp.where(top >= INF, INF, jnp.maximum(low, 1))

        def bisect(_: Any, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            fits, fails = bounds
            middle = (fits + fails) // 2
            elements, middle = lax.optimization_barrier((x, middle))
            found = parts.at_least(size_bits(elements), level(middle))
            few = found <= jnp.asarray(rooms, jnp.int32)[None]
            return jnp.where(few, middle, fits), jnp.where(few, fails, middle)

        lowest = jnp.zeros_like(top)
        turns = self.most.bit_length()
        fits, _ = lax.fori_loop(0, turns, bisect, (lowest, lowest + self.most + 1))
        hits = parts.reach(x, level(fits))
        return Chosen(*as_many_as_fit(x, hits, rooms, start, parts), state)


def as_many_as_fit(
    x: Any, hits: Words, rooms: tuple[int, ...], start: UInt32[Array, "n parts"], parts: Parts
) -> tuple[UInt32[Array, "n room"], PerPart]:
    """As many hits of each part as there is room for, non-finite elements included."""
    if isinstance(parts, Leaves):
        return leaves.as_many_as_fit(x, hits, rooms, start, parts)

    over = jnp.any(bitmap.count(hits) > rooms[0])
    needed = lax.cond(over, parts.nonfinite, lambda x: jnp.zeros_like(x[:, :1], jnp.int32) - 1, x)
    places, number = selection.some(hits, rooms[0], start[:, 0], needed[:, 0])
    return places, number[:, None]


def _largest(
    x: Any, ks: tuple[int, ...], parts: Parts, low: PerPart | None = None
) -> tuple[UInt32[Array, "n k"], Array | None]:
    """Their places, and the elements if they were read; see `leaves.top_k`."""
    if isinstance(parts, Leaves):
        return leaves.top_k(x, ks, parts, low)
    return selection.top_k(x, ks[0]), None

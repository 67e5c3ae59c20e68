"""The values that a code may stand for, in units of the bucket's step.

A level set knows how a scaled element becomes a code and what a code is worth; all its values are
small integers, so that code × step is exact in float32 and decoding rounds nothing.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Float32, UInt32

from jaxcomp.protocols import Array

FRACTION = 20
"""Bits behind the point in which an element is rounded: dither is an integer below 2²⁰."""


TRIT = 1.6
"""Width of a code below 3: five of them share a byte."""


@runtime_checkable
class Levels(Protocol):
    """A frozen dataclass that maps elements, measured in steps, to codes and back."""

    @property
    def bits(self) -> int | float:
        """Width of a code: a whole number, or `TRIT`."""
        ...

    @property
    def magnitude(self) -> int:
        """The largest value; a bucket's step is its scale divided by this."""
        ...

    @property
    def dithers(self) -> bool:
        """Whether dither moves an element to either neighbour, so that rounding can be unbiased."""
        ...

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        """The code of each element, given in 2⁻²⁰ of a step and within the levels; `dither` is in
        `[0, 2²⁰)`.
        """
        ...

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        """What each code is worth in steps."""
        ...


@dataclasses.dataclass(frozen=True)
class Uniform:
    """`2 * steps + 1` evenly spaced values from `-steps` to `steps`: a mid-tread grid.

    Example:
        >>> Uniform(steps=7).bits
        4
    """

    steps: int
    dithers = True

    def __post_init__(self):
        if isinstance(self.steps, bool) or not isinstance(self.steps, int):
            raise ValueError(f"`steps` must be an integer, got {self.steps!r}")
        if not 1 <= self.steps <= 127:
            raise ValueError(f"`steps` must be from 1 to 127, got {self.steps}")

    @property
    def bits(self) -> int | float:
        return TRIT if self.steps == 1 else (2 * self.steps).bit_length()

    @property
    def magnitude(self) -> int:
        return self.steps

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        # In fixed point: a float addition after a float product may or may not be fused with it.
        above = points.astype(jnp.int32) + (self.steps << FRACTION)
        return ((above + dither) >> FRACTION).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        return (codes.astype(jnp.int32) - self.steps).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sign:
    """The two values ±1; what is within 2⁻²⁰ of a step of zero counts as positive."""

    bits = 1
    magnitude = 1
    dithers = False

    def codes(self, points: Float32[Array, "..."], dither: Array) -> UInt32[Array, "..."]:
        del dither
        # Not `>= 0`: a denormal is negative on a GPU and zero on a CPU.
        return (points > -1).astype(jnp.uint32)

    def values(self, codes: UInt32[Array, "..."]) -> Float32[Array, "..."]:
        return (2 * codes.astype(jnp.int32) - 1).astype(jnp.float32)

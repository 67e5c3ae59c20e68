"""The position of a code in the words, defined once for all implementations.

Words are planar inside a bucket: field `p` of word `w` is element `p * words + w`. That needs no
shuffling of lanes, so whatever makes the codes is fused with the packing. A width that is no power
of two is a sum of planes (6 = 4 + 2), so that no width wastes a bit; codes below 3 take 1.6 bits,
five of them a byte.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxcomp.quantize.levels import TRIT
from jaxcomp.types import Array

Bits = int | float
"""Width of a code: a whole number, or `TRIT` for codes below 3."""

_WIDTHS = (32, 16, 8, 4, 2, 1)
_POWERS = (1, 3, 9, 27, 81)
_SIXTEENTH = 16
_INVERSES = tuple(-(-(1 << _SIXTEENTH) // power) for power in _POWERS)
"""`v * inverse >> 16` is `v // power` for every `v` of a byte that holds five trits."""


@dataclasses.dataclass(frozen=True)
class Plane:
    """`width` bits of each code, starting at bit `low`; `32 / width` codes per word."""

    width: int
    low: int = 0

    @property
    def fields(self) -> int:
        return 32 // self.width

    def put(
        self, codes: Array | np.ndarray, field: int | np.ndarray | Array, whole: bool = False
    ) -> Any:
        """The bits of a word from codes in this field; `whole` if the codes have this width."""
        part = codes if whole else (codes >> np.uint32(self.low)) & np.uint32((1 << self.width) - 1)
        return part << _uint(field, self.width)

    def take(self, words: Array | np.ndarray, field: int | np.ndarray | Array) -> Any:
        """The bits of the codes in this field."""
        part = words >> _uint(field, self.width)
        if self.width < 32:
            part = part & np.uint32((1 << self.width) - 1)
        return part << np.uint32(self.low) if self.low else part


@dataclasses.dataclass(frozen=True)
class TritPlane:
    """Codes below 3: byte `b` of a word is `Σ 3^i · code[5b + i]`."""

    fields = 20

    def put(
        self, codes: Array | np.ndarray, field: int | np.ndarray | Array, whole: bool = False
    ) -> Any:
        """The bits of a word from codes in this field."""
        del whole
        byte, place = _divide_by_five(field)
        return (codes * _pick(_POWERS, place)) << _uint(byte, 8)

    def take(self, words: Array | np.ndarray, field: int | np.ndarray | Array) -> Any:
        """The codes in this field."""
        byte, place = _divide_by_five(field)
        value = (words >> _uint(byte, 8)) & np.uint32(0xFF)
        shifted = (value * _pick(_INVERSES, place)) >> np.uint32(_SIXTEENTH)
        third = (shifted * np.uint32(_INVERSES[1])) >> np.uint32(_SIXTEENTH)
        return shifted - np.uint32(3) * third


def planes(bits: Bits) -> "tuple[Plane | TritPlane, ...]":
    """The planes into which codes of this width are split, the widest first.

    Example:
        >>> planes(6)
        (Plane(width=4, low=0), Plane(width=2, low=4))
    """
    if bits == TRIT:
        return (TritPlane(),)
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 32:
        raise ValueError(
            f"`bits` must be an integer from 1 to 32, or {TRIT} for codes below 3, got {bits!r}"
        )
    found, low = [], 0
    for width in _WIDTHS:
        if bits & width:
            found.append(Plane(width, low))
            low += width
    return tuple(found)


def lanes(size: int, plane: "Plane | TritPlane") -> int:
    """The number of words of a bucket of this size in this plane."""
    return -(-size // plane.fields)


def words(size: int, bits: Bits) -> int:
    """The number of 32-bit words that `size` codes of `bits` bits take.

    Example:
        >>> words(512, bits=3)
        48
        >>> words(640, bits=1.6)
        32
    """
    return sum(lanes(size, plane) for plane in planes(bits))


def _uint(field: "int | np.ndarray | Array", factor: int) -> Any:
    if isinstance(field, int):  # The field is known at trace time, so no multiplication is needed.
        return np.uint32(field * factor)
    if isinstance(field, np.ndarray):
        return (field * factor).astype(np.uint32)
    return field.astype(jnp.uint32) * np.uint32(factor)


def _divide_by_five(field: "int | np.ndarray | Array"):
    byte = (field * 13) >> 6  # Exact for every field below 20.
    return byte, field - 5 * byte


def _pick(table: tuple[int, ...], place: "int | np.ndarray | Array") -> Any:
    if isinstance(place, int | np.ndarray):
        return np.asarray(table, np.uint32)[place]
    picked = jnp.full(place.shape, table[0], jnp.uint32)
    for number, value in enumerate(table[1:], start=1):
        picked = jnp.where(place == number, np.uint32(value), picked)
    return picked

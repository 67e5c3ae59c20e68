"""Packing in plain `jax.numpy`: the specification, and the path that a CPU takes.

Words are planar inside a bucket: field `p` of word `w` is element `p * words + w`. That needs no
shuffling of lanes, so XLA fuses whatever makes the codes with the packing into one loop. A width
that is no power of two is a sum of planes (6 = 4 + 2), so that no width wastes a bit.
"""

import jax.numpy as jnp
from jaxtyping import UInt32

from jaxcomp.protocols import Array

_WIDTHS = (32, 16, 8, 4, 2, 1)


def planes(bits: int) -> tuple[int, ...]:
    """The powers of two that a width is the sum of, largest first.

    Example:
        >>> planes(6)
        (4, 2)
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 32:
        raise ValueError(f"`bits` must be an integer from 1 to 32, got {bits!r}")
    return tuple(width for width in _WIDTHS if bits & width)


def words(size: int, bits: int) -> int:
    """The number of 32-bit words that `size` codes of `bits` bits take.

    Example:
        >>> words(512, bits=3)
        48
    """
    return sum(-(-size // (32 // width)) for width in planes(bits))


def pack(codes: UInt32[Array, "n size"], *, bits: int) -> UInt32[Array, "n words"]:
    """Codes below `2**bits`, one bucket a row, as words.

    Example:
        >>> pack(jnp.arange(8, dtype=jnp.uint32)[None], bits=4)
        Array([[1985229328]], dtype=uint32)
    """
    n, size = codes.shape
    packed, low = [], 0
    for width in planes(bits):
        fields = 32 // width
        lanes = -(-size // fields)
        plane = codes if width == bits else (codes >> low) & jnp.uint32((1 << width) - 1)
        plane = jnp.pad(plane, ((0, 0), (0, lanes * fields - size)))
        # One reduction, not `fields` slices: it reads the codes once, so they need not exist.
        packed.append(
            jnp.sum(plane.reshape(n, fields, lanes) << _shifts(width), axis=1, dtype=jnp.uint32)
        )
        low += width
    return packed[0] if len(packed) == 1 else jnp.concatenate(packed, axis=1)


def unpack(packed: UInt32[Array, "n words"], *, bits: int, size: int) -> UInt32[Array, "n size"]:
    """The first `size` codes of each row of words: the inverse of `pack`.

    Example:
        >>> unpack(jnp.array([[0x76543210]], jnp.uint32), bits=4, size=5)
        Array([[0, 1, 2, 3, 4]], dtype=uint32)
    """
    n = packed.shape[0]
    if packed.shape[1] != words(size, bits):
        raise ValueError(
            f"`packed` must have {words(size, bits)} words a row for {size} codes of {bits} "
            f"bits, got shape {packed.shape}"
        )
    codes, start, low = None, 0, 0
    for width in planes(bits):
        fields = 32 // width
        lanes = -(-size // fields)
        plane = packed[:, None, start : start + lanes] >> _shifts(width)
        if width < 32:
            plane = plane & jnp.uint32((1 << width) - 1)
        plane = plane.reshape(n, fields * lanes)[:, :size]
        codes = plane if codes is None else codes | (plane << low)
        start, low = start + lanes, low + width
    assert codes is not None  # `planes` is never empty.
    return codes


def _shifts(width: int) -> Array:
    return (jnp.arange(32 // width, dtype=jnp.uint32) * width)[None, :, None]

"""Windows of device arrays: the bits of a piece, in one of a few lengths.

A long tile is read where it lies; short ones are joined. Few lengths mean few compiled programs.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt

from jaxcomp.types import Array
from jaxcomp_weights.layouts import Run

SHORTEST = 4096
"""The shortest window; the next ones are 4, 16, … times as long, up to a piece."""

Bits = UInt[Array, " size"]


class Window(NamedTuple):
    """A window on the bits of a tile, or of joined tiles.

    Attributes:
        bits: the bits, `uint8`, `uint16` or `uint32`.
        low: the first position that belongs to the piece.
        high: the position after the last one.
    """

    bits: Bits
    low: int
    high: int


def windows(tiles: Sequence[jax.Array], run: Run, piece: int) -> Iterator[Window]:
    """The windows of the pieces of a run, one after another.

    Args:
        tiles: the arrays of the run's tiles.
        run: the run.
        piece: the most numbers in a piece.
    """
    if len(tiles) == 1 and run.size >= piece:
        for begin, end in run.pieces(piece):
            first = min(begin, run.size - piece)
            low = begin - first
            yield Window(_slice(tiles[0], first, width=piece), low, low + end - begin)
        return
    device = next(iter(tiles[0].devices()))
    near = tuple(jax.device_put(tile, device) for tile in tiles)
    joined = _join(near, width=width(min(run.size, piece), piece))
    for number, (begin, end) in enumerate(run.pieces(piece)):
        yield Window(joined[number], 0, end - begin)


def width(size: int, piece: int) -> int:
    """The length of the window for so many numbers."""
    found = SHORTEST
    while found < size:
        found *= 4
    return min(found, piece)


def to_bits(x: jax.Array) -> Bits:
    """The bits of an array as unsigned integers, flat; numbers of 64 bits are two."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8).reshape(-1)
    size = min(x.dtype.itemsize, 4)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}")).reshape(-1)


@functools.partial(jax.jit, static_argnames="width")
def _slice(tile: jax.Array, first: jax.Array, width: int) -> Bits:
    return lax.dynamic_slice(to_bits(tile), (first,), (width,))


@functools.partial(jax.jit, static_argnames="width")
def _join(tiles: tuple[jax.Array, ...], width: int) -> list[Bits]:
    flat = jnp.concatenate([to_bits(tile) for tile in tiles])
    rows = jnp.pad(flat, (0, -flat.size % width)).reshape(-1, width)
    return list(rows)

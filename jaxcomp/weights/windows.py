"""Windows of device arrays: the bits of a piece, in one of a few lengths.

A long tile is read where it lies; short ones are joined. Few lengths mean few compiled programs.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import UInt

from jaxcomp.types import Array
from jaxcomp_weights.layouts import Run

SHORTEST = 4096
"""The shortest window; the next ones are 2, 4, … times as long, up to a piece."""

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


class Windows:
    """The windows of the pieces of a run, one after another, as often as they are asked for.

    Args:
        tiles: the arrays of the run's tiles.
        run: the run.
        piece: the most numbers in a piece.
    """

    def __init__(self, tiles: Sequence[jax.Array], run: Run, piece: int):
        self._tiles, self._run, self._piece = tiles, run, piece
        self._joined: list[Bits] | None = None
        if len(tiles) > 1 or run.size < piece:
            device = next(iter(tiles[0].devices()))
            near = tuple(on(tile, device) for tile in tiles)
            self._joined = _join(near, piece=piece)

    def __iter__(self) -> Iterator[Window]:
        for number, (begin, end) in enumerate(self._run.pieces(self._piece)):
            if self._joined is not None:
                yield Window(self._joined[number], 0, end - begin)
                continue
            first = min(begin, self._run.size - self._piece)
            low = begin - first
            bits = _slice(self._tiles[0], first, width=self._piece)
            yield Window(bits, low, low + end - begin)


def on(tile: jax.Array, device: Any) -> jax.Array:
    """The tile on this device: as it is where it lies there, since asking JAX takes time."""
    return tile if tile.devices() == {device} else jax.device_put(tile, device)


def width(size: int, piece: int) -> int:
    """The length of the window for so many numbers."""
    found = SHORTEST
    while found < size:
        found *= 2
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


@functools.partial(jax.jit, static_argnames="piece")
def _join(tiles: tuple[jax.Array, ...], piece: int) -> list[Bits]:
    """The windows of joined tiles: each is written once, from the parts that lie in it."""
    flat = [to_bits(tile) for tile in tiles]
    ends = np.cumsum([bits.size for bits in flat])
    size, found = int(ends[-1]), []
    for begin in range(0, size, piece):
        end = min(begin + piece, size)
        parts = [
            bits[max(begin - int(last - bits.size), 0) : end - int(last - bits.size)]
            for bits, last in zip(flat, ends, strict=True)
            if last > begin and last - bits.size < end
        ]
        rest = jnp.zeros(width(end - begin, piece) - (end - begin), flat[0].dtype)
        found.append(jnp.concatenate([*parts, rest]))
    return found

"""Checksums on the device, equal to those of `jaxcomp_weights.checksums`."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32, UInt, UInt32

from jaxcomp.types import Array
from jaxcomp_weights.checksums import SEEDS

_FEW = 32
"""Tiles up to which each position is compared with the end of every tile."""


@jax.jit
def of_window(
    bits: UInt[Array, " size"],
    low: Array,
    high: Array,
    begin: Array,
    ends: Int32[Array, " tiles"],
) -> UInt32[Array, "tiles 2"]:
    """The checksums of the tiles of a run, of the numbers in a window.

    Args:
        bits: the window.
        low: the first position of the piece.
        high: the position after the last one.
        begin: the first number of the piece in its run.
        ends: where each tile of the run ends.
    """
    place = jnp.arange(bits.size, dtype=jnp.int32)
    valid = (place >= low) & (place < high)
    at = place - low + begin
    tile = _tile_of(at, ends)
    return _sums(_hashes(at, bits, tile, ends), valid, tile, ends.size)


@jax.jit
def of_changes(
    old: UInt[Array, " size"],
    new: UInt[Array, " size"],
    places: Int32[Array, " k"],
    count: Array,
    low: Array,
    begin: Array,
    ends: Int32[Array, " tiles"],
) -> UInt32[Array, "tiles 2"]:
    """The change of the tiles' checksums by the changed numbers of a window."""
    before, after = (jnp.take(bits, places, mode="clip") for bits in (old, new))
    return change(before, after, places - low + begin, jnp.arange(places.size) < count, ends)


def change(
    before: UInt[Array, " k"],
    after: UInt[Array, " k"],
    at: Int32[Array, " k"],
    valid: Bool[Array, " k"],
    ends: Int32[Array, " tiles"],
) -> UInt32[Array, "tiles 2"]:
    """The change of the tiles' checksums by numbers at these positions of a run, which ascend."""
    at = jnp.where(valid, at, ends[-1])
    tile = _tile_of(at, ends)
    hashes = _hashes(at, after, tile, ends) - _hashes(at, before, tile, ends)
    return _sums(hashes, valid, tile, ends.size)


def _tile_of(at: Int32[Array, " n"], ends: Int32[Array, " tiles"]) -> Int32[Array, " n"]:
    """The tile of each position; positions ascend. A bisection for each would take longer."""
    if ends.size <= _FEW:
        return jnp.sum(at[:, None] >= ends[None, :-1], axis=1, dtype=jnp.int32)
    begins = jnp.searchsorted(at, ends[:-1])
    marks = jnp.zeros(at.size, jnp.int32).at[begins].add(1, mode="drop", indices_are_sorted=True)
    return jnp.cumsum(marks)


def _hashes(
    at: Int32[Array, " n"],
    bits: UInt[Array, " n"],
    tile: Int32[Array, " n"],
    ends: Int32[Array, " tiles"],
) -> UInt32[Array, "n 2"]:
    if ends.size > 1:  # Positions count from the begin of a tile.
        at = at - jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])[tile]
    positions, bits = at.astype(jnp.uint32), bits.astype(jnp.uint32)
    return jnp.stack([_hash(positions, bits, *seed) for seed in SEEDS], axis=-1)


def _sums(
    hashes: UInt32[Array, "n 2"], valid: Array, tile: Int32[Array, " n"], tiles: int
) -> UInt32[Array, "tiles 2"]:
    hashes = jnp.where(valid[:, None], hashes, 0)
    if tiles == 1:
        return jnp.sum(hashes, axis=0, dtype=jnp.uint32)[None]
    empty = jnp.zeros((tiles, 2), jnp.uint32)
    return empty.at[tile].add(hashes, mode="drop", indices_are_sorted=True)


def _hash(positions: Array, bits: Array, by: int, on: int, plus: int) -> Array:
    x = (positions * jnp.uint32(by)) ^ (bits * jnp.uint32(on) + jnp.uint32(plus))
    for shift, multiplier in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = (x ^ (x >> shift)) * jnp.uint32(multiplier)
    return x ^ (x >> 15)

"""Checksums on the device, equal to those of `jaxcomp_weights.checksums`."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Int32, UInt, UInt32

from jaxcomp.types import Array
from jaxcomp_weights.checksums import SEEDS


@functools.partial(jax.jit, static_argnames="tiles")
def of_window(
    bits: UInt[Array, " size"],
    low: Array,
    high: Array,
    begin: Array,
    ends: Int32[Array, " tiles"],
    tiles: int,
) -> UInt32[Array, "tiles 2"]:
    """The checksums of the tiles of a run, of the numbers in a window.

    Args:
        bits: the window.
        low: the first position of the piece.
        high: the position after the last one.
        begin: the first number of the piece in its run.
        ends: where each tile of the run ends.
        tiles: the number of tiles.
    """
    place = jnp.arange(bits.size, dtype=jnp.int32)
    valid = (place >= low) & (place < high)
    return _sums(_hashes(place - low + begin, bits, ends), valid, place - low + begin, ends, tiles)


@functools.partial(jax.jit, static_argnames="tiles")
def of_changes(
    old: UInt[Array, " size"],
    new: UInt[Array, " size"],
    places: Int32[Array, " k"],
    count: Array,
    low: Array,
    begin: Array,
    ends: Int32[Array, " tiles"],
    tiles: int,
) -> UInt32[Array, "tiles 2"]:
    """The change of the tiles' checksums by the changed numbers of a window."""
    valid = jnp.arange(places.size) < count
    at = places - low + begin
    before, after = (jnp.take(bits, places, mode="clip") for bits in (old, new))
    hashes = _hashes(at, after, ends) - _hashes(at, before, ends)
    return _sums(hashes, valid, at, ends, tiles)


def _hashes(
    at: Int32[Array, " n"], bits: UInt[Array, " n"], ends: Int32[Array, " tiles"]
) -> UInt32[Array, "n 2"]:
    if ends.size > 1:  # Positions count from the begin of a tile.
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        at = at - starts[jnp.searchsorted(ends, at, side="right")]
    positions, bits = at.astype(jnp.uint32), bits.astype(jnp.uint32)
    return jnp.stack([_hash(positions, bits, *seed) for seed in SEEDS], axis=-1)


def _sums(
    hashes: UInt32[Array, "n 2"],
    valid: Array,
    at: Int32[Array, " n"],
    ends: Int32[Array, " tiles"],
    tiles: int,
) -> UInt32[Array, "tiles 2"]:
    hashes = jnp.where(valid[:, None], hashes, 0)
    if tiles == 1:
        return jnp.sum(hashes, axis=0, dtype=jnp.uint32)[None]
    tile = jnp.where(valid, jnp.searchsorted(ends, at, side="right"), tiles)
    return jnp.zeros((tiles, 2), jnp.uint32).at[tile].add(hashes, mode="drop")


def _hash(positions: Array, bits: Array, by: int, on: int, plus: int) -> Array:
    x = (positions * jnp.uint32(by)) ^ (bits * jnp.uint32(on) + jnp.uint32(plus))
    for shift, multiplier in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        x = (x ^ (x >> shift)) * jnp.uint32(multiplier)
    return x ^ (x >> 15)

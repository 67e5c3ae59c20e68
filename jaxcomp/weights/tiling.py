"""The tiles of sharded arrays: each index range once, by one of the processes that have it."""

import jax

from jaxcomp_weights.layouts import Layout, Leaf, Tile

PIECE = {"cpu": 1 << 20}
"""Numbers in a piece by platform: on a CPU, what fits its caches."""
_PIECE = 1 << 24
"""Elsewhere: more lanes work at the same time."""


def layout(named: dict[str, jax.Array]) -> Layout:
    """The layout of arrays, the same on all processes.

    Ranges that several processes have are dealt out among them, leaf by leaf.

    Raises:
        ValueError: for a shard of 2³¹ numbers or more.
    """
    leaves = tuple(Leaf(name, x.dtype.name, x.shape) for name, x in named.items())
    parts: list[list[Tile]] = [[] for _ in range(jax.process_count())]
    platform = "cpu"
    for number, array in enumerate(named.values()):
        platform = next(iter(array.sharding.device_set)).platform
        owners: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            ranges = _ranges(index, array.shape)
            if device.process_index not in owners.setdefault(ranges, []):
                owners[ranges].append(device.process_index)
        for ranges, processes in owners.items():
            start = tuple(low for low, _ in ranges)
            shape = tuple(high - low for low, high in ranges)
            tile = Tile(number, start, shape)
            parts[sorted(processes)[number % len(processes)]].append(tile)
    found = Layout(leaves, tuple(map(tuple, parts)), PIECE.get(platform, _PIECE))
    for part in range(len(parts)):
        if any(run.size >= 2**31 for run in found.runs(part)):
            raise ValueError(
                "`params` must have shards of fewer than 2³¹ numbers, and fewer than that in all "
                "short ones; split large leaves in `export`"
            )
    return found


def tiles(named: dict[str, jax.Array], layout: Layout) -> list[jax.Array]:
    """The arrays of the tiles of this process, each on one device."""
    arrays = list(named.values())
    held = [
        {_ranges(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        for array in arrays
    ]
    return [
        held[tile.leaf][tuple((a, a + n) for a, n in zip(tile.start, tile.shape, strict=True))]
        for tile in layout.parts[jax.process_index()]
    ]


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(one.indices(n)[:2] for one, n in zip(index, shape, strict=True))

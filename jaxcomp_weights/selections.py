"""Which leaves, and which parts of them, a reader builds."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcomp_weights.layouts import Layout, Tile


class Region(NamedTuple):
    """The part of a leaf that a reader keeps, and the part of it that it shows.

    Attributes:
        start: the first index kept in each dimension.
        shape: the shape of the part.
        shown: slices of it that the user selected; None if the leaf is kept for other leaves only.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    shown: tuple[slice, ...] | None

    def slices(self, tile: Tile) -> tuple[Any, ...]:
        """Where a tile is in this region; with an ellipsis, so that a number gives a view too."""
        its = zip(tile.start, self.start, tile.shape, strict=True)
        return (..., *(slice(a - begin, a - begin + n) for a, begin, n in its))


class Selection(NamedTuple):
    """What a reader keeps of a layout.

    Attributes:
        regions: by the number of the leaf.
        runs: for each part, the runs that are decoded.
    """

    regions: dict[int, Region]
    runs: tuple[frozenset[int], ...]


def check(select: Any) -> None:
    """Raises `ValueError` unless it is None, names, or slices by name."""
    if select is None:
        return
    if isinstance(select, str) or not isinstance(select, Iterable):
        raise ValueError(
            "`select` must be names of leaves, or a dict from names to slices such as "
            f"np.s_[:, :128] (None for all of a leaf), got {select!r}"
        )
    for name in select:
        if not isinstance(name, str):
            raise ValueError(f"`select` must have the names of leaves, got {name!r}")


def select(layout: Layout, wanted: Any) -> Selection:
    """Finds the runs with selected numbers, and the tiles of these runs.

    A patch in the small coding names changed numbers by those that were there before, so all tiles
    of a run are kept.

    Raises:
        ValueError: for names or slices that the leaves do not have.
    """
    shown = _shown(layout, wanted)
    runs, tiles = [], {}
    for part, its in enumerate(layout.parts):
        chosen = set()
        for number, run in enumerate(layout.runs(part)):
            if any(_meets(its[tile], shown) for tile in run.tiles):
                chosen.add(number)
                for tile in run.tiles:
                    tiles.setdefault(its[tile].leaf, []).append(its[tile])
        runs.append(frozenset(chosen))
    regions = {}
    for leaf, its in tiles.items():
        low = np.min([tile.start for tile in its], axis=0).astype(int)
        high = np.max([np.add(tile.start, tile.shape) for tile in its], axis=0).astype(int)
        box = shown.get(leaf)
        inside = box and tuple(
            slice(b.start - int(a), b.stop - int(a), b.step) for a, b in zip(low, box, strict=True)
        )
        regions[leaf] = Region(
            tuple(low.tolist()),
            tuple((high - low).tolist()),
            () if inside == () else inside or None,
        )
    for leaf, box in shown.items():  # Leaves without numbers are in no run.
        if leaf not in regions:
            empty = tuple(0 for _ in box)
            regions[leaf] = Region(empty, layout.leaves[leaf].shape, box)
    return Selection(regions, tuple(runs))


def _shown(layout: Layout, wanted: Any) -> dict[int, tuple[slice, ...]]:
    """The selected slices of each selected leaf, with a start and a stop."""
    names = {leaf.name: number for number, leaf in enumerate(layout.leaves)}
    if wanted is None:
        wanted = dict.fromkeys(names)
    elif not isinstance(wanted, Mapping):
        wanted = dict.fromkeys(wanted)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(
            f"`select` must have names of leaves, got {missing[0]!r}; there are "
            f"{', '.join(sorted(names)[:20])}{', …' if len(names) > 20 else ''}"
        )
    return {
        names[name]: _box(name, layout.leaves[names[name]].shape, slices)
        for name, slices in wanted.items()
    }


def _box(name: str, shape: tuple[int, ...], slices: Any) -> tuple[slice, ...]:
    given = () if slices is None else slices if isinstance(slices, tuple) else (slices,)
    if len(given) > len(shape) or any(
        not isinstance(one, slice) or (one.step or 1) < 1 for one in given
    ):
        raise ValueError(
            f"`select[{name!r}]` must have at most {len(shape)} slices that ascend, got {slices!r}"
        )
    given = given + (slice(None),) * (len(shape) - len(given))
    return tuple(slice(*one.indices(n)) for one, n in zip(given, shape, strict=True))


def _meets(tile: Tile, shown: dict[int, tuple[slice, ...]]) -> bool:
    """Whether a tile may have selected numbers."""
    box = shown.get(tile.leaf)
    return box is not None and all(
        a < b.stop and b.start < a + n for a, n, b in zip(tile.start, tile.shape, box, strict=True)
    )

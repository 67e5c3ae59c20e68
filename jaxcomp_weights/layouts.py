"""The layout of a model: its leaves, the tiles that processes write, and pieces of tiles.

A tile is a rectangular part of a leaf that one process has; a whole leaf where nothing is sharded.
The part of a process is a list of tiles. Long tiles are cut into pieces; short ones of one dtype
are joined. Publisher and reader derive this from the layout alone.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcomp_weights import patterns
from jaxcomp_weights.errors import Damaged

_MOST_DIMENSIONS = 32
_MOST_PIECE = 1 << 24
"""The longest piece that a publisher writes; the memory of a decoder is a multiple of it."""
_MOST_NUMBERS = 1 << 48
_MOST_TILES = 1 << 12
"""Tiles of a leaf that are compared with each other, unless they are a grid."""


class Leaf(NamedTuple):
    """An array of the model."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Tile(NamedTuple):
    """A rectangular part of a leaf.

    Attributes:
        leaf: the number of the leaf.
        start: the first index in each dimension.
        shape: its own shape.
    """

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it is in its leaf."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


class Run(NamedTuple):
    """Tiles of one dtype that are coded as one array.

    Attributes:
        tiles: their numbers in their part.
        dtype: the dtype.
        sizes: for each tile the numbers in it; those of 64 bits count twice.
    """

    tiles: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """The numbers in all tiles."""
        return sum(self.sizes)

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """The first number and the number after the last one of each piece."""
        for begin in range(0, self.size, size):
            yield begin, min(begin + size, self.size)


class Layout(NamedTuple):
    """What all versions have in common.

    Attributes:
        leaves: the arrays.
        parts: the tiles of each process.
        piece: the most numbers in a piece.
    """

    leaves: tuple[Leaf, ...]
    parts: tuple[tuple[Tile, ...], ...]
    piece: int

    def runs(self, part: int) -> list[Run]:
        """The runs of a process: long tiles alone, then the short ones of each dtype."""
        long, short = [], {}
        for number, tile in enumerate(self.parts[part]):
            name = self.leaves[tile.leaf].dtype
            size = count(tile.shape, name)
            if size >= self.piece // 4:
                long.append(Run((number,), name, (size,)))
            elif size:
                short.setdefault(name, []).append((number, size))
        joined = [
            Run(tuple(number for number, _ in tiles), name, tuple(size for _, size in tiles))
            for name, tiles in short.items()
        ]
        return [*long, *joined]

    @property
    def numbers(self) -> int:
        """The numbers in all leaves."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves."""
        return sum(math.prod(leaf.shape) * patterns.itemsize(leaf.dtype) for leaf in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """As JSON can have it."""
        return {
            "leaves": [[*leaf] for leaf in self.leaves],
            "parts": [[[*tile] for tile in part] for part in self.parts],
            "piece": self.piece,
        }

    @property
    def digest(self) -> str:
        """A SHA-256 of all of it, by which manifests name it."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def from_json(cls, found: Any, digest: str) -> "Layout":
        """The layout that `to_json` has written.

        Raises:
            Damaged: unless it has this digest, and the tiles of each leaf cover it once.
        """
        try:
            leaves = tuple(Leaf(str(n), str(d), _shape(s)) for n, d, s in found["leaves"])
            parts = tuple(
                tuple(Tile(_number(leaf), _shape(a), _shape(n)) for leaf, a, n in part)
                for part in found["parts"]
            )
            layout = cls(leaves, parts, _number(found["piece"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Damaged(f"its layout cannot be read: {error!r}") from None
        if layout.digest != digest:
            raise Damaged("its layout is not the one that its manifest names")
        layout.check()
        return layout

    def check(self) -> None:
        """Raises `Damaged` unless names are unique and tiles cover each leaf once."""
        names = {leaf.name for leaf in self.leaves}
        if len(names) < len(self.leaves):
            raise Damaged("two leaves have one name")
        if not 4 <= self.piece <= _MOST_PIECE:
            raise Damaged(f"its pieces have {self.piece} numbers")
        for leaf in self.leaves:
            if leaf.dtype not in patterns.FORMATS:
                raise Damaged(f"leaf {leaf.name!r} has the unknown dtype {leaf.dtype!r}")
            if math.prod(max(n, 1) for n in leaf.shape) > _MOST_NUMBERS:
                raise Damaged(f"leaf {leaf.name!r} has the shape {list(leaf.shape)}")
        covered: list[list[Tile]] = [[] for _ in self.leaves]
        for tile in (tile for part in self.parts for tile in part):
            if not 0 <= tile.leaf < len(self.leaves):
                raise Damaged(f"a tile is of leaf {tile.leaf}, of {len(self.leaves)}")
            covered[tile.leaf].append(tile)
        for leaf, tiles in zip(self.leaves, covered, strict=True):
            _check_cover(leaf, tiles)


def count(shape: Sequence[int], name: str) -> int:
    """The coded numbers of an array: two for each of 64 bits."""
    return math.prod(shape) * (2 if name in patterns.PAIRS else 1)


def _shape(found: Sequence[Any]) -> tuple[int, ...]:
    shape = tuple(found)
    if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{shape} is no shape")
    return shape


def _number(found: Any) -> int:
    if type(found) is not int:
        raise ValueError(f"{found!r} is no number")
    return found


def _check_cover(leaf: Leaf, tiles: list[Tile]) -> None:
    """Raises unless tiles are inside of the leaf, do not overlap, and have all of its numbers."""
    for tile in tiles:
        inside = len(tile.start) == len(tile.shape) == len(leaf.shape)
        if not inside or any(
            a + n > whole for a, n, whole in zip(tile.start, tile.shape, leaf.shape, strict=True)
        ):
            raise Damaged(f"a tile of {leaf.name!r} at {tile.start} is outside of {leaf.shape}")
    volume = sum(math.prod(tile.shape) for tile in tiles)
    whole = math.prod(leaf.shape)
    if volume != whole:
        raise Damaged(f"the tiles of {leaf.name!r} have {volume} numbers, and it has {whole}")
    if len(tiles) < 2 or not whole:
        return
    boxes = np.array([[tile.start, np.add(tile.start, tile.shape)] for tile in tiles])
    if _is_grid(boxes):
        return
    if len(tiles) > _MOST_TILES:
        raise Damaged(f"{leaf.name!r} has {len(tiles)} tiles that are no grid")
    for number in range(len(tiles) - 1):
        low = np.maximum(boxes[number + 1 :, 0], boxes[number, 0])
        high = np.minimum(boxes[number + 1 :, 1], boxes[number, 1])
        if np.any(np.all(low < high, axis=1)):
            raise Damaged(f"two tiles of {leaf.name!r} overlap")


def _is_grid(boxes: np.ndarray) -> bool:
    """Whether tiles, from their starts to their ends, are different cells of a grid."""
    cells = np.empty((boxes.shape[0], boxes.shape[2]), np.int64)
    for axis in range(boxes.shape[2]):
        bounds = np.unique(boxes[:, :, axis])
        cells[:, axis] = np.searchsorted(bounds, boxes[:, 0, axis])
        if np.any(np.searchsorted(bounds, boxes[:, 1, axis]) != cells[:, axis] + 1):
            return False
    return len(np.unique(cells, axis=0)) == len(cells)

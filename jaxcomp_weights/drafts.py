"""The next version while it is built: arrays are copied before they are changed."""

from typing import Any

import numpy as np

from jaxcomp_weights import checksums, patterns, pieces, rans
from jaxcomp_weights.checksums import Sum
from jaxcomp_weights.errors import Damaged
from jaxcomp_weights.layouts import Layout, Run
from jaxcomp_weights.selections import Selection
from jaxcomp_weights.stores import Stream

MAGIC = b"\x8bJXW\x01\x00\x00\x00"
"""The first bytes of a file of pieces: its kind and the version of its format."""


_TOGETHER = 1 << 21
"""Symbols that are decoded together, about: they take 16 MB, and numpy's calls are then few."""


class Draft:
    """Arrays of bits that patches and snapshots change.

    Args:
        layout: the layout of all versions on the way.
        selection: what is kept of it.
        arrays: the arrays of the version before, by the number of the leaf, which stay as they are.
        sums: the checksums of its tiles, by part and tile.
    """

    def __init__(
        self,
        layout: Layout,
        selection: Selection,
        arrays: dict[int, np.ndarray] | None = None,
        sums: dict[tuple[int, int], Sum] | None = None,
    ):
        self._layout, self._selection = layout, selection
        self.arrays = dict(arrays or {})
        self.sums = dict(sums or {})
        self._own: set[int] = set()

    def apply(self, stream: Stream, part: int, snapshot: bool) -> None:
        """Applies the file of a process.

        Raises:
            Damaged: for a file that was not published; the draft cannot be used any more.
        """
        if stream.take(len(MAGIC)) != MAGIC:
            raise Damaged("its file is of another kind, or of a newer format")
        least = sum(_least(run, self._layout.piece) for run in self._layout.runs(part))
        if snapshot and stream.left < least:  # Before memory is taken for them.
            raise Damaged(f"its file has {stream.left} bytes, and its numbers at least {least}")
        tables: dict[str, pieces.Tables] = {}
        for number, run in enumerate(self._layout.runs(part)):
            wanted = number in self._selection.runs[part]
            numbers = _Numbers(self, part, run, snapshot) if wanted else None
            together: list[tuple[int, int, pieces.Waiting]] = []
            for begin, end in run.pieces(self._layout.piece):
                kind, data = self._next(stream, run, tables if begin == 0 else None, snapshot)
                if numbers is None:
                    continue
                waiting = self._decode(numbers, begin, end, kind, data)
                if waiting is not None:
                    together.append((begin, end, waiting))
                if sum(one.coded.count for _, _, one in together) > _TOGETHER:
                    self._decode_together(numbers, together, tables.get(run.dtype))
                    together = []
            if numbers is not None:
                self._decode_together(numbers, together, tables.get(run.dtype))
                numbers.put_back()
        stream.end()

    def check(self, expected: tuple[tuple[Sum, ...], ...]) -> None:
        """Raises `Damaged` unless the tiles have these checksums."""
        for (part, tile), found in self.sums.items():
            try:
                want = expected[part][tile]
            except IndexError:
                raise Damaged("the manifest has too few checksums") from None
            if found != want:
                name = self._layout.leaves[self._layout.parts[part][tile].leaf].name
                raise Damaged(f"{name!r} has the checksum {found}, expected {want}")

    def place(self, part: int, tile: int) -> tuple[int, Any]:
        """The leaf of a tile, and where the tile is in what is kept of it."""
        its = self._layout.parts[part][tile]
        return its.leaf, self._selection.regions[its.leaf].slices(its)

    def tile(self, part: int, tile: int) -> np.ndarray:
        """A tile as it is now, to read.

        Raises:
            Damaged: if there is none yet.
        """
        leaf, where = self.place(part, tile)
        if leaf not in self.arrays:
            raise Damaged("a patch comes before a snapshot")
        return self.arrays[leaf][where]

    def own(self, part: int, tile: int) -> np.ndarray:
        """A tile of an array that this draft may change."""
        leaf, where = self.place(part, tile)
        if leaf not in self._own:
            if leaf in self.arrays:
                self.arrays[leaf] = self.arrays[leaf].copy()
            else:
                size = patterns.itemsize(self._layout.leaves[leaf].dtype)
                self.arrays[leaf] = np.zeros(self._selection.regions[leaf].shape, f"<u{size}")
            self._own.add(leaf)
        return self.arrays[leaf][where]

    def _next(
        self, stream: Stream, run: Run, tables: dict[str, pieces.Tables] | None, snapshot: bool
    ) -> tuple[int, bytes]:
        """The next piece of a file; the first one of a run may have tables before it."""
        most = patterns.unsigned(run.dtype).itemsize * self._layout.piece + (1 << 16)
        while True:
            kind, size = pieces.HEAD.unpack(stream.take(pieces.HEAD.size))
            if size > most:
                raise Damaged(f"a piece has {size} bytes, of at most {most}")
            data = stream.take(size)
            if kind != pieces.TABLE:
                return kind, data
            if tables is None:
                raise Damaged("a table is where a piece should be")
            tables[run.dtype] = pieces.Tables.read(data, snapshot)
            tables = None

    def _decode(
        self, numbers: "_Numbers", begin: int, end: int, kind: int, data: bytes
    ) -> pieces.Waiting | None:
        """Decodes a piece; or returns it, if its symbols wait for those of others."""
        size, name, snapshot = end - begin, numbers.run.dtype, numbers.snapshot
        if kind == pieces.RAW:
            fresh = pieces.raw(data, size, name)
            if snapshot:
                self._set(numbers, begin, fresh)
            else:
                old = numbers.read(begin, end)
                where = np.flatnonzero(fresh != old)
                self._move(numbers, begin, end, pieces.Changes(where, old[where], fresh[where]))
        elif kind == pieces.SNAPSHOT and snapshot:
            return pieces.snapshot(data, size, name)
        elif kind == pieces.SMALL and not snapshot:
            return pieces.small(data, size)
        elif kind == pieces.FAST and not snapshot:
            found = pieces.fast_changes(data, numbers.read(begin, end), name)
            self._move(numbers, begin, end, found)
        elif kind != pieces.UNCHANGED or snapshot or data:
            raise Damaged(f"a file has a piece of kind {kind} with {len(data)} bytes")
        return None

    def _decode_together(
        self,
        numbers: "_Numbers",
        together: list[tuple[int, int, pieces.Waiting]],
        tables: pieces.Tables | None,
    ) -> None:
        """Decodes pieces whose symbols are in the same tables."""
        if not together:
            return
        if tables is None:
            raise Damaged("a piece comes before its tables")
        name = numbers.run.dtype
        decoded = rans.decode([waiting.coded for _, _, waiting in together], tables.slots)
        for (begin, end, waiting), symbols in zip(together, decoded, strict=True):
            if numbers.snapshot:
                self._set(numbers, begin, pieces.snapshot_bits(waiting, symbols, name))
            else:
                old = numbers.read(begin, end)
                self._move(numbers, begin, end, pieces.small_changes(waiting, symbols, old, name))

    def _set(self, numbers: "_Numbers", begin: int, fresh: np.ndarray) -> None:
        """Sets the numbers of a piece, and their checksums."""
        numbers.write(begin, begin + fresh.size)[:] = fresh
        for tile, first, inside in _meet(numbers.run, begin, fresh.size):
            self.sums[numbers.part, tile] += checksums.of(fresh[inside], first)

    def _move(self, numbers: "_Numbers", begin: int, end: int, found: pieces.Changes) -> None:
        """Changes numbers of a piece, and their checksums."""
        places, old, new = found
        if not places.size:
            return
        numbers.write(begin, end)[places] = new
        several = len(numbers.run.tiles) > 1
        if several:
            order = np.argsort(places, kind="stable")
            places, old, new = places[order], old[order], new[order]
        for tile, first, inside in _meet(numbers.run, begin, end - begin):
            low, high = 0, places.size
            if several:
                low, high = np.searchsorted(places, (inside.start, inside.stop))
            at = places[low:high] + (first - inside.start)
            change = checksums.at(at, new[low:high]) - checksums.at(at, old[low:high])
            self.sums[numbers.part, tile] += change


class _Numbers:
    """The numbers of a run as one array, which is a view of a leaf where that is possible.

    Args:
        draft: the draft.
        part: the process.
        run: the run.
        snapshot: whether all numbers will be set.
    """

    def __init__(self, draft: Draft, part: int, run: Run, snapshot: bool):
        self.part, self.run, self.snapshot = part, run, snapshot
        self._draft = draft
        if snapshot:
            for tile in run.tiles:
                draft.own(part, tile)
                draft.sums[part, tile] = checksums.ZERO
        tiles = [draft.tile(part, tile) for tile in run.tiles]
        self._is_view = len(tiles) == 1 and tiles[0].flags.c_contiguous
        self._is_own = not self._is_view or snapshot
        flat = [_flat(np.ascontiguousarray(tile), run.dtype) for tile in tiles]
        self._bits = flat[0] if len(flat) == 1 else np.concatenate(flat)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Numbers as they are now."""
        return self._bits[begin:end]

    def write(self, begin: int, end: int) -> np.ndarray:
        """Numbers that may be changed."""
        if not self._is_own:
            self._bits = _flat(self._draft.own(self.part, self.run.tiles[0]), self.run.dtype)
            self._is_own = True
        return self._bits[begin:end]

    def put_back(self) -> None:
        """Copies changed tiles to their leaves, unless the array is a view of one."""
        if self._is_view:
            return
        begin = 0
        for tile, size in zip(self.run.tiles, self.run.sizes, strict=True):
            now = self._draft.tile(self.part, tile)
            fresh = self._bits[begin : begin + size].view(now.dtype).reshape(now.shape)
            if not np.array_equal(now, fresh):
                self._draft.own(self.part, tile)[...] = fresh
            begin += size


def _meet(run: Run, begin: int, size: int) -> "list[tuple[int, int, slice]]":
    """The tiles of a piece: number, first position in the tile, and slice of the piece."""
    ends = np.cumsum(run.sizes)
    first = int(np.searchsorted(ends, begin, side="right"))
    found = []
    for index in range(first, len(run.tiles)):
        start = int(ends[index]) - run.sizes[index]
        if start >= begin + size:
            break
        low, high = max(start, begin), min(int(ends[index]), begin + size)
        found.append((run.tiles[index], low - start, slice(low - begin, high - begin)))
    return found


def _least(run: Run, piece: int) -> int:
    """The fewest bytes that a snapshot has for a run."""
    size = patterns.unsigned(run.dtype).itemsize
    full, rest = divmod(run.size, piece)
    return full * pieces.least(piece, size) + (pieces.least(rest, size) if rest else 0)


def _flat(array: np.ndarray, name: str) -> np.ndarray:
    return array.reshape(-1).view(patterns.unsigned(name))

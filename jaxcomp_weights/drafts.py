"""The next version while it is built: arrays are copied before they are changed."""

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
        tables: dict[str, pieces.Tables] = {}
        for number, run in enumerate(self._layout.runs(part)):
            wanted = number in self._selection.runs[part]
            bits = self._begin(part, run, snapshot) if wanted else None
            together: list[tuple[int, np.ndarray, pieces.Waiting]] = []
            for begin, end in run.pieces(self._layout.piece):
                kind, data = self._next(stream, run, tables, snapshot)
                if bits is None:
                    continue
                waiting = self._decode(part, run, begin, bits[begin:end], kind, data, snapshot)
                if waiting is not None:
                    together.append((begin, bits[begin:end], waiting))
                if sum(one.coded.count for _, _, one in together) > _TOGETHER:
                    self._decode_together(part, run, together, tables.get(run.dtype), snapshot)
                    together = []
            if bits is not None:
                self._decode_together(part, run, together, tables.get(run.dtype), snapshot)
                self._end(part, run, bits)
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

    def _begin(self, part: int, run: Run, snapshot: bool) -> np.ndarray:
        """The numbers of a run, in one array: a view of a leaf where that is possible."""
        tiles = self._layout.parts[part]
        if snapshot:
            self.sums.update({(part, tile): checksums.ZERO for tile in run.tiles})
        if len(run.tiles) == 1:
            view = self._array(tiles[run.tiles[0]].leaf, snapshot)
            region = self._selection.regions[tiles[run.tiles[0]].leaf]
            view = view[region.slices(tiles[run.tiles[0]])]
            if view.flags.c_contiguous:
                return _flat(view, run.dtype)
        parts = [
            np.zeros(size, patterns.unsigned(run.dtype))
            if snapshot
            else _flat(np.ascontiguousarray(self._tile(part, tile)), run.dtype)
            for tile, size in zip(run.tiles, run.sizes, strict=True)
        ]
        return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)

    def _end(self, part: int, run: Run, bits: np.ndarray) -> None:
        """Puts the numbers of a run where they belong, unless they are there."""
        begin = 0
        for tile, size in zip(run.tiles, run.sizes, strict=True):
            leaf = self._layout.parts[part][tile].leaf
            target = self._array(leaf, True)[
                self._selection.regions[leaf].slices(self._layout.parts[part][tile])
            ]
            if not np.shares_memory(target, bits):
                target[...] = bits[begin : begin + size].view(target.dtype).reshape(target.shape)
            begin += size

    def _tile(self, part: int, tile: int) -> np.ndarray:
        place = self._layout.parts[part][tile]
        array = self.arrays.get(place.leaf)
        if array is None:
            raise Damaged("a patch comes before a snapshot")
        return array[self._selection.regions[place.leaf].slices(place)]

    def _array(self, leaf: int, fresh: bool) -> np.ndarray:
        """The array of a leaf, that this draft may change."""
        if leaf not in self._own:
            region, name = self._selection.regions[leaf], self._layout.leaves[leaf].dtype
            if leaf in self.arrays:
                self.arrays[leaf] = self.arrays[leaf].copy()
            elif fresh:
                self.arrays[leaf] = np.zeros(region.shape, f"<u{patterns.itemsize(name)}")
            else:
                raise Damaged("a patch comes before a snapshot")
            self._own.add(leaf)
        return self.arrays[leaf]

    def _next(
        self, stream: Stream, run: Run, tables: dict[str, pieces.Tables], snapshot: bool
    ) -> tuple[int, bytes]:
        """The next piece of a file, after the tables before it."""
        most = patterns.unsigned(run.dtype).itemsize * self._layout.piece + (1 << 16)
        while True:
            kind, size = pieces.HEAD.unpack(stream.take(pieces.HEAD.size))
            if size > most:
                raise Damaged(f"a piece has {size} bytes, of at most {most}")
            data = stream.take(size)
            if kind != pieces.TABLE:
                return kind, data
            tables[run.dtype] = pieces.Tables.read(data, snapshot)

    def _decode(
        self,
        part: int,
        run: Run,
        begin: int,
        bits: np.ndarray,
        kind: int,
        data: bytes,
        snapshot: bool,
    ) -> pieces.Waiting | None:
        """Decodes a piece into its array; or returns it, if its symbols wait for those of others."""
        if kind == pieces.RAW:
            fresh = pieces.raw(data, bits.size, run.dtype)
            if snapshot:
                self._set(part, run, begin, bits, fresh)
            else:
                where = np.flatnonzero(fresh != bits)
                self._move(part, run, begin, bits, pieces.Changes(where, bits[where], fresh[where]))
        elif kind == pieces.SNAPSHOT and snapshot:
            return pieces.snapshot(data, bits.size, run.dtype)
        elif kind == pieces.SMALL and not snapshot:
            return pieces.small(data, bits.size)
        elif kind == pieces.FAST and not snapshot:
            self._move(part, run, begin, bits, pieces.fast_changes(data, bits, run.dtype))
        elif kind != pieces.UNCHANGED or snapshot or data:
            raise Damaged(f"a file has a piece of kind {kind} with {len(data)} bytes")
        return None

    def _decode_together(
        self,
        part: int,
        run: Run,
        together: list[tuple[int, np.ndarray, pieces.Waiting]],
        tables: pieces.Tables | None,
        snapshot: bool,
    ) -> None:
        """Decodes pieces whose symbols are in the same tables."""
        if not together:
            return
        if tables is None:
            raise Damaged("a piece comes before its tables")
        decoded = rans.decode([waiting.coded for _, _, waiting in together], tables.slots)
        for (begin, bits, waiting), symbols in zip(together, decoded, strict=True):
            if snapshot:
                fresh = pieces.snapshot_bits(waiting, symbols, run.dtype)
                self._set(part, run, begin, bits, fresh)
            else:
                found = pieces.small_changes(waiting, symbols, bits, run.dtype)
                self._move(part, run, begin, bits, found)

    def _set(self, part: int, run: Run, begin: int, bits: np.ndarray, fresh: np.ndarray) -> None:
        """Sets the numbers of a piece, and their checksums."""
        bits[:] = fresh
        for tile, first, inside in _meet(run, begin, bits.size):
            self.sums[part, tile] += checksums.of(bits[inside], first)

    def _move(
        self, part: int, run: Run, begin: int, bits: np.ndarray, found: pieces.Changes
    ) -> None:
        """Changes numbers of a piece, and their checksums."""
        bits[found.positions] = found.new
        places = found.positions
        if len(run.tiles) > 1:
            order = np.argsort(places, kind="stable")
            places, old, new = places[order], found.old[order], found.new[order]
        else:
            old, new = found.old, found.new
        for tile, first, inside in _meet(run, begin, bits.size):
            low, high = 0, places.size
            if len(run.tiles) > 1:
                low, high = np.searchsorted(places, (inside.start, inside.stop))
            if low < high:
                at = places[low:high] + (first - inside.start)
                change = checksums.at(at, new[low:high]) - checksums.at(at, old[low:high])
                self.sums[part, tile] += change


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


def _flat(array: np.ndarray, name: str) -> np.ndarray:
    return array.reshape(-1).view(patterns.unsigned(name))

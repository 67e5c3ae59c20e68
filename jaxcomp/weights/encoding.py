"""Files of pieces, from the device: snapshots and patches of the tiles of one process."""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.messages.streams import frequencies
from jaxcomp.weights import changed, checksums, fast, small, whole
from jaxcomp.weights.windows import Window, windows
from jaxcomp_weights import alphabets, bitstreams, patterns, pieces
from jaxcomp_weights.checksums import ZERO, Sum
from jaxcomp_weights.drafts import MAGIC
from jaxcomp_weights.layouts import Layout, Run

_AHEAD = 2
"""Pieces that the device codes while one is written."""

Tiles = Sequence[jax.Array]


class _Piece(NamedTuple):
    """A piece that waits to be coded."""

    window: Window
    begin: int
    found: Any = None
    count: int = 0


def snapshot(tiles: Tiles, layout: Layout, part: int, sums: list[Sum]) -> Iterator[bytes]:
    """The file of a snapshot, in parts.

    Args:
        tiles: the arrays of the tiles.
        layout: the layout.
        part: the process.
        sums: the checksums of the tiles, which this sets.
    """
    sums[:] = [ZERO] * len(tiles)
    yield MAGIC
    for run in layout.runs(part):
        rotated = pieces.rotated(run.dtype)
        its, ends = _tiles(tiles, run), np.cumsum(run.sizes, dtype=np.int32)

        def cut(its: Tiles = its, run: Run = run) -> Iterator[Window]:
            return windows(its, run, layout.piece)

        counts = np.zeros(256, np.int64)
        for histogram in [whole.histogram(*window, rotated=rotated) for window in cut()]:
            counts += np.asarray(histogram)
        table = _table(counts)
        yield _item(pieces.TABLE, alphabets.write_tables([table]))
        begins = _begins([table])

        def code(
            piece: _Piece,
            table: np.ndarray = table,
            begins: np.ndarray = begins,
            rotated: bool = rotated,
            ends: np.ndarray = ends,
        ) -> Any:
            sum_ = checksums.of_window(*piece.window, piece.begin, ends, tiles=ends.size)
            return whole.encode(*piece.window, table, begins, rotated=rotated), sum_

        work = (_Piece(window, begin) for window, (begin, _) in _numbered(cut(), run, layout))
        for piece, (coded, change) in _pipelined(work, code):
            _add(sums, run, change)
            yield _whole(piece.window, coded)


def patch(
    before: Tiles,
    after: Tiles,
    layout: Layout,
    part: int,
    coding: str,
    sums: list[Sum],
) -> Iterator[bytes]:
    """The file of a patch, in parts.

    Args:
        before: the arrays of the tiles of the version before.
        after: those of the version after.
        layout: the layout of both.
        part: the process.
        coding: "small" or "fast".
        sums: the checksums of the tiles of the version before, which this updates.
    """
    yield MAGIC
    # The same tiles may lie on other devices now.
    pairs = zip(before, after, strict=True)
    before = [jax.device_put(old, next(iter(new.devices()))) for old, new in pairs]
    runs = layout.runs(part)
    found = [_find(before, after, run, layout) for run in runs]
    counts = jax.device_get([[count for _, count in run] for run in found])
    current: dict[str, list[np.ndarray]] = {}
    for run, bitmaps, its in zip(runs, found, counts, strict=True):
        form = patterns.FORMATS[run.dtype]
        ends = np.cumsum(run.sizes, dtype=np.int32)

        def work(
            run: Run = run, bitmaps: Any = bitmaps, its: Any = its
        ) -> Iterator[tuple[Window, _Piece]]:
            pair = (windows(_tiles(tiles, run), run, layout.piece) for tiles in (before, after))
            numbered = _numbered(zip(*pair, strict=True), run, layout)
            for ((old, new), (begin, _)), (bitmap, _), count in zip(
                numbered, bitmaps, its, strict=True
            ):
                yield old, _Piece(new, begin, bitmap, int(count))

        if coding == "small" and any(its):
            tables = _patch_tables(work(), form, current.get(run.dtype))
            if tables is not current.get(run.dtype):
                current[run.dtype] = tables
                yield _item(pieces.TABLE, alphabets.write_tables(tables))
        tables = current.get(run.dtype)
        joined = None if tables is None else (np.concatenate(tables), _begins(tables))

        def code(
            both: tuple[Window, _Piece],
            form: patterns.Format = form,
            ends: np.ndarray = ends,
            joined: Any = joined,
        ) -> Any:
            old, piece = both
            new, count = piece.window, piece.count
            if not count:
                return None
            slots = changed.capacity(count, new.bits.size)
            where = changed.places(piece.found, slots)
            change = checksums.of_changes(
                old.bits, new.bits, where, count, new.low, piece.begin, ends, tiles=ends.size
            )
            given = (old.bits, new.bits, where, np.int32(count), new.low)
            if coding == "fast":
                split = fast.low_bits(count, new.high - new.low)
                return fast.encode(*given, np.uint32(split), form=form), change
            symbols = small.symbols(*given, new.high, form=form)
            return small.encode(symbols, np.int32(count), *joined), change

        for (_, piece), done in _pipelined(work(), code):
            if done is None:
                yield _item(pieces.UNCHANGED)
                continue
            coded, change = done
            _add(sums, run, change)
            if coding == "fast":
                yield _shorter(pieces.FAST, _fast(piece, coded), piece.window)
            else:
                yield _shorter(pieces.SMALL, _small(piece, coded), piece.window)


def _find(before: Tiles, after: Tiles, run: Run, layout: Layout) -> list[tuple[Any, Any]]:
    """The bitmap of changed numbers of each piece, and their number."""
    pair = (windows(_tiles(tiles, run), run, layout.piece) for tiles in (before, after))
    return [
        changed.find(old.bits, new.bits, new.low, new.high) for old, new in zip(*pair, strict=True)
    ]


def _patch_tables(
    work: Iterator[tuple[Window, _Piece]],
    form: patterns.Format,
    current: list[np.ndarray] | None,
) -> list[np.ndarray]:
    """Tables for a run: its own, or the current ones if that is shorter."""
    counts = np.zeros(small.ENTRIES, np.int64)

    def occurrences(both: tuple[Window, _Piece]) -> Any:
        old, piece = both
        if not piece.count:
            return None
        slots = changed.capacity(piece.count, old.bits.size)
        where = changed.places(piece.found, slots)
        window = piece.window
        count = np.int32(piece.count)
        given = (old.bits, window.bits, where, count, window.low, window.high)
        return small.histogram(small.symbols(*given, form=form), count)

    for _, found in _pipelined(work, occurrences):
        if found is not None:
            counts += np.asarray(found)
    split = np.split(counts, np.cumsum(alphabets.PATCH_SIZES)[:-1])
    own = [_table(each) for each in split]
    if current is not None:
        cost = _bits(split, own) / 8 + len(alphabets.write_tables(own))
        if _bits(split, current) / 8 <= cost:
            return current
    return own


def _bits(counts: list[np.ndarray], tables: list[np.ndarray]) -> float:
    """The bits of symbols that occur so often, by tables that may lack some of them."""
    total = 0.0
    for each, table in zip(counts, tables, strict=True):
        some = each > 0
        if np.any(table[some] == 0):
            return np.inf
        total += float(np.sum(each[some] * (alphabets.PRECISION - np.log2(table[some]))))
    return total


def _table(counts: np.ndarray) -> np.ndarray:
    """The frequencies of symbols that occur so often; none has all slots."""
    present = np.flatnonzero(counts)
    if not present.size:
        return np.zeros(counts.size, np.uint32)
    if present.size == 1:
        other = 0 if present[0] else 1
        table = np.zeros(counts.size, np.uint32)
        table[present[0]], table[other] = alphabets.TOTAL - 1, 1
        return table
    return frequencies(counts).astype(np.uint32)


def _begins(tables: list[np.ndarray]) -> np.ndarray:
    """The first slot of each symbol in its table, of all tables."""
    parts = [np.cumsum(table, dtype=np.uint32) - table for table in tables]
    return np.concatenate(parts).astype(np.uint32)


def _small(piece: _Piece, coded: small.Streams) -> bytes:
    slots = changed.capacity(piece.count, piece.window.bits.size)
    units = int(coded.coded_bits) // 16
    raw = bitstreams.word_count(int(coded.raw_bits))
    head = pieces.SMALL_HEAD.pack(piece.count, small.coder(slots).lanes, units, raw)
    by_class = np.asarray(coded.by_class).astype("<u4").tobytes()
    body = _units(coded.coded, units)
    return b"".join([head, by_class, body, _words(coded.raw, raw)])


def _fast(piece: _Piece, coded: fast.Streams) -> bytes:
    size = piece.window.high - piece.window.low
    split = fast.low_bits(piece.count, size)
    length_bits = int(coded.length_bits)
    bits = pieces.stream_bits(piece.count, size, split, length_bits)
    words = [_words(one, bitstreams.word_count(n)) for one, n in zip(coded[:-1], bits, strict=True)]
    return b"".join([pieces.FAST_HEAD.pack(piece.count, split, length_bits), *words])


def _whole(window: Window, coded: whole.Streams) -> bytes:
    units = int(coded.coded_bits) // 16
    lanes = whole.coder(window.bits.size).lanes
    body = _units(coded.coded, units)
    rest = np.asarray(coded.rest)[window.low : window.high]
    data = b"".join([pieces.SNAPSHOT_HEAD.pack(lanes, units), body, rest.tobytes()])
    return _shorter(pieces.SNAPSHOT, data, window)


def _words(stream: jax.Array, count: int) -> bytes:
    return np.asarray(stream)[:count].astype("<u4", copy=False).tobytes()


def _units(stream: jax.Array, count: int) -> bytes:
    return _words(stream, -(-count // 2))[: 2 * count]


def _numbered(its: Any, run: Run, layout: Layout) -> Any:
    return zip(its, run.pieces(layout.piece), strict=True)


def _tiles(tiles: Tiles, run: Run) -> list[jax.Array]:
    return [tiles[number] for number in run.tiles]


def _add(sums: list[Sum], run: Run, change: jax.Array) -> None:
    for number, (first, second) in zip(run.tiles, np.asarray(change), strict=True):
        sums[number] += Sum(int(first), int(second))


def _pipelined(work: Iterator[Any], code: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Each piece and what the device has made of it; a few are begun before they are needed."""
    begun: collections.deque[tuple[Any, Any]] = collections.deque()
    for piece in work:
        begun.append((piece, code(piece)))
        if len(begun) > _AHEAD:
            yield begun.popleft()
    yield from begun


def _shorter(kind: int, data: bytes, window: Window) -> bytes:
    """A coded piece, or its bits where those are not longer."""
    raw = (window.high - window.low) * window.bits.dtype.itemsize
    if len(data) < raw:
        return _item(kind, data)
    return _item(pieces.RAW, np.asarray(window.bits)[window.low : window.high].tobytes())


def _item(kind: int, data: bytes = b"") -> bytes:
    return pieces.HEAD.pack(kind, len(data)) + data

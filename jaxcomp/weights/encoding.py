"""Files of pieces, from the device: snapshots and patches of the tiles of one process."""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxcomp.messages.streams import frequencies
from jaxcomp.weights import changed, checksums, fast, small, whole
from jaxcomp.weights.windows import Window, Windows, on
from jaxcomp_weights import alphabets, bitstreams, patterns, pieces
from jaxcomp_weights.checksums import ZERO, Sum
from jaxcomp_weights.drafts import MAGIC
from jaxcomp_weights.layouts import Layout, Run

_AHEAD = 2
"""Pieces that the device codes while one is written."""

Tiles = Sequence[jax.Array]


class _Piece(NamedTuple):
    """A piece that waits to be coded.

    Attributes:
        new: its numbers.
        begin: the first of them in the run.
        old: for a patch, the numbers before.
        found: the bitmap of those that change.
        count: how many change.
    """

    new: Window
    begin: int
    old: Window | None = None
    found: Any = None
    count: int = 0


class _Changes(NamedTuple):
    """A run of a patch: its windows before and after, and what changes in each piece."""

    run: Run
    piece: int
    before: Windows
    after: Windows
    found: list[Any]
    counts: list[int]

    def pieces(self) -> Iterator[_Piece]:
        """The pieces, one after another."""
        both = self.before, self.after
        its = zip(*both, self.run.pieces(self.piece), self.found, self.counts, strict=True)
        for old, new, (begin, _), found, count in its:
            yield _Piece(new, begin, old, found, count)


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
        its, rotated = _tiles(tiles, run), pieces.rotated(run.dtype)
        ends = np.cumsum(run.sizes, dtype=np.int32)
        counts = np.zeros(256, np.int64)
        cut = Windows(its, run, layout.piece)
        for window in cut:
            counts += np.asarray(whole.histogram(*window, rotated=rotated))
        tables = [_table(counts)]
        yield _item(pieces.TABLE, alphabets.write_tables(tables))
        code = functools.partial(_code_whole, _joined(tables), rotated, ends)
        places = run.pieces(layout.piece)
        work = (_Piece(window, begin) for window, (begin, _) in zip(cut, places, strict=True))
        for piece, (coded, change) in _pipelined(work, code):
            _add(sums, run, change)
            yield _whole(piece.new, coded)


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
    before = [on(old, next(iter(new.devices()))) for old, new in pairs]
    current: dict[str, list[np.ndarray]] = {}
    for changes in _changes(before, after, layout, part):
        run, form = changes.run, patterns.FORMATS[changes.run.dtype]
        if coding == "small" and any(changes.counts):
            tables = _patch_tables(changes, form, current.get(run.dtype))
            if tables is not current.get(run.dtype):
                current[run.dtype] = tables
                yield _item(pieces.TABLE, alphabets.write_tables(tables))
        joined = _joined(current[run.dtype]) if run.dtype in current else None
        code = functools.partial(
            _code_changes, coding, joined, form, np.cumsum(run.sizes, dtype=np.int32)
        )
        for piece, done in _pipelined(changes.pieces(), code):
            if done is None:
                yield _item(pieces.UNCHANGED)
                continue
            coded, change = done
            _add(sums, run, change)
            if coding == "fast":
                yield _shorter(pieces.FAST, _fast(piece, coded), piece.new)
            else:
                yield _shorter(pieces.SMALL, _small(piece, coded), piece.new)


def _changes(before: Tiles, after: Tiles, layout: Layout, part: int) -> list[_Changes]:
    """The changes of each run; their numbers come to the host at once."""
    runs, piece = layout.runs(part), layout.piece
    both = [
        (Windows(_tiles(before, run), run, piece), Windows(_tiles(after, run), run, piece))
        for run in runs
    ]
    found = [
        [changed.find(old.bits, *new) for old, new in zip(*pair, strict=True)] for pair in both
    ]
    counts = jax.device_get([[count for _, count in its] for its in found])
    return [
        _Changes(run, piece, *pair, [bitmap for bitmap, _ in its], [int(n) for n in numbers])
        for run, pair, its, numbers in zip(runs, both, found, counts, strict=True)
    ]


def _code_whole(
    joined: tuple[np.ndarray, np.ndarray], rotated: bool, ends: np.ndarray, piece: _Piece
) -> Any:
    """The streams of a piece of a snapshot, and the checksums of its tiles."""
    change = checksums.of_window(*piece.new, piece.begin, ends)
    return whole.encode(*piece.new, *joined, rotated=rotated), change


def _code_changes(
    coding: str, joined: Any, form: patterns.Format, ends: np.ndarray, piece: _Piece
) -> Any:
    """The streams of a piece of a patch, and the change of checksums; None without changes."""
    if not piece.count:
        return None
    assert piece.old is not None
    if coding == "fast":
        size = piece.new.high - piece.new.low
        return fast.encode(
            piece.found,
            piece.old.bits,
            piece.new.bits,
            np.int32(piece.count),
            piece.new.low,
            piece.begin,
            ends,
            np.uint32(fast.low_bits(piece.count, size)),
            slots=changed.capacity(piece.count, piece.new.bits.size),
            form=form,
        )
    given = _given(piece)
    old, new, where, count, low = given
    change = checksums.of_changes(old, new, where, count, low, piece.begin, ends)
    symbols = small.symbols(*given, piece.new.high, form=form)
    return small.encode(symbols, count, *joined), change


def _given(piece: _Piece) -> tuple[Any, ...]:
    """Old and new numbers, where they differ, how often, and the first position."""
    assert piece.old is not None
    where = changed.places(piece.found, changed.capacity(piece.count, piece.new.bits.size))
    return piece.old.bits, piece.new.bits, where, np.int32(piece.count), piece.new.low


def _patch_tables(
    changes: _Changes, form: patterns.Format, current: list[np.ndarray] | None
) -> list[np.ndarray]:
    """Tables for a run: its own, or the current ones if that is shorter."""
    counts = np.zeros(small.ENTRIES, np.int64)

    def occurrences(piece: _Piece) -> Any:
        if not piece.count:
            return 0
        given = _given(piece)
        return small.histogram(small.symbols(*given, piece.new.high, form=form), given[3])

    for _, found in _pipelined(changes.pieces(), occurrences):
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


def _joined(tables: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The frequencies of all tables, and the first slot of each symbol in its table."""
    begins = [np.cumsum(table, dtype=np.uint32) - table for table in tables]
    return np.concatenate(tables), np.concatenate(begins).astype(np.uint32)


def _small(piece: _Piece, coded: small.Streams) -> bytes:
    slots = changed.capacity(piece.count, piece.new.bits.size)
    units = int(coded.coded_bits) // 16
    raw = bitstreams.word_count(int(coded.raw_bits))
    head = pieces.SMALL_HEAD.pack(piece.count, small.coder(slots).lanes, units, raw)
    by_class = np.asarray(coded.by_class).astype("<u4").tobytes()
    body = _units(coded.coded, units)
    return b"".join([head, by_class, body, _words(coded.raw, raw)])


def _fast(piece: _Piece, coded: fast.Streams) -> bytes:
    size = piece.new.high - piece.new.low
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
    """The first words of a stream; from an accelerator come at most twice as many."""
    least = 1 << max(count - 1, 0).bit_length()
    if least < stream.size and next(iter(stream.devices())).platform != "cpu":
        stream = _first(stream, least)
    return np.asarray(stream)[:count].astype("<u4", copy=False).tobytes()


@functools.partial(jax.jit, static_argnums=1)
def _first(stream: jax.Array, count: int) -> jax.Array:
    return stream[:count]


def _units(stream: jax.Array, count: int) -> bytes:
    return _words(stream, -(-count // 2))[: 2 * count]


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

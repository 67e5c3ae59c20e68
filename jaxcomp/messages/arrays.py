"""One array ↔ bytes: unchanged, by byte planes, by codes, with trimmed rows, or by Zstandard.

The encoder uses the method of the shortest result, which is never longer than the array. A large
array is written by Zstandard where this is at most 2 % longer, by a sample of its rows.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxcomp import bits as bits_
from jaxcomp.bits.planes import Bits, lanes
from jaxcomp.messages import streams, zstd
from jaxcomp.messages.reading import MessageError, Reader
from jaxcomp.quantize.levels import TRIT
from jaxcomp.types import ArrayLike

RAW, PLANES, TRIMMED, CODES, ZSTD = range(5)
_LONGER = 1.02
"""Largest accepted ratio of Zstandard's bytes to ours: it is several times faster."""
_LARGE = 2**16
"""Smallest array in bytes for which Zstandard is tried, and the size of its sample. Messages of
smaller arrays do not depend on the version of Zstandard."""
_WIDEST = 16
_TRIT = 0
"""The mark for the width of trits in a message."""


class Split(NamedTuple):
    """An array as streams of symbols.

    Attributes:
        head: the bytes before the streams.
        streams: the symbols of each stream, and its best method.
        size: the approximate number of bytes of all parts.
    """

    head: bytes
    streams: tuple[tuple[np.ndarray, streams.Measure], ...]
    size: float


def encode(array: np.ndarray, widths: Iterable[Bits] = ()) -> tuple[int, bytes]:
    """The method for an array, and its bytes, no more than the array's own.

    Args:
        array: an array of one of the dtypes in `frame.DTYPES`.
        widths: the widths of the codes that it may hold, if it is an array of words.
    """
    items, widths = _items(array), tuple(widths)
    sample = _sample(array)
    if sample is not array and _is_nearly_as_short(sample, _offers(sample, widths)):
        return _frame(items)
    method, best, trimmed = offers = _offers(array, widths)
    if sample is array and array.nbytes >= _LARGE and _is_nearly_as_short(array, offers):
        return _frame(items)
    if trimmed is not None and len(trimmed) < min(best.size, array.nbytes):
        return TRIMMED, trimmed
    if best.size < array.nbytes:
        body = best.head + b"".join(streams.encode(*stream) for stream in best.streams)
        if len(body) < array.nbytes:
            return method, body
    return RAW, items.tobytes()


def decode(
    method: int, body: memoryview, like: ArrayLike, widths: Iterable[Bits] = ()
) -> np.ndarray:
    """The array of this shape and dtype that `encode` wrote, given the same widths of codes.

    Raises:
        MessageError: if `encode` cannot have written it.
    """
    reader = Reader(body)
    size, dtype = math.prod(like.shape), np.dtype(like.dtype)
    if method == RAW:
        data = reader.take(size * dtype.itemsize, "an array")
        items = np.frombuffer(data, f"<u{dtype.itemsize}")
    elif method == PLANES:
        in_bytes = np.empty((size, dtype.itemsize), np.uint8)
        for number in range(dtype.itemsize):
            in_bytes[:, number] = streams.decode(reader, size)
        items = in_bytes.reshape(-1).view(f"<u{dtype.itemsize}")
    elif method == TRIMMED:
        items = _read_trimmed(reader, like.shape, dtype.itemsize)
    elif method == CODES:
        items = _from_codes(reader, like.shape, dtype, widths)
    elif method == ZSTD:
        frame = reader.take(reader.left, "a frame")
        items = np.frombuffer(zstd.decode(frame, size * dtype.itemsize), f"<u{dtype.itemsize}")
    else:
        raise MessageError(f"`data` must write arrays by a method from 0 to 4, got {method}")
    reader.end("an array")
    if dtype == np.bool_ and size and items.max() > 1:
        raise MessageError(f"`data` must hold 0 or 1 for a boolean, got {items.max()}")
    # A copy, which does not keep the message alive, and is aligned.
    return np.array(items, f"=u{dtype.itemsize}").view(dtype).reshape(like.shape)


def _frame(items: np.ndarray) -> tuple[int, bytes]:
    frame = zstd.encode(items)
    return (ZSTD, frame) if len(frame) < items.nbytes else (RAW, items.tobytes())


def _sample(array: np.ndarray) -> np.ndarray:
    """Some rows of a large array; the array itself if it is small, or has a few long rows."""
    if array.nbytes <= _LARGE:
        return array
    rows = array if array.ndim > 1 else array[: array.size // 1024 * 1024].reshape(-1, 1024)
    sample = rows[:: -(-array.nbytes // _LARGE)]
    return np.ascontiguousarray(sample) if sample.nbytes <= 2 * _LARGE else array


def _offers(array: np.ndarray, widths: tuple[Bits, ...]) -> tuple[int, Split, bytes | None]:
    """The better of planes and codes, with its method; and the trimmed rows, if there are rows."""
    items = _items(array)
    # All lowest bytes, then all second lowest ones, and so on.
    in_bytes = items.view(np.uint8).reshape(-1, items.dtype.itemsize)
    offers = [(PLANES, _split(b"", [np.ascontiguousarray(plane) for plane in in_bytes.T]))]
    if array.ndim == 2 and array.dtype == np.uint32:
        offers += [(CODES, split) for split in (_in_codes(array, w) for w in widths) if split]
    method, best = min(offers, key=lambda offer: offer[1].size)
    return method, best, _trim(items, array.shape)


def _is_nearly_as_short(array: np.ndarray, offers: tuple[int, Split, bytes | None]) -> bool:
    """Whether Zstandard's frame is nearly as short as what our methods offer."""
    _, best, trimmed = offers
    ours = min(best.size, array.nbytes, array.nbytes if trimmed is None else len(trimmed))
    return bool(min(len(zstd.encode(_items(array))), array.nbytes) <= _LONGER * ours)


def _items(array: np.ndarray) -> np.ndarray:
    """The bits of each element as a number, the lowest byte first."""
    unsigned = np.ascontiguousarray(array).reshape(-1).view(f"=u{array.dtype.itemsize}")
    return unsigned.astype(f"<u{array.dtype.itemsize}", copy=False)


def _split(head: bytes, parts: Iterable[np.ndarray]) -> Split:
    measured = tuple((part, streams.measure(part)) for part in parts)
    return Split(head, measured, len(head) + sum(measure.size for _, measure in measured))


def _in_codes(words: np.ndarray, bits: Bits) -> Split | None:
    """The low bytes of all codes, then their high bytes; None if the words are not of codes."""
    if not words.size or not (bits == TRIT or (isinstance(bits, int) and bits <= _WIDEST)):
        return None
    size = _most_codes(words.shape[1], bits)
    if not size:
        return None
    codes = _unpack(words, bits, size)
    if not np.array_equal(_pack(codes, bits, words.shape[1]), words):
        return None  # Bits that belong to no code, as between codes and the end of a word.
    head = bytes([_TRIT if bits == TRIT else int(bits)])
    parts = [codes & 255, codes >> 8] if codes.dtype == np.uint16 else [codes]
    return _split(head, [part.reshape(-1).astype(np.uint8, copy=False) for part in parts])


def _from_codes(
    reader: Reader, shape: tuple[int, ...], dtype: np.dtype, widths: Iterable[Bits]
) -> np.ndarray:
    width = reader.take(1, "the width of codes")[0]
    bits = TRIT if width == _TRIT else width
    # With another width there could be many more codes.
    size = _most_codes(shape[1], bits) if len(shape) == 2 and bits in tuple(widths) else 0
    if dtype != np.uint32 or not size:
        raise MessageError(
            f"`data` must write only packed words as codes, got codes of {bits} bits in "
            f"{dtype.name}{list(shape)}"
        )
    number = shape[0] * size
    codes = streams.decode(reader, number)
    if width > 8:
        codes = codes | streams.decode(reader, number).astype(np.uint16) << 8
    limit = 3 if width == _TRIT else 2**width
    if number and codes.max() >= limit:
        raise MessageError(f"`data` must hold codes below {limit}, got {codes.max()}")
    return _pack(codes.reshape(shape[0], size), bits, shape[1]).reshape(-1)


def _most_codes(words: int, bits: Bits) -> int:
    """The most codes that take exactly so many words, or none."""
    size = int(words * 32 / bits)
    size = 20 * words if bits == TRIT else size
    while size and bits_.words(size, bits) > words:
        size -= 1
    return size if bits_.words(size, bits) == words else 0


def _unpack(words: np.ndarray, bits: Bits, size: int) -> np.ndarray:
    """`bits.unpack` on the host, where no shape of an array is compiled for."""
    codes = np.zeros((words.shape[0], size), np.uint8 if bits <= 8 else np.uint16)
    start = 0
    for plane in bits_.planes(bits):
        width = lanes(size, plane)
        for field in range(-(-size // width)):
            part = codes[:, field * width : (field + 1) * width]
            taken = plane.take(words[:, start : start + part.shape[1]], field)
            np.bitwise_or(part, taken.astype(codes.dtype), out=part)
        start += width
    return codes


def _pack(codes: np.ndarray, bits: Bits, columns: int) -> np.ndarray:
    """`bits.pack` on the host."""
    n, size = codes.shape
    words = np.zeros((n, columns), np.uint32)
    start = 0
    for plane in bits_.planes(bits):
        width = lanes(size, plane)
        for field in range(-(-size // width)):
            part = codes[:, field * width : (field + 1) * width].astype(np.uint32)
            words[:, start : start + part.shape[1]] += plane.put(part, field)
        start += width
    return words


def _trim(items: np.ndarray, shape: tuple[int, ...]) -> bytes | None:
    """The lengths of all rows, then the rows, without the zeros that they end in."""
    if len(shape) < 2 or not items.size:
        return None
    rows = items.reshape(shape[0], -1)
    width = rows.shape[1]
    lengths = width - np.argmax(rows[:, ::-1] != 0, axis=1)
    lengths = np.where(rows.any(axis=1), lengths, 0)
    kept = rows[np.arange(width) < lengths[:, None]]
    return lengths.astype(_length_dtype(width)).tobytes() + kept.tobytes()


def _read_trimmed(reader: Reader, shape: tuple[int, ...], width: int) -> np.ndarray:
    size = math.prod(shape)
    if len(shape) < 2 or not size:
        raise MessageError(f"`data` must trim only arrays that have rows, got shape {list(shape)}")
    columns = size // shape[0]
    dtype = _length_dtype(columns)
    lengths = np.frombuffer(reader.take(shape[0] * dtype.itemsize, "lengths of rows"), dtype)
    if lengths.max() > columns:
        raise MessageError(
            f"`data` must keep at most the {columns} elements of a row, got {lengths.max()}"
        )
    kept = np.frombuffer(
        reader.take(int(lengths.sum(dtype=np.int64)) * width, "trimmed rows"), f"<u{width}"
    )
    rows = np.zeros((shape[0], columns), f"<u{width}")
    rows[np.arange(columns) < lengths[:, None].astype(np.int64)] = kept
    return rows.reshape(-1)


def _length_dtype(columns: int) -> np.dtype:
    """The narrowest dtype that holds a row's length."""
    return np.dtype("<u1" if columns < 2**8 else "<u2" if columns < 2**16 else "<u4")

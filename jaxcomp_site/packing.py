"""Flower's records as bytes, for a file or for another process of this machine."""

import itertools
import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")


def packed(records: Any) -> bytes:
    """A `RecordDict` as bytes."""
    return b"".join(pieces(records))


def pieces(records: Any) -> Iterator[bytes]:
    """The bytes of a `RecordDict`, in parts: an array may have `pieces` of its own."""
    described, arrays, end = {}, [], 0
    for name, record in records.items():
        items = {}
        for key, value in record.items():
            if hasattr(value, "stype"):  # One of Flower's arrays.
                whole = not hasattr(value, "pieces")
                begin, end = end, end + (len(value.data) if whole else value.length)
                items[key] = [value.dtype, list(value.shape), value.stype, begin, end]
                arrays.append([value.data] if whole else value.pieces())
            else:
                items[key] = _as_json(value)
        described[name] = [type(record).__name__, items]
    text = json.dumps([described, end]).encode()
    return itertools.chain([_LENGTH.pack(len(text)), text], *arrays)


def unpacked(data: bytes, *, views: bool = False) -> Any:
    """The `RecordDict` that `packed` has made bytes of.

    Args:
        data: the bytes.
        views: whether arrays are views of `data` and no copies, where nobody asks for `bytes`.

    Raises:
        ValueError: if these are no such bytes.
    """
    from flwr.app import RecordDict  # Flower is an extra.

    found = RecordDict()
    try:
        begin = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        described, end = json.loads(data[_LENGTH.size : begin])
        content = memoryview(data)[begin:]
        if len(content) != end:
            raise ValueError(f"arrays of {end} bytes, got {len(content)}")
        for name, (kind, items) in described.items():
            found[name] = _record(kind, items, content, views)
    except Exception as error:  # Of JSON, or of Flower's records.
        raise ValueError(f"no records of Flower: {type(error).__name__}: {error}") from error
    return found


def _record(kind: str, items: dict[str, Any], content: memoryview, views: bool) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

    if kind == "ArrayRecord":
        record = ArrayRecord()
        for key, (dtype, shape, stype, begin, end) in items.items():
            array = record[key] = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=b"")
            data: Any = content[begin:end]  # Flower makes pieces of views, too.
            array.data = data if views else bytes(data)
        return record
    kinds = {"ConfigRecord": ConfigRecord, "MetricRecord": MetricRecord}
    return kinds[kind]({key: _from_json(value) for key, value in items.items()})


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [_as_json(one) for one in value] if isinstance(value, list) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [_from_json(one) for one in value] if isinstance(value, list) else value

"""Flower's records as bytes, for a file or for another process of this machine."""

import io
import json
from typing import Any

import numpy as np

_DESCRIBED = "described"


def packed(records: Any) -> bytes:
    """A `RecordDict` as bytes."""
    described, arrays = {}, {}
    for name, record in records.items():
        items = {}
        for key, value in record.items():
            if hasattr(value, "stype"):  # One of Flower's arrays.
                items[key] = [value.dtype, list(value.shape), value.stype, str(len(arrays))]
                arrays[str(len(arrays))] = np.frombuffer(value.data, np.uint8)
            else:
                items[key] = {"hex": value.hex()} if isinstance(value, bytes) else value
        described[name] = [type(record).__name__, items]
    text = np.frombuffer(json.dumps(described).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **{_DESCRIBED: text}, **arrays)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """The `RecordDict` that `packed` has made bytes of.

    Raises:
        ValueError: if these are no such bytes.
    """
    from flwr.app import RecordDict  # Flower is an extra.

    found = RecordDict()
    try:
        with np.load(io.BytesIO(data)) as arrays:
            described = json.loads(arrays[_DESCRIBED].tobytes())
            for name, (kind, items) in described.items():
                found[name] = _record(kind, items, arrays)
    except (KeyError, TypeError, OSError) as error:
        raise ValueError(str(error)) from error
    return found


def _record(kind: str, items: dict[str, Any], arrays: Any) -> Any:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

    if kind == "ArrayRecord":
        return ArrayRecord(
            {
                key: Array(
                    dtype=dtype, shape=tuple(shape), stype=stype, data=arrays[number].tobytes()
                )
                for key, (dtype, shape, stype, number) in items.items()
            }
        )
    values: dict[str, Any] = {
        key: bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
        for key, value in items.items()
    }
    return ConfigRecord(values) if kind == "ConfigRecord" else MetricRecord(values)

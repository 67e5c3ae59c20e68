"""Flower's records in a file, which outlives Flower's runs and the processes of a node."""

import io
import json
import os
import pathlib
from typing import Any

import numpy as np

from jaxcomp.adapters.flower import extra

_DESCRIBED = "described"


def write(path: pathlib.Path, state: Any) -> None:
    """Writes a `RecordDict`, whole or not at all."""
    described, arrays = {}, {}
    for name, record in state.items():
        items = {}
        for key, value in record.items():
            if isinstance(value, extra.Array):
                items[key] = [value.dtype, list(value.shape), value.stype, str(len(arrays))]
                arrays[str(len(arrays))] = np.frombuffer(value.data, np.uint8)
            else:
                items[key] = {"hex": value.hex()} if isinstance(value, bytes) else value
        described[name] = [type(record).__name__, items]
    text = np.frombuffer(json.dumps(described).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        np.savez(file, **{_DESCRIBED: text}, **arrays)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def read(path: pathlib.Path) -> Any:
    """The `RecordDict` that `write` has written; an empty one without a file.

    Raises:
        ValueError: if the file holds something else.
    """
    state = extra.RecordDict()
    if not path.exists():
        return state
    try:
        with np.load(io.BytesIO(path.read_bytes())) as found:
            described = json.loads(found[_DESCRIBED].tobytes())
            for name, (kind, items) in described.items():
                state[name] = _record(kind, items, found)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"`memory` must give a file that a client has written, got {path}: {error}"
        ) from error
    return state


def _record(kind: str, items: dict[str, Any], arrays: Any) -> Any:
    if kind == "ArrayRecord":
        return extra.ArrayRecord(
            {
                key: extra.Array(
                    dtype=dtype, shape=tuple(shape), stype=stype, data=arrays[number].tobytes()
                )
                for key, (dtype, shape, stype, number) in items.items()
            }
        )
    values = {
        key: bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
        for key, value in items.items()
    }
    return extra.ConfigRecord(values) if kind == "ConfigRecord" else extra.MetricRecord(values)

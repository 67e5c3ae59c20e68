"""The columns that tables of leaves share, and short names of codecs."""

import dataclasses
from typing import Any

from jaxcomp.tables import Column


def shape(leaf: Any) -> str:
    """The shape of a leaf, as in 64x64."""
    return "x".join(map(str, leaf.shape)) or "scalar"


PATH = Column("leaf", lambda line: line.path or "(the array)")
SHAPE = Column("shape", shape)


def short(setting: Any) -> str:
    """A codec, or a part of one, on one line, without settings at their defaults."""
    if not dataclasses.is_dataclass(setting):
        return "dense" if setting is None else repr(setting)
    settings = []
    for field in dataclasses.fields(setting):
        value = getattr(setting, field.name)
        if dataclasses.is_dataclass(value) and value != field.default:
            settings.append(short(value))
        elif isinstance(value, tuple) and value and all(map(dataclasses.is_dataclass, value)):
            settings.append(", ".join(map(short, value)))
        elif value != field.default or field.name == "bucket_size":
            settings.append(f"{field.name}={value!r}")
    inside = ", ".join(settings)
    return f"{type(setting).__name__}({inside})" if inside else type(setting).__name__

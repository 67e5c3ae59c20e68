"""Fingerprints of codecs and plans, the same in every process."""

import dataclasses
import hashlib
import numbers
from typing import Any

from jaxcomp.layout.trees import Layout
from jaxcomp.quantize.levels import TRIT

DIGEST = 16
"""Bytes of a digest."""

VERSION = 2
"""The format version. A new one is needed where a class or field is renamed."""


def digest(codec: Any, layout: Layout) -> bytes:
    """The digest of the codec or policy, of every leaf, and of the batches."""
    lines = [text(codec)]
    lines += [
        f"{path} {like.dtype.name}{list(like.shape)}"
        for path, like in zip(layout.paths, layout.likes, strict=True)
    ]
    for batch in layout.batches:
        pieces = [tuple(piece) for piece in batch.pieces]
        lines.append(f"{text(batch.codec)} {batch.dtype.name} {batch.size} {pieces}")
    lines.append(str(list(layout.dense)))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST).digest()


def text(setting: Any) -> str:
    """The text of a setting: its name and fields, without fields that are None or name a platform.

    A field that later versions add does not change the text while it is None, and a server on a GPU
    reads messages of clients on CPUs.

    Raises:
        ValueError: if the repr of a part contains its address in memory.

    Example:
        >>> import jaxcomp
        >>> text(jaxcomp.codecs.Contractive(codec=jaxcomp.natural()))
        'Contractive(codec=Natural(bits=9, unbiased=True, bucket_size=512))'
    """
    if isinstance(setting, type) or not dataclasses.is_dataclass(setting):
        if isinstance(setting, tuple):
            return f"({', '.join(text(part) for part in setting)})"
        if isinstance(setting, numbers.Real) and not isinstance(setting, bool):
            number = float(setting)  # Equal numbers may be written differently.
            return repr(int(number) if number.is_integer() else number)
        written = repr(setting)
        if " at 0x" in written:
            raise ValueError(
                "`codec` must be of parts whose repr is the same in every process, as that of a "
                f"frozen dataclass is, got {written}"
            )
        return written
    values = [(field.name, getattr(setting, field.name)) for field in dataclasses.fields(setting)]
    inside = [
        f"{name}={text(value)}"
        for name, value in values
        if value is not None and name != "implementation"
    ]
    return f"{type(setting).__name__}({', '.join(inside)})"


def widths(setting: Any) -> tuple[int | float, ...]:
    """The widths of the codes that the parts of a codec pack, from 1 to 16 bits or those of trits.

    Example:
        >>> import jaxcomp
        >>> widths(jaxcomp.codecs.Chained(codecs=(jaxcomp.sign(), jaxcomp.qsgd(bits=4))))
        (1, 4)
    """
    found = set()
    if isinstance(setting, tuple):
        found.update(*map(widths, setting))
    elif dataclasses.is_dataclass(setting) and not isinstance(setting, type):
        bits = getattr(setting, "bits", None)
        if bits == TRIT or (type(bits) is int and 1 <= bits <= 16):
            found.add(bits)
        found.update(*(widths(getattr(setting, f.name)) for f in dataclasses.fields(setting)))
    return tuple(sorted(found))

"""Fingerprints of codecs and plans, the same in every process."""

import dataclasses
import hashlib
import numbers
from typing import Any

from jaxcomp.layout.batches import Batch
from jaxcomp.layout.trees import Layout
from jaxcomp.quantize.levels import TRIT

DIGEST = 16
"""Bytes of a digest."""

VERSION = 2
"""The format version that is written. A new version is needed where a class or field is renamed."""

READABLE = (1, 2)
"""The versions that are read."""

RENAMED = {1: {"RiceGaps": "Rice"}}
"""For each former version, the names that it used where today's differ: by `Class`, or by
`Class.field` for a field. A class that is renamed now gets a line for every former version.
"""


def digests(codec: Any, plan: Layout) -> dict[int, bytes]:
    """The digest in each version in which such a tree is read.

    Version 1 encoded leaves of several sizes apart where a codec takes a leaf whole, and a leaf
    shorter than a bucket in one of its own size. Since version 2 the former share a bucket, and the
    latter are cut into units, where the codec has them.
    """
    changed = any(batch.segments is not None or _in_units(batch, plan) for batch in plan.batches)
    return {v: digest(codec, plan, v) for v in READABLE if v > 1 or not changed}


def _in_units(batch: Batch, plan: Layout) -> bool:
    """Whether a leaf is in buckets that are neither full-sized nor of its own size."""
    if batch.codec.hints.unit is None or batch.size == batch.codec.bucket_size:
        return False
    return any(plan.likes[piece.leaf].size != batch.size for piece in batch.pieces)


def digest(codec: Any, plan: Layout, version: int = VERSION) -> bytes:
    """The digest of the codec or policy, of every leaf, and of the batches."""
    lines = [text(codec, version)]
    lines += [
        f"{path} {like.dtype.name}{list(like.shape)}"
        for path, like in zip(plan.paths, plan.likes, strict=True)
    ]
    for batch in plan.batches:
        pieces = [tuple(piece) for piece in batch.pieces]
        lines.append(f"{text(batch.codec, version)} {batch.dtype.name} {batch.size} {pieces}")
    lines.append(str(list(plan.dense)))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=DIGEST).digest()


def text(setting: Any, version: int = VERSION) -> str:
    """The text of a setting: its name and fields, without fields that are None or name a platform.

    For a former version, the text has the names of that version. A field that later versions add
    does not change the text while it is None, and a server on a GPU reads messages of clients on
    CPUs.

    Raises:
        ValueError: if the repr of a part contains its address in memory.

    Example:
        >>> import jaxcomp
        >>> text(jaxcomp.codecs.Contractive(codec=jaxcomp.natural()))
        'Contractive(codec=Natural(bits=9, unbiased=True, bucket_size=512))'
        >>> from jaxcomp.sparsify.indices import RiceGaps
        >>> text(RiceGaps()), text(RiceGaps(), version=1)
        ('RiceGaps()', 'Rice()')
    """
    if isinstance(setting, type) or not dataclasses.is_dataclass(setting):
        if isinstance(setting, tuple):
            return f"({', '.join(text(part, version) for part in setting)})"
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
    former = RENAMED.get(version, {}) if type(setting).__module__.startswith("jaxcomp.") else {}
    kind = type(setting).__name__
    inside = [
        f"{former.get(f'{kind}.{name}', name)}={text(value, version)}"
        for name, value in values
        if value is not None and name != "implementation"
    ]
    return f"{former.get(kind, kind)}({', '.join(inside)})"


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

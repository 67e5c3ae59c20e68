"""Grouping: which leaves are encoded together.

All leaves that share a codec, a dtype and a bucket size are one batch. A leaf that dominates its
batch is a batch of its own up to its last whole bucket: it is encoded in place instead of being
copied into a batch. Short leaves that a codec takes whole are segments of one bucket, if the codec
has a form for that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxcomp.base import Codec
from jaxcomp.layout.batches import Batch, Piece
from jaxcomp.numerics import segments as segments_

Groups = Mapping[tuple[Codec, np.dtype, int], list[Piece]]
"""The leaves of each codec, dtype and bucket size."""

_DIRECT_SIZE = 2**18
_DOMINANT = 1 / 2
"""The share of all elements from which on a long leaf is not joined with others in any case."""

_JOINED = 2**22
"""Elements of a bucket of leaves: few enough for memory that an allocator keeps from step to step.
"""

_ALL = 2**30
"""The same where each further bucket takes long to compile: places in it have 32 bits."""


_LONGEST = 2**31 - 1
"""Elements of a bucket at most, whose places have 32 bits."""


def bucket_of(codec: Codec, size: int, slices: int) -> int:
    """Elements of the buckets of a leaf with `size` elements.

    Without a bucket size there is one for each share, or several of a very long leaf.
    With a `unit`, leaves of all sizes have buckets of few sizes: of `bucket_size`, of a unit, and
    of powers of two below it.
    """
    if codec.bucket_size is None:
        return -(
            -size // (slices if codec.facts.shaped else slices * -(-size // (slices * _LONGEST)))
        )
    whole = codec.bucket_size
    if size >= whole or codec.hints.unit is None:
        return min(whole, size)
    return min(codec.hints.unit, 1 << (size - 1).bit_length())


def row_bucket(codec: Codec, row: int) -> int:
    """Elements of the buckets into which a row is cut: at most `bucket_size`, and about equal.

    Example:
        >>> import jaxcomp
        >>> [row_bucket(jaxcomp.qsgd_inf(bits=4, bucket_size=512), n) for n in (64, 768, 1031)]
        [64, 384, 344]
    """
    return -(-row // -(-row // (codec.bucket_size or row)))


def batches(groups: Groups, slices: int, runs: int, *, whole: bool = True) -> list[Batch]:
    """The batches of all groups; only leaves that are cut into buckets are in several runs.

    Args:
        groups: the leaves.
        slices: the number of slices of a leaf that a codec takes whole.
        runs: the number of runs of leaves that share no batch.
        whole: whether a codec without a bucket size takes leaves whole, and not in rows.
    """
    found: list[Batch] = []
    leaves: dict[Any, dict[int, list[Piece]]] = {}
    for (codec, dtype, size), pieces in groups.items():
        if codec.bucket_size is None and whole:
            leaves.setdefault((codec, dtype), {})[size] = pieces
            continue
        for run in even_runs(pieces, [piece.stop for piece in pieces], runs):
            found += _of_buckets(codec, dtype, size, run)
    for (codec, dtype), sizes in leaves.items():
        found += _of_leaves(codec, dtype, sizes, slices)
    return found


def _of_buckets(codec: Codec, dtype: np.dtype, size: int, pieces: Sequence[Piece]) -> list[Batch]:
    """The batches of buckets of one size."""
    direct, rest = _split(pieces, size, codec.hints.alone)
    tails = {piece.leaf for piece in rest}
    found = [Batch(codec, dtype, size, (p,), parted=p.leaf in tails) for p in direct]
    return [*found, Batch(codec, dtype, size, tuple(rest))] if rest else found


def _of_leaves(
    codec: Codec, dtype: np.dtype, sizes: Mapping[int, list[Piece]], slices: int
) -> list[Batch]:
    """The batches of leaves that a codec takes whole, by their sizes, or those of their slices.

    Leaves up to a length that the codec states share buckets, if it has a form for that; leaves of
    one size form a batch otherwise. A longer leaf would be copied to the bucket through memory,
    which takes as long as encoding it.
    """
    every = sorted(piece for pieces in sizes.values() for piece in pieces)
    total = sum(piece.stop for piece in every)
    most = min(codec.hints.joined_leaf, max(_DIRECT_SIZE, _DOMINANT * total))
    short = [piece for piece in every if piece.stop <= most]
    bucket = _JOINED if codec.hints.joined_leaf <= _JOINED else _ALL
    count = -(-sum(piece.stop for piece in short) // bucket)
    runs = even_runs(short, [piece.stop for piece in short], count)
    found, joined = [], set()
    for run in runs:
        lengths = [-(-piece.stop // slices) for piece in run]
        together = codec.segmented(segments_.of(lengths)) if len(set(lengths)) > 1 else None
        if together is None or together.segments is None:
            continue
        joint = together.segments
        own = Batch(together, dtype, joint.size, tuple(run), False, codec, slices, joint)
        found.append(own)
        joined.update(piece.leaf for piece in run)
    for size, pieces in sizes.items():
        left = [piece for piece in pieces if piece.leaf not in joined]
        found += _of_buckets(codec, dtype, size, left) if left else []
    return found


def even_runs(items: Sequence[Any], sizes: Sequence[int], count: int) -> list[list[Any]]:
    """The items in order, as at most `count` runs of about equal total size."""
    total, done = sum(sizes), 0
    runs: dict[int, list[Any]] = {}
    for item, size in zip(items, sizes, strict=True):
        runs.setdefault(int(count * (done + size / 2) / max(total, 1)), []).append(item)
        done += size
    return list(runs.values())


def _split(pieces: Sequence[Piece], size: int, alone: float) -> tuple[list[Piece], list[Piece]]:
    """Pieces that are batches of their own, and the rest with the tails of those."""
    total = sum(piece.stop for piece in pieces)
    direct, rest = [], []
    for piece in pieces:
        dominates = piece.stop >= max(_DIRECT_SIZE, alone * total)
        whole = piece.stop // size * size if dominates else 0
        if whole:
            direct.append(Piece(piece.leaf, 0, whole))
        if whole < piece.stop:
            rest.append(Piece(piece.leaf, whole, piece.stop))
    return direct, rest

"""Statistics of a step by groups of leaves, and the values that codecs clip."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcomp.base import Reducer
from jaxcomp.exchange.plan import Plan
from jaxcomp.feedback import Link
from jaxcomp.layout.batches import Batch, batch_keys, padded_buckets
from jaxcomp.numerics import norms
from jaxcomp.types import Array, PyTree, Stacks

RULES = "rules"
Grouping = bool | str | Callable[[str], str]


class GroupStats(NamedTuple):
    """Statistics of the last step over the leaves of a group; the same on every worker.

    Attributes:
        relative_error: as in `Stats`.
        residual_ratio: as in `Stats`.
        residual_norm: as in `Stats`.
        gradient_norm: as in `Stats`.
        saturation: as in `Stats`.
        payload_bytes: the bytes of these leaves in one worker's payload.
    """

    relative_error: Array
    residual_ratio: Array
    residual_norm: Array
    gradient_norm: Array
    saturation: Array
    payload_bytes: Array


def check(stats: Any, source: Link | Reducer) -> None:
    """Raises a `ValueError` for what is no grouping, and for reducers that send parts of leaves."""
    if not (isinstance(stats, bool) or stats == RULES or callable(stats)):
        raise ValueError(
            "`stats` must be True, False, 'rules' for a group for each rule of the policy, or a "
            "function from the path of a leaf to the name of its group, such as "
            f"lambda path: path.split('/')[0], got {stats!r}"
        )
    tiers = isinstance(source, Reducer) and source.facts.tiers is not None
    if not isinstance(stats, bool) and tiers:
        raise ValueError(
            "`stats` must be True or False for a reducer over several axes, whose links see slices "
            f"of many leaves, got {stats!r}; give each group a mean by optax.partition instead"
        )


def grouped(stats: Grouping) -> bool:
    """Whether the statistics are by groups too."""
    return not isinstance(stats, bool)


def names(stats: Grouping, plan: Plan) -> tuple[str, ...]:
    """The group of every leaf.

    Raises:
        ValueError: if the function returns no name.
    """
    layout, uplink = plan.layout, plan.given.uplink
    if callable(stats):
        found = tuple(stats(path) for path in layout.paths)
        wrong = [name for name in found if not isinstance(name, str) or not name]
        if wrong:
            raise ValueError(f"`stats` must return the name of a group, got {wrong[0]!r}")
        return found
    rules = () if uplink is None else uplink.policy.rules
    pairs = zip(layout.paths, layout.likes, layout.codecs, strict=True)
    return tuple(
        next(
            (rule.path for rule in rules if rule.matches(path, like.shape)),
            "dense" if codec is None else "default",
        )
        for path, like, codec in pairs
    )


def pieces(batch: Batch, x: Array) -> Iterator[tuple[int, Array]]:
    """The number of each leaf of a batch, and its rows of `x: [buckets, size]`."""
    segments, row = batch.segments, 0
    if segments is not None:
        for piece, start, size in zip(batch.pieces, segments.starts, segments.sizes, strict=True):
            yield piece.leaf, x[:, start : start + size]
        return
    for piece in batch.pieces:
        rows = padded_buckets(piece, batch.size)
        yield piece.leaf, x[row : row + rows]
        row += rows


def energies(batches: Sequence[Batch], stacks: Stacks, unit: Array) -> dict[int, Array]:
    """`Σ (unit · x)²` of each leaf, float32; none for memory that is not there."""
    found: dict[int, Array] = {}
    for batch, x in zip(batches, stacks, strict=True) if stacks else ():
        for leaf, part in pieces(batch, x):
            energy = norms.energy(part, unit).astype(jnp.float32)
            found[leaf] = found.get(leaf, jnp.zeros((), jnp.float32)) + energy
    return found


def count_clipped(
    batches: Sequence[Any], message: Stacks, key: Array, worker: Array
) -> dict[int, Array]:
    """The clipped elements of each leaf whose codec clips, and all of its elements, as `[2]`.

    Batches that are slices of others, as between the levels of a hierarchy, count as leaf -1.
    """
    found: dict[int, Array] = {}
    keys = batch_keys(key, batches, worker)
    for own, batch, x in zip(keys, batches, message, strict=True):
        whole = isinstance(batch, Batch)
        codec, counts = batch.picked if whole else batch.codec, batch.counts()
        if not codec.facts.clips:
            continue
        if whole and batch.segments is not None:
            pairs = enumerate(pieces(batch, x))
            some = [(leaf, codec.clipped(own, part, counts[:, i])) for i, (leaf, part) in pairs]
        else:
            rows = codec.clipped(own, x, counts)
            some = list(pieces(batch, rows)) if whole else [(-1, rows)]
        for leaf, rows in some:
            total = jnp.sum(rows.astype(jnp.float32), axis=0)
            found[leaf] = found.get(leaf, jnp.zeros(2, jnp.float32)) + total
    return found


def payload(plan: Plan, groups: Sequence[str]) -> dict[str, float]:
    """The payload bytes of each group."""
    found, layout = dict.fromkeys(groups, 0.0), plan.layout
    for batch, size in zip(layout.batches, plan.batch_bytes, strict=True):
        for leaf, part in batch.bytes_of(size):
            found[groups[leaf]] += part
    for leaf, like in zip(layout.dense, plan.dense_likes, strict=True):
        found[groups[leaf]] += like.size * like.dtype.itemsize
    return found


def of_group(leaves: dict[int, Array], groups: Sequence[str], name: str) -> list[Array]:
    """Statistics of the leaves of a group."""
    return [value for leaf, value in leaves.items() if groups[leaf] == name]


def empty(names: Sequence[str]) -> PyTree:
    """The statistics of the groups before the first step."""
    zeros = [jnp.zeros((), jnp.float32) for _ in GroupStats._fields]
    return {name: GroupStats(*zeros) for name in sorted(set(names))}

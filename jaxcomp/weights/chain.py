"""The versions of a publisher: which files a new one gets, and which old ones go."""

import dataclasses
from collections.abc import Sequence

from jaxcomp_weights import documents
from jaxcomp_weights.documents import Entry, Id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """When snapshots and long patches are written, and what is kept.

    Attributes:
        snapshot_every: a snapshot at least every so many versions.
        skips: patches over so many versions, from one multiple to the next.
        keep: how many versions stay readable; None for all.
    """

    snapshot_every: int
    skips: tuple[int, ...]
    keep: int | None


def bases(number: int, held: Sequence[Id], rules: Rules) -> list[Id]:
    """The held versions from which a version gets a patch: the last one, and those of skips."""
    if not held:
        return []
    last = max(held)
    wanted = {number - skip for skip in rules.skips if number % skip == 0}
    return sorted({last, *(one for one in held if one.number in wanted)})


def to_hold(number: int, rules: Rules) -> set[int]:
    """The numbers of the versions that later patches begin at, once this one is written."""
    return {number, *(number - number % skip for skip in rules.skips)}


def needs_snapshot(number: int, entries: Sequence[Entry], fresh: bool, rules: Rules) -> bool:
    """Whether a version gets a snapshot before its patches are known.

    It does if the publisher holds no version before, if the last snapshot is too long ago, or if
    the patches since then have more bytes than it has.
    """
    if fresh:
        return True
    snapshots = [entry for entry in entries if any(base is None for base, _ in entry.ways)]
    if not snapshots:
        return True
    last = snapshots[-1]
    if number - last.id.number >= rules.snapshot_every:
        return True
    size = next(size for base, size in last.ways if base is None)
    since = sum(
        min(size for base, size in entry.ways if base is not None)
        for entry in entries
        if entry.id > last.id and any(base is not None for base, _ in entry.ways)
    )
    return since > size


def kept(entries: Sequence[Entry], rules: Rules) -> list[Entry]:
    """The versions and ways that stay: the last `keep` versions, and what leads to them.

    A version is reached from the newest snapshot before it, so all versions from that of the
    oldest kept one on stay. Ways from versions that go are of no use to anybody.
    """
    if rules.keep is None or len(entries) <= rules.keep:
        return list(entries)
    oldest = entries[-rules.keep].id
    first = max(
        (e.id for e in entries if e.id <= oldest and any(base is None for base, _ in e.ways)),
        default=entries[0].id,
    )
    stay = [entry for entry in entries if entry.id >= first]
    listed = {entry.id for entry in stay}
    return [
        entry._replace(
            ways=tuple((base, size) for base, size in entry.ways if base is None or base in listed)
        )
        for entry in stay
    ]


def dropped(before: Sequence[Entry], after: Sequence[Entry], parts: int) -> list[str]:
    """The names of the files that no listed version has any more."""
    ways = {(entry.id, base) for entry in after for base, _ in entry.ways}
    listed = {entry.id for entry in after}
    names = [
        documents.file_name(entry.id, base, part)
        for entry in before
        for base, _ in entry.ways
        if (entry.id, base) not in ways
        for part in range(parts)
    ]
    gone = [documents.manifest_name(entry.id) for entry in before if entry.id not in listed]
    return names + gone

"""Versions at a URL: their bytes, and whether all of their files are right."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxcomp_weights import selections
from jaxcomp_weights.documents import Entry, Id
from jaxcomp_weights.drafts import Draft
from jaxcomp_weights.errors import Damaged
from jaxcomp_weights.source import Source


class Way(NamedTuple):
    """A way to a version.

    Attributes:
        version: the number of the version.
        step: the step of training.
        time: when it was published, in seconds since 1970.
        base: the number of the version before; None for a snapshot.
        size: the bytes of its files.
        dense: the bytes of the weights as they are.
        fault: a fault of its files; None if they are right, or were not read.
    """

    version: int
    step: int
    time: float
    base: int | None
    size: int
    dense: int
    fault: str | None = None


def ways(
    url: "str | os.PathLike[str]",
    *,
    check: bool = False,
    verify: Any = None,
    options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Way]:
    """All ways to the listed versions, from the oldest version to the newest.

    Args:
        url: where the weights are.
        check: whether to read and check every file. Versions at which patches begin are held in
            memory.
        verify: as for `Reader`.
        options: as for `Reader`.
        progress: is called with the number of versions that are done, and of all.

    Raises:
        WeightsError: if the documents cannot be read.
        ValueError: for a URL that cannot be opened.
    """
    source = Source(url, verify, options)
    newest = source.newest()
    entries = [] if newest is None else source.index(newest)
    held: dict[Id, Draft] = {}
    found = []
    for number, entry in enumerate(entries):
        progress(number, len(entries))
        later = {base for one in entries[number:] for base, _ in one.ways if base is not None}
        held = {one: draft for one, draft in held.items() if one in later}
        found += _ways(source, entry, held if check else None)
    progress(len(entries), len(entries))
    return found


def _ways(source: Source, entry: Entry, held: dict[Id, Draft] | None) -> list[Way]:
    """The ways to a version; with `held`, each is tried, and a right result is added to it."""
    manifest = source.manifest(entry.id)
    layout = source.layout(manifest.layout)
    found = []
    for base, size in sorted(entry.ways, key=lambda way: way[0] is not None):
        fault = None
        if held is not None:
            try:
                draft = _draft(layout, held, base)
                source.apply(manifest, base, draft, layout)
                held[entry.id] = draft
            except Damaged as error:
                fault = str(error)
        number = None if base is None else base.number
        found.append(
            Way(entry.id.number, entry.step, entry.time, number, size, layout.nbytes, fault)
        )
    return found


def _draft(layout: Any, held: dict[Id, Draft], base: Id | None) -> Draft:
    selection = selections.select(layout, None)
    if base is None:
        return Draft(layout, selection)
    if base not in held:
        raise Damaged(f"version {base.number} before it is not right")
    return Draft(layout, selection, held[base].arrays, held[base].sums)

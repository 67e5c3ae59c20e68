"""A reader: the newest version of published weights, bit for bit."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcomp_weights import patterns, routes, selections, targets
from jaxcomp_weights.checksums import Sum
from jaxcomp_weights.documents import Entry, Id, Manifest
from jaxcomp_weights.drafts import Draft
from jaxcomp_weights.errors import Damaged, Untrusted, VersionGap, WeightsError
from jaxcomp_weights.layouts import Layout
from jaxcomp_weights.source import Source

_TRIES = 4
"""How often a version is looked for that is removed while it is read."""
_FAILURES = 32
"""Files that are damaged or missing before a reader gives up: an index may list a million."""
_PAUSES = (0.05, 1.0)
"""Seconds between two looks for a new version: at first, and at most."""


class Change(NamedTuple):
    """Numbers of a leaf that a new version has changed.

    Attributes:
        name: the name of the leaf.
        shape: the shape of its array.
        indices: positions in the flattened array, ascending; `int32`, or `int64` for 2³¹ numbers.
        values: the new numbers.
    """

    name: str
    shape: tuple[int, ...]
    indices: np.ndarray
    values: np.ndarray


class _State(NamedTuple):
    """A version that is shown."""

    id: Id
    manifest: Manifest
    layout: Layout
    selection: selections.Selection
    arrays: dict[int, np.ndarray]
    sums: dict[tuple[int, int], Sum]
    weights: dict[str, np.ndarray]


class Reader:
    """Reads weights that a `jaxcomp.weights.Publisher` writes; needs numpy and fsspec alone.

    A version is shown whole or not at all, and only after its checksums are right. The arrays of a
    version are never changed: what was returned stays as it is. They are read-only.

    Args:
        url: where the weights are: a path, or a URL that fsspec can open.
        select: names of leaves to read, or a dict from names to slices such as `np.s_[:, :128]`;
            None for all.
        verify: an ed25519 public key, as 32 bytes or a key of the package cryptography. All
            documents must then be signed by it.
        options: keyword arguments of fsspec's file system.
        progress: is called while a version is read, with the bytes that were read and those of all
            files on the way, such as to move a bar.

    Raises:
        ValueError: for a URL that cannot be opened, or another selection or key.

    Example:
        >>> import jaxcomp, jax.numpy as jnp
        >>> with jaxcomp.weights.Publisher("memory://docs/reader") as publisher:
        ...     publisher.publish({"w": jnp.ones(3, jnp.bfloat16)}, step=10)
        >>> reader = Reader("memory://docs/reader")
        >>> weights, version = reader.update()
        >>> weights["w"].tolist(), version, reader.step
        ([1.0, 1.0, 1.0], 1, 10)

    Note:
        Without the package ml_dtypes, arrays of bfloat16 and float8 are the unsigned integers of
        their bits.
    """

    def __init__(
        self,
        url: "str | os.PathLike[str]",
        *,
        select: Any = None,
        verify: Any = None,
        options: dict[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        selections.check(select)
        self._progress = progress
        self._select = select
        self._source = Source(url, verify, options)
        self._state: _State | None = None
        self._written = targets.Written()

    @property
    def version(self) -> int | None:
        """The number of the version that is shown; None before the first `update`."""
        return None if self._state is None else self._state.id.number

    @property
    def step(self) -> int | None:
        """The step of training of this version."""
        return None if self._state is None else self._state.manifest.step

    @property
    def published(self) -> float | None:
        """When `publish` was called for this version, in seconds since 1970."""
        return None if self._state is None else self._state.manifest.time

    def update(
        self, into: Mapping[str, Any] | None = None, *, wait: float = 0.0
    ) -> tuple[dict[str, np.ndarray], int]:
        """Reads the newest version.

        Args:
            into: arrays of numpy or tensors of torch by name, such as `model.state_dict()`, into
                which changed leaves are copied.
            wait: seconds to wait for a version that is newer than the one shown.

        Returns:
            Arrays by name, and the number of the version. If there is none newer, those that are
            shown.

        Raises:
            VersionGap: if the newest version cannot be reached.
            Untrusted: with `verify`, for documents that are unsigned, altered or replayed.
            WeightsError: if nothing is published yet.
            ValueError: for a selection that the leaves do not have, or targets that do not fit.
            OSError: if the store cannot be reached.
        """
        until, pause = time.monotonic() + wait, _PAUSES[0]
        while not self._advance() and time.monotonic() < until:
            time.sleep(min(pause, max(until - time.monotonic(), 0)))
            pause = min(2 * pause, _PAUSES[1])
        if self._state is None:
            raise WeightsError(f"nothing is published at {self._source.url}")
        weights = dict(self._state.weights)
        if into is not None:
            self._written.write(weights, self._state.layout, into)
        return weights, self._state.id.number

    def changes(self, *, most: int = 1 << 20, wait: float = 0.0) -> Iterator[Change]:
        """Reads the newest version, and yields what it changes in the one shown before.

        This is the form of sparse updates of inference engines. Before the first version, all
        numbers change.

        Args:
            most: the most numbers in a `Change`.
            wait: as for `update`.

        Raises:
            ValueError: for fewer numbers than one.
            WeightsError: as for `update`.
        """
        if most < 1:
            raise ValueError(f"`most` must be at least 1, got {most}")
        before = {} if self._state is None else self._state.weights
        after, _ = self.update(wait=wait)
        return _changes(before, after, most)

    def versions(self) -> list[Entry]:
        """The versions that are listed, from the oldest to the newest."""
        found = self._source.newest()
        return [] if found is None else self._source.index(found)

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Writes the shown version as a file of safetensors.

        Raises:
            WeightsError: before the first `update`.
        """
        if self._state is None:
            raise WeightsError("no version is shown yet: call `update` first")
        names = {leaf.name: leaf.dtype for leaf in self._state.layout.leaves}
        targets.save(path, self._state.weights, names, {"step": str(self.step)})

    def _advance(self) -> bool:
        """Goes to the newest version; False if it is shown already, or nothing is published."""
        reasons: list[str] = []
        avoid: set[routes.Hop] = set()
        for _ in range(_TRIES):
            have = None if self._state is None else self._state.id
            want = self._source.newest(have)
            if want is None or want == have:
                return False
            if have is not None and want < have:
                if self._source.signed:
                    raise Untrusted(
                        f"version {want.number} is shown as the newest, and {have.number} was "
                        "read before: an old document was replayed"
                    )
                return False
            entries = self._source.index(want)
            while (hops := routes.cheapest(entries, have, want, frozenset(avoid))) is not None:
                failed = self._follow(hops, routes.size(entries, hops))
                if failed is None:
                    return True
                avoid.add(failed[0])
                reasons.append(failed[1])
                if len(reasons) > _FAILURES:
                    raise VersionGap(self._explain(want, entries, reasons))
            if self._source.newest(have) == want:
                break
        raise VersionGap(self._explain(want, entries, reasons))

    def _follow(self, hops: list[routes.Hop], total: int) -> tuple[routes.Hop, str] | None:
        """Builds a version and shows it; or says which hop failed and why."""
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            self._progress(done, total)

        draft, layout, selection, manifest = None, None, None, None
        for hop in hops:
            base, after = hop
            try:
                manifest = self._source.manifest(after)
                its = self._source.layout(manifest.layout)
                if base is None:
                    self._check_tree(after, its)
                    layout, selection = its, selections.select(its, self._select)
                    draft = Draft(layout, selection)
                elif draft is None:
                    assert self._state is not None
                    layout, selection = self._state.layout, self._state.selection
                    draft = Draft(layout, selection, self._state.arrays, self._state.sums)
                if layout != its:
                    raise Damaged("its patch is for another layout")
                self._source.apply(manifest, base, draft, its, progress)
            except Damaged as error:
                way = "the snapshot" if base is None else f"the patch from {base.number}"
                return hop, f"{way} to {after.number}: {error}"
        assert draft is not None
        assert layout is not None
        assert selection is not None
        assert manifest is not None
        self._show(_State(manifest.id, manifest, layout, selection, draft.arrays, draft.sums, {}))
        return None

    def _show(self, state: _State) -> None:
        weights, before = {}, self._state
        for number, leaf in enumerate(state.layout.leaves):
            region = state.selection.regions.get(number)
            if region is None or region.shown is None:
                continue
            array = state.arrays.get(number)
            if array is None:  # It has no numbers.
                array = np.zeros(region.shape, f"<u{patterns.itemsize(leaf.dtype)}")
            elif before and before.arrays.get(number) is array and leaf.name in before.weights:
                weights[leaf.name] = before.weights[leaf.name]
                continue
            array.flags.writeable = False
            weights[leaf.name] = array.view(patterns.dtype(leaf.dtype))[(..., *region.shown)]
        self._state = state._replace(weights=weights)

    def _check_tree(self, after: Id, layout: Layout) -> None:
        """Raises if the model is not the one that is shown: a consumer is built for its leaves."""
        before = None if self._state is None else self._state.layout
        if before is None or set(before.leaves) == set(layout.leaves):
            return
        old, new = set(before.leaves), set(layout.leaves)
        gone = ", ".join(f"{x.name} {x.dtype}{list(x.shape)}" for x in sorted(old - new)[:5])
        come = ", ".join(f"{x.name} {x.dtype}{list(x.shape)}" for x in sorted(new - old)[:5])
        raise VersionGap(
            f"version {after.number} has other leaves than version {self.version}, which is "
            f"shown: gone: {gone or 'none'}; new: {come or 'none'}. A new Reader reads it"
        )

    def _explain(self, want: Id, entries: list[Entry], reasons: list[str]) -> str:
        have = "no version" if self._state is None else f"version {self.version}"
        listed = ", ".join(str(entry.id.number) for entry in entries[-10:])
        whole = [entry.id.number for entry in entries if any(b is None for b, _ in entry.ways)]
        return (
            f"version {want.number} cannot be reached from {have} at {self._source.url}: "
            f"{'; '.join(reasons) or 'no patch leads to it, and no snapshot'}. Listed are "
            f"{listed or 'none'}; snapshots: {', '.join(map(str, whole[-5:])) or 'none'}. "
            f"{have[0].upper()}{have[1:]} is still shown"
        )


def _changes(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], most: int
) -> Iterator[Change]:
    for name, array in after.items():
        old = before.get(name)
        if old is array:
            continue
        kind = np.int32 if array.size < 2**31 else np.int64
        flat, bits = array.reshape(-1), _bits(array)
        was = None if old is None else _bits(old)
        for begin in range(0, flat.size, most):
            end = min(begin + most, flat.size)
            if was is None:
                where = np.arange(begin, end, dtype=kind)
            else:
                where = (np.flatnonzero(bits[begin:end] != was[begin:end]) + begin).astype(kind)
            if where.size:
                yield Change(name, array.shape, where, flat[where])


def _bits(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(f"<u{array.dtype.itemsize}")

"""The documents and versions at a URL, checked; and a version applied to the one before it."""

import os
from typing import Any

from jaxcomp_weights import documents, signing, stores
from jaxcomp_weights.documents import Entry, Id, Manifest
from jaxcomp_weights.drafts import Draft
from jaxcomp_weights.errors import Damaged, Untrusted
from jaxcomp_weights.layouts import Layout


class Source:
    """What is published at a URL.

    Args:
        url: where the weights are.
        verify: an ed25519 public key that must have signed all documents; None for any.
        options: keyword arguments of fsspec's file system.

    Raises:
        ValueError: for a URL that cannot be opened, or another key.
    """

    def __init__(self, url: "str | os.PathLike[str]", verify: Any, options: dict[str, Any] | None):
        self.signed = verify is not None
        self._verify = None if verify is None else signing.verifier(verify)
        self._store = stores.Store(url, options)
        self._generation: int | None = None
        self._layouts: dict[str, Layout] = {}

    @property
    def url(self) -> str:
        """The URL."""
        return self._store.url

    def newest(self, known: Id | None = None) -> Id | None:
        """The newest version, or None. The owner is asked for if the pointer is the known one.

        Raises:
            Untrusted: for an older owner than one that was seen before.
        """
        found, before = None, self._generation
        if before is not None:
            found = self._pointer(before)
            if found is not None and (known is None or found > known):
                return found
        content = self._document(documents.OWNER)
        if content is None:
            return None
        generation = content.get("generation")
        if type(generation) is not int or generation < 0:
            raise Damaged(f"{documents.OWNER} names the generation {generation!r}")
        if self._generation is not None and generation < self._generation:
            if self.signed:
                raise Untrusted(
                    f"generation {generation} is shown as the owner, and {self._generation} was "
                    "read before: an old document was replayed"
                )
        else:
            self._generation = generation
        return found if self._generation == before else self._pointer(self._generation)

    def _pointer(self, generation: int) -> Id | None:
        content = self._document(documents.newest_name(generation))
        return None if content is None else documents.read_id(content)

    def index(self, newest: Id) -> list[Entry]:
        """The listed versions up to this one, from the oldest."""
        assert self._generation is not None
        content = self._document(documents.index_name(self._generation))
        found = [] if content is None else documents.read_index(content)
        return [entry for entry in found if entry.id <= newest]

    def _document(self, name: str) -> dict[str, Any] | None:
        data = self._store.read(name, documents.MOST_BYTES)
        return None if data is None else documents.unseal(name, data, self._verify)

    def manifest(self, version: Id) -> Manifest:
        """The manifest of a version.

        Raises:
            Damaged: if there is none, or another.
        """
        content = self._document(documents.manifest_name(version))
        if content is None:
            raise Damaged("its manifest is missing")
        found = documents.read_manifest(content)
        if found.id != version:
            raise Damaged(f"its manifest is that of version {found.id.number}")
        return found

    def layout(self, digest: str) -> Layout:
        """The layout with this digest.

        Raises:
            Damaged: if there is none.
        """
        if digest not in self._layouts:
            content = self._document(documents.layout_name(digest))
            if content is None:
                raise Damaged("its layout is missing")
            self._layouts = {digest: Layout.from_json(content, digest)}  # The last one is enough.
        return self._layouts[digest]

    def apply(
        self,
        manifest: Manifest,
        base: Id | None,
        draft: Draft,
        layout: Layout,
        progress: stores.Progress = lambda count: None,
    ) -> None:
        """Turns a draft of a version, or an empty one, into the version of the manifest.

        Args:
            manifest: the version.
            base: the version that the draft is; None for an empty one.
            draft: what is changed.
            layout: the layout of both.
            progress: is called with the number of bytes that were read since the last call.

        Raises:
            Damaged: if files are missing or altered, or the result has other checksums.
        """
        files = next((way.files for way in manifest.ways if way.base == base), None)
        if files is None:
            raise Damaged("its manifest does not have this way")
        if not len(files) == len(manifest.sums) == len(layout.parts):
            raise Damaged("its files are not as many as its parts")
        for part, file in enumerate(files):
            with self._store.stream(*file, progress) as stream:
                draft.apply(stream, part, snapshot=base is None)
        draft.check(manifest.sums)

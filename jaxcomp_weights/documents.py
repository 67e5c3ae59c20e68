"""The documents of a URL: who owns it, its newest version, its index, and a version's manifest.

    owner                        the generation of the publisher that may write
    newest-GENERATION            the newest version; replaced after everything else
    index-GENERATION             the versions that are listed, and the ways to each
    layouts/DIGEST               leaves, tiles and pieces
    manifests/NUMBER-GENERATION  the files of a version, and the checksums of its results
    files/NUMBER-GENERATION-...  snapshots and patches

A document is a line of JSON, a line with its SHA-256, and, if the publisher signs, a line with the
signature of both. Its name is part of it, so no document can stand in for another.
"""

import hashlib
import json
import re
from typing import Any, NamedTuple

from jaxcomp_weights import checksums
from jaxcomp_weights.errors import Damaged, Untrusted
from jaxcomp_weights.signing import Sign, Verify

FORMAT = 1
OWNER = "owner"
MOST_BYTES = 1 << 26
"""The longest document that is read."""
_GENERATIONS, _NUMBERS = 10**6, 10**10
"""Both are written with so many digits in names."""
_UNREADABLE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""What JSON of another form raises."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMOVABLE = re.compile(
    r"manifests/\d{10}-\d{6}|files/\d{10}-\d{6}-(snapshot|from-\d{10}-\d{6})-\d{5,}", re.ASCII
)


class Id(NamedTuple):
    """A version: the generation of its publisher, and its number; later ones are larger."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.number:010}-{self.generation:06}"


class File(NamedTuple):
    """A file of a version: its bytes and SHA-256."""

    name: str
    size: int
    sha256: str


class Way(NamedTuple):
    """How a version is built: from nothing, or from another version.

    Attributes:
        base: the version before; None for a snapshot.
        files: one for each process.
    """

    base: Id | None
    files: tuple[File, ...]


class Manifest(NamedTuple):
    """A version.

    Attributes:
        id: its generation and number.
        step: the step of training.
        time: seconds since 1970 at which `publish` was called.
        layout: the SHA-256 of the layout's document.
        sums: for each process the checksum of each of its tiles.
        ways: the ways to this version.
    """

    id: Id
    step: int
    time: float
    layout: str
    sums: tuple[tuple[checksums.Sum, ...], ...]
    ways: tuple[Way, ...]


class Entry(NamedTuple):
    """A version in an index.

    Attributes:
        id: its generation and number.
        step: the step of training.
        time: seconds since 1970.
        ways: for each way the version before, or None, and the bytes of its files.
    """

    id: Id
    step: int
    time: float
    ways: tuple[tuple[Id | None, int], ...]


def manifest_name(version: Id) -> str:
    """The name of a version's manifest."""
    return f"manifests/{version}"


def layout_name(digest: str) -> str:
    """The name of a layout's document."""
    if not _DIGEST.fullmatch(digest):
        raise Damaged(f"{digest!r} is no digest")
    return f"layouts/{digest}"


def newest_name(generation: int) -> str:
    """The name of the pointer to the newest version."""
    return f"newest-{_within(generation):06}"


def index_name(generation: int) -> str:
    """The name of the list of versions."""
    return f"index-{_within(generation):06}"


def file_name(version: Id, base: Id | None, part: int) -> str:
    """The name of the file of a process for a way to a version."""
    way = "snapshot" if base is None else f"from-{base}"
    return f"files/{version}-{way}-{part:05}"


def is_removable(name: str) -> bool:
    """Whether this is the name of a file or manifest of a version, and of nothing else."""
    return _REMOVABLE.fullmatch(name) is not None


def seal(name: str, content: dict[str, Any], sign: Sign | None = None) -> bytes:
    """The document of this name."""
    text = json.dumps({"format": FORMAT, "name": name, **content}, separators=(",", ":"))
    body = f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n".encode()
    return body if sign is None else body + f"{sign(body).hex()}\n".encode()


def unseal(name: str, data: bytes, verify: Verify | None = None) -> dict[str, Any]:
    """The content of a document.

    Raises:
        Damaged: unless it is the document that `seal` has written under this name.
        Untrusted: unless `verify` accepts its signature.
    """
    parts = data.split(b"\n")
    if len(parts) not in (3, 4) or parts[-1] != b"":
        raise Damaged(f"{name} has {len(data)} bytes and is no document of jaxcomp.weights")
    text = parts[0]
    if hashlib.sha256(text).hexdigest().encode() != parts[1]:
        raise Damaged(f"{name} was altered or truncated: its checksum is another")
    if verify is not None:
        if len(parts) < 4:
            raise Untrusted(f"{name} is unsigned, and this reader has a key")
        try:
            signature = bytes.fromhex(parts[2].decode())
        except ValueError:
            raise Untrusted(f"{name} has no signature where it should be") from None
        if not verify(text + b"\n" + parts[1] + b"\n", signature):
            raise Untrusted(f"{name} is signed by another key, or was altered")
    try:
        content = json.loads(text)
        found = (content.pop("format"), content.pop("name"))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(f"{name} cannot be read: {error!r}") from None
    if found != (FORMAT, name):
        raise Damaged(f"{name} is format {found[0]!r} of {found[1]!r}, expected {FORMAT}")
    return content


def write_manifest(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON can have it."""
    return {
        **_about(manifest),
        "layout": manifest.layout,
        "sums": ["".join(map(str, part)) for part in manifest.sums],
        "ways": [[way.base, [[*file] for file in way.files]] for way in manifest.ways],
    }


def read_manifest(content: dict[str, Any]) -> Manifest:
    """The manifest that `write_manifest` has written.

    Raises:
        Damaged: for anything else, or files with other names than those of this version.
    """
    try:
        version = _id(content["version"])
        sums = tuple(
            tuple(checksums.Sum.parse(text[at : at + 16]) for at in range(0, len(text), 16))
            for text in content["sums"]
        )
        ways = tuple(
            Way(
                None if base is None else _id(base),
                tuple(File(str(n), _size(s), str(d)) for n, s, d in files),
            )
            for base, files in content["ways"]
        )
        step, time = int(content["step"]), float(content["time"])
        layout = str(content["layout"])
    except _UNREADABLE as error:
        raise Damaged(f"a manifest cannot be read: {error!r}") from None
    layout_name(layout)
    for way in ways:
        for part, file in enumerate(way.files):
            if file.name != file_name(version, way.base, part):
                raise Damaged(f"version {version.number} names the file {file.name!r}")
    return Manifest(version, step, time, layout, sums, ways)


def write_index(entries: list[Entry]) -> dict[str, Any]:
    """An index as JSON can have it."""
    return {"versions": [[*_about(entry).values(), entry.ways] for entry in entries]}


def read_index(content: dict[str, Any]) -> list[Entry]:
    """The index that `write_index` has written.

    Raises:
        Damaged: for anything else.
    """
    try:
        return [
            Entry(
                _id(version),
                int(step),
                float(time),
                tuple((None if base is None else _id(base), _size(size)) for base, size in ways),
            )
            for version, step, time, ways in content["versions"]
        ]
    except _UNREADABLE as error:
        raise Damaged(f"an index cannot be read: {error!r}") from None


def read_id(content: dict[str, Any]) -> Id:
    """The version that a pointer names."""
    try:
        return _id(content["version"])
    except _UNREADABLE as error:
        raise Damaged(f"a pointer cannot be read: {error!r}") from None


def _about(one: Manifest | Entry) -> dict[str, Any]:
    return {"version": one.id, "step": one.step, "time": one.time}


def _id(found: Any) -> Id:
    generation, number = found
    if type(number) is not int or type(generation) is not int or min(number, generation) < 0:
        raise ValueError(f"{found!r} is no version")
    if number >= _NUMBERS or generation >= _GENERATIONS:
        raise ValueError("a version has more digits than its name")
    return Id(generation, number)


def _size(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**63:
        raise ValueError(f"{found!r} is no size")
    return found


def _within(generation: int) -> int:
    if not 0 <= generation < _GENERATIONS:
        raise Damaged("a generation has more digits than its name")
    return generation

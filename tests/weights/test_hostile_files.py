"""Files and documents of a broken or hostile store: the right weights, or a `WeightsError`."""

import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import struct
import time
import tracemalloc
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcomp.weights import Publisher
from jaxcomp_weights import Reader, WeightsError, documents, pieces
from jaxcomp_weights.layouts import Layout

CODINGS = ("small", "fast")
KINDS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "int32", "bool", "uint16")
MANIFEST = "manifests/0000000002-000000"
PATCH = "files/0000000002-000000-from-0000000001-000000-00000"
SNAPSHOTS = [f"files/000000000{n}-000000-snapshot-00000" for n in (1, 2)]
MB = 1 << 20


def model(step):
    """Few numbers of many dtypes, of which some change; enough exponents for a coded snapshot."""
    draw = np.random.default_rng(3)
    found = {}
    for kind in KINDS:
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        x = (draw.standard_normal(300) * 0.1 + 1).astype(dtype)
        bits = x.view(np.uint8 if kind == "bool" else f"u{dtype.itemsize}").copy()
        bits[7 :: 40 + step] ^= step
        found[kind] = jnp.asarray(bits.view(dtype).reshape(20, 15))
    return found


def publish(folder, coding="small"):
    """Two versions: the second one has a patch, and then a snapshot too."""
    with Publisher(folder, coding=coding, skips=()) as publisher:
        publisher.publish(model(0), 0)
        publisher.publish(model(1), 1)
    return folder


@pytest.fixture(params=CODINGS)
def folder(request, tmp_path_factory):
    """A folder that tests may change."""
    made = tmp_path_factory.getbasetemp() / f"hostile-{request.param}"
    if not made.exists():
        publish(made, request.param)
    copy = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(made, copy)
    return copy


def bits(weights):
    return {name: (str(x.dtype), x.shape, np.asarray(x).tobytes()) for name, x in weights.items()}


RIGHT = [bits(model(step)) for step in (0, 1)]


class Tried:
    """A reader that shows the first version, asked for the second one again and again."""

    def __init__(self, folder, shows=True):
        pointer = folder / "newest-000000"
        newest = pointer.read_bytes()
        pointer.write_bytes(documents.seal(pointer.name, {"version": [0, 1]}))
        self.reader = Reader(folder)
        if shows:
            assert bits(self.reader.update()[0]) == RIGHT[0]
        self.state = self.reader._state
        self.forget()
        pointer.write_bytes(newest)

    def forget(self):
        """Documents are read again."""
        source = getattr(self.reader, "_source", self.reader)
        source._layouts, source._generation = {}, None

    def update(self, right=tuple(RIGHT)):
        """Whether it reads weights, which are right; else it shows what it has shown."""
        self.reader._state = self.state
        try:
            weights, version = self.reader.update()
        except WeightsError:
            assert self.reader._state is self.state
            return False
        finally:
            self.forget()
        assert bits(weights) == right[version - 1]
        return True


def content(folder, name):
    found = documents.unseal(name, (folder / name).read_bytes())
    return found


def write(folder, name, changed):
    """Writes a document with the right checksum."""
    (folder / name).write_bytes(documents.seal(name, changed))


def replace(folder, name, data):
    """Writes a file, and its SHA-256 and size in the manifest of its version."""
    (folder / name).write_bytes(data)
    manifest = f"manifests/{pathlib.PurePath(name).name[:17]}"
    found = content(folder, manifest)
    for _, files in found["ways"]:
        for file in files:
            if file[0] == name:
                file[1:] = len(data), hashlib.sha256(data).hexdigest()
    write(folder, manifest, found)


def relay(folder, change):
    """Changes the layout; its name and the manifests follow."""
    [old] = (folder / "layouts").iterdir()
    found = content(folder, f"layouts/{old.name}")
    change(found)
    text = json.dumps(found, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    write(folder, f"layouts/{digest}", found)
    for path in (folder / "manifests").iterdir():
        manifest = content(folder, f"manifests/{path.name}")
        manifest["layout"] = digest
        write(folder, f"manifests/{path.name}", manifest)


def some(values, count):
    values = list(values)
    return random.Random(count).sample(values, min(count, len(values)))


def flips(data, few):
    """The data with one byte altered: every byte, or some."""
    places = range(len(data)) if few is None else some(range(len(data)), few)
    for place in places:
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8 if few or place % 3 else 0xFF
        yield bytes(altered)


FULL, SLOW = pytest.mark.full, pytest.mark.slow
FEW = pytest.mark.parametrize(
    "few", [60, pytest.param(500, marks=FULL), pytest.param(None, marks=SLOW)]
)


@FEW
def test_altered_patches(few, folder):
    """With the right SHA-256, so that the decoder has them: the tiles' checksums find the rest."""
    tried, data = Tried(folder), (folder / PATCH).read_bytes()
    for altered in flips(data, few):
        replace(folder, PATCH, altered)
        tried.update()
    replace(folder, PATCH, data)
    assert tried.update()


@FEW
def test_altered_snapshots(few, folder):
    (folder / "newest-000000").write_bytes(documents.seal("newest-000000", {"version": [0, 1]}))
    tried, data = Tried(folder, shows=False), (folder / SNAPSHOTS[0]).read_bytes()
    for altered in flips(data, few):
        replace(folder, SNAPSHOTS[0], altered)
        tried.update()
    replace(folder, SNAPSHOTS[0], data)
    assert tried.update()


@FEW
def test_truncated_files(few, folder):
    tried = Tried(folder)
    data = (folder / PATCH).read_bytes()
    for length in range(len(data)) if few is None else some(range(len(data)), few):
        replace(folder, PATCH, data[:length])
        assert not tried.update()
    replace(folder, PATCH, data + b"\0")
    assert not tried.update()


def test_swapped_files(folder):
    tried = Tried(folder)
    files = {name: (folder / name).read_bytes() for name in (PATCH, SNAPSHOTS[0])}
    replace(folder, PATCH, files[SNAPSHOTS[0]])
    assert not tried.update()
    replace(folder, SNAPSHOTS[0], files[PATCH])
    with pytest.raises(WeightsError):
        Reader(folder).update()
    for one, other in itertools.permutations(("owner", "newest-000000", "index-000000"), 2):
        before = (folder / one).read_bytes()
        shutil.copy(folder / other, folder / one)
        assert not tried.update()
        (folder / one).write_bytes(before)


def items(data):
    """The items of a file: kind, and place of its bytes."""
    place = 8
    while place < len(data):
        kind, size = pieces.HEAD.unpack_from(data, place)
        yield kind, place + 5, size
        place += 5 + size


HUGE = (0, 1, 255, 2**16, 2**16 + 1, 2**24, 2**28, 2**31 - 1, 2**31, 2**32 - 1)


@pytest.mark.parametrize("few", [2, pytest.param(None, marks=SLOW)])
def test_huge_fields(few, folder):
    """Counts, lanes, units and words of every piece, in every place of the heads."""
    tried, data = Tried(folder), (folder / PATCH).read_bytes()
    before, slowest = peak(tried.update), 0.0
    for kind, place, size in itertools.islice(items(data), few):
        fields = {pieces.TABLE: 0, pieces.SMALL: 20, pieces.FAST: 3}.get(kind, 0)
        for field, huge in itertools.product(range(fields), HUGE):
            if 4 * field + 4 <= size:
                altered = bytearray(data)
                altered[place + 4 * field : place + 4 * field + 4] = struct.pack("<I", huge)
                replace(folder, PATCH, bytes(altered))
                begin = time.monotonic()
                assert peak(tried.update) < before + MB
                slowest = max(slowest, time.monotonic() - begin)
        for huge in HUGE:
            altered = bytearray(data)
            altered[place - 4 : place] = struct.pack("<I", huge)
            replace(folder, PATCH, bytes(altered))
            assert peak(tried.update) < before + MB
    assert slowest < 10


def peak(function):
    """The most memory of a call: the less of two, as threads of other tests may allocate, too."""

    def once():
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return min(once(), once())


def test_bombs_of_tables(tmp_path):
    tried = Tried(publish(tmp_path))
    data = (tmp_path / PATCH).read_bytes()
    before = peak(tried.update)
    kind, place, size = next(items(data))
    assert kind == pieces.TABLE
    bomb = zlib.compress(bytes(50 * MB), 9)
    altered = data[: place - 5] + pieces.HEAD.pack(kind, len(bomb)) + bomb + data[place + size :]
    replace(tmp_path, PATCH, altered)
    assert peak(tried.update) < before + MB
    table = data[place - 5 : place + size]
    begin = time.monotonic()
    replace(tmp_path, PATCH, data[:8] + 10_000 * table + data[place + size :])
    assert not tried.update()
    assert time.monotonic() - begin < 2


def test_a_piece_that_is_longer_than_pieces_are(tmp_path):
    tried = Tried(publish(tmp_path))
    before = peak(tried.update)
    long = pieces.HEAD.pack(pieces.RAW, 16 * MB) + bytes(16 * MB)
    replace(tmp_path, PATCH, (tmp_path / PATCH).read_bytes()[:8] + long)
    assert peak(tried.update) < before + 8 * MB


@pytest.mark.parametrize(
    "shape",
    [[2**31], [2**40], [2**62], [2**33, 2**33], [10**30], [0, 2**62, 2**62], [1] * 40, [-1], [1.5]],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float64"])
def test_huge_models(kind, shape, tmp_path):
    """A snapshot has at least its mantissas, so its bytes bound the numbers."""
    publish(tmp_path)

    def change(found):
        found["leaves"][0] = [found["leaves"][0][0], kind, shape]
        found["parts"][0][0] = [0, [0] * len(shape), shape]

    relay(tmp_path, change)
    assert peak(lambda: refused(Reader(tmp_path))) < 2 * MB


def test_a_huge_size_in_a_manifest(tmp_path):
    """The numbers are bounded by the bytes that are there, not by what the manifest says."""
    publish(tmp_path)
    shape = [2**34]
    whole = {"leaves": [["w", "int8", shape]], "parts": [[[0, [0], shape]]]}
    relay(tmp_path, lambda found: found.update(whole))
    for name in ("manifests/0000000001-000000", MANIFEST):
        found = content(tmp_path, name)
        for _, files in found["ways"]:
            files[0][1] = 2**40
        write(tmp_path, name, found)
    assert peak(lambda: refused(Reader(tmp_path))) < 2 * MB


def refused(reader):
    with pytest.raises(WeightsError):
        reader.update()


def test_many_tiles_take_little_time():
    """They are not compared two by two."""
    tiles = tuple((0, (n,), (1,)) for n in range(20_000))
    leaves = (("w", "bool", (20_000,)),)
    begin = time.monotonic()
    as_json = {"leaves": leaves, "parts": [tiles], "piece": 1 << 20}
    digest = hashlib.sha256(json.dumps(as_json, separators=(",", ":")).encode()).hexdigest()
    Layout.from_json(json.loads(json.dumps(as_json)), digest)
    odd = ((0, (0,), (2,)), *((0, (n,), (1,)) for n in range(1, 19_999)))
    as_json["parts"] = [odd]
    digest = hashlib.sha256(json.dumps(as_json, separators=(",", ":")).encode()).hexdigest()
    with pytest.raises(WeightsError, match="tiles that are no grid"):
        Layout.from_json(json.loads(json.dumps(as_json)), digest)
    assert time.monotonic() - begin < 5


def test_an_index_of_many_ways_takes_little_time(tmp_path):
    publish(tmp_path)
    found = content(tmp_path, "index-000000")
    found["versions"] = [
        *([[0, n], 0, 0.0, [[None, 1], [[0, max(n - 1, 0)], 1]]] for n in range(20_000)),
    ]
    write(tmp_path, "index-000000", found)
    write(tmp_path, "newest-000000", {"version": [0, 19_999]})
    begin = time.monotonic()
    refused(Reader(tmp_path))
    assert time.monotonic() - begin < 20


STRANGE = (
    None, True, False, 0, -1, 1, 2, 10**6, 2**31, 2**63, 10**30, 10**400, 0.5, float("inf"),
    float("nan"), "", "0", "../x", "/etc/passwd", "a" * 5000, "\0", "\ud800", [], [[]], {},
    [0, 1], [0, 10**400], {"a": 1}, [None], [[0, 1], 1],
)  # fmt: skip


def places(found, path=()):
    """All places in a document."""
    if path:
        yield path
    its = found.items() if isinstance(found, dict) else enumerate(found)
    if isinstance(found, dict | list):
        for key, value in its:
            if isinstance(value, dict | list):
                yield from places(value, (*path, key))
            else:
                yield (*path, key)


def mutated(found, draw):
    """A document with a value replaced, removed or doubled."""
    found = json.loads(json.dumps(found))
    path = draw.choice(list(places(found)))
    inside = found
    for key in path[:-1]:
        inside = inside[key]
    way = draw.randrange(6)
    if way == 0:
        del inside[path[-1]]
    elif way == 1 and isinstance(inside, list):
        inside.insert(path[-1], inside[path[-1]])
    elif way == 2 and type(inside[path[-1]]) is int:
        inside[path[-1]] += draw.choice((-1, 1))
    else:
        inside[path[-1]] = draw.choice(STRANGE)
    return found


@pytest.mark.parametrize("few", [150, pytest.param(600, marks=FULL)])
@pytest.mark.parametrize("name", ["owner", "newest", "index", "manifests", "layouts"])
def test_mutated_documents(name, few, tmp_path):
    """With right checksums. A layout is bound to its manifest by its digest."""
    publish(tmp_path)
    [path] = [
        path
        for path in tmp_path.rglob("*")
        if path.is_file()
        and path.relative_to(tmp_path).as_posix().startswith(name)
        and "owners" not in path.parts
        and "0000000001" not in path.name
    ]
    name, right = path.relative_to(tmp_path).as_posix(), path.read_bytes()
    tried, draw = Tried(tmp_path), random.Random(few)
    for _ in range(few):
        changed = mutated(documents.unseal(name, right), draw)
        path.write_bytes(documents.seal(name, changed))
        tried.update()
    for text in (b"", b"\n\n", b"null\n\n", b"[" * 10**6):
        path.write_bytes(text)
        refused(Reader(tmp_path)) if name != "index-000000" else tried.update()
    for text in (b"[1]", b"null", b'"x"', b"7", b"{}", b"[" * 10**6, b'{"format":1}', b"\xff"):
        path.write_bytes(text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n")
        assert not tried.update()
        refused(Reader(tmp_path))
    path.write_bytes(right)
    assert tried.update()


def test_no_path_leads_outside(tmp_path, monkeypatch):
    """Whatever documents say, only files under the URL are opened, and none elsewhere removed."""
    publish(tmp_path / "run")
    mine = tmp_path / "mine"
    mine.write_text("not of the publisher")
    names = ["../mine", str(mine), "files/../../mine", "owner", "files/0000000001-000000-snapshot-"]
    found = content(tmp_path / "run", "index-000000")
    write(tmp_path / "run", "index-000000", {**found, "dropped": names})
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(model(1), 2)
    assert mine.exists()
    assert (tmp_path / "run" / "owner").exists()
    opened = []
    monkeypatch.setattr(os, "open", wrapped(os.open, opened))
    monkeypatch.setattr("builtins.open", wrapped(open, opened))
    manifest = "manifests/0000000003-000001"
    found = content(tmp_path / "run", manifest)
    for name in ("../mine", str(mine)):
        found["ways"][0][1][0][0] = name
        write(tmp_path / "run", manifest, found)
        refused(Reader(tmp_path / "run"))
        write(tmp_path / "run", manifest, {**found, "layout": name})
        refused(Reader(tmp_path / "run"))
    assert not any("mine" in str(path) for path in opened)


def wrapped(function, opened):
    def call(path, *args, **options):
        opened.append(path)
        return function(path, *args, **options)

    return call

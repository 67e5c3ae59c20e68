"""Versions at a URL: what readers get, when, and what they are told when they cannot."""

import json
import os
import pathlib
import subprocess
import sys
import time
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomp
import jaxcomp_weights
from jaxcomp_weights import documents
from jaxcomp_weights.errors import Untrusted, VersionGap, WeightsError

Publisher, Reader = jaxcomp.weights.Publisher, jaxcomp_weights.Reader


@pytest.fixture
def url():
    """An empty place in memory."""
    return f"memory://{uuid.uuid4().hex}"


def model(step=0, rows=40):
    """Weights that move a little from step to step, and some that do not."""
    draw = np.random.default_rng(7)
    w = draw.standard_normal((rows, 130)).astype(np.float32) * 0.02
    drift = np.random.default_rng(8).standard_normal(w.shape).astype(np.float32) * 3e-7
    return {
        "layer": {"w": jnp.asarray(w + step * drift), "b": jnp.full(11, 0.5)},
        "count": jnp.int32(step),
        "none": jnp.zeros((0, 3)),
    }


def expected(params, dtype=jnp.bfloat16):
    """What a reader must get, as bytes by name."""
    leaves = {
        "layer/w": params["layer"]["w"].astype(dtype),
        "layer/b": params["layer"]["b"].astype(dtype),
        "count": params["count"],
        "none": params["none"].astype(dtype),
    }
    return {name: (np.asarray(x).tobytes(), x.shape, x.dtype) for name, x in leaves.items()}


def got(weights):
    return {name: (x.tobytes(), x.shape, x.dtype) for name, x in weights.items()}


def publish(url, steps, rows=40, **options):
    with Publisher(url, dtype=jnp.bfloat16, **options) as publisher:
        for step in steps:
            publisher.publish(model(step, rows), step)


def publish_now(publisher, step):
    publisher.publish(model(step), step)
    publisher.flush()


@pytest.mark.parametrize("coding", ["small", "fast"])
def test_readers_get_every_version_bit_for_bit(coding, url):
    reader, late = Reader(url), Reader(url)
    with Publisher(url, dtype=jnp.bfloat16, coding=coding) as publisher:
        for step in range(4):
            publisher.publish(model(step), step)
            publisher.flush()
            weights, version = reader.update()
            assert got(weights) == expected(model(step))
            assert (version, reader.version, reader.step) == (step + 1, step + 1, step)
            assert time.time() - 60 < reader.published < time.time()
        assert publisher.version == 4
    assert got(late.update()[0]) == expected(model(3))
    again, version = reader.update()
    assert version == 4
    assert all(again[name] is weights[name] for name in weights)


def test_what_was_returned_stays_as_it_is(url):
    reader = Reader(url)
    with Publisher(url, dtype=jnp.bfloat16) as publisher:
        publisher.publish(model(0), 0)
        publisher.flush()
        first, _ = reader.update()
        publisher.publish(model(1), 1)
        publisher.flush()
        second, _ = reader.update()
    assert got(first) == expected(model(0))
    assert first["layer/w"] is not second["layer/w"]
    assert first["layer/b"] is second["layer/b"]  # It did not change.
    with pytest.raises(ValueError, match="read-only"):
        second["layer/w"][0, 0] = 1


def test_parameters_may_be_donated_to_the_next_step(url):
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    params = {"w": jnp.zeros(5000), "n": jnp.arange(3)}
    with Publisher(url) as publisher:
        for number in range(3):
            publisher.publish(params, number)
            params = step(params)
    weights, _ = Reader(url).update()
    np.testing.assert_array_equal(weights["w"], np.full(5000, 2, np.float32))
    np.testing.assert_array_equal(weights["n"], np.arange(3) + 2)


def test_an_export_gives_names_and_layouts(url):
    def export(params):
        return {"kernel.T": params["layer"]["w"].T, "row.0": params["layer"]["w"][0]}

    with Publisher(url, export=export, dtype=jnp.float16) as publisher:
        publisher.publish(model(0), 0)
        publisher.publish(model(5), 5)
    weights, _ = Reader(url).update()
    want = np.asarray(model(5)["layer"]["w"].astype(jnp.float16))
    np.testing.assert_array_equal(weights["kernel.T"], want.T)
    np.testing.assert_array_equal(weights["row.0"], want[0])


def test_a_late_reader_reads_few_files(url, monkeypatch):
    """Over 70 versions: to the next multiple of 4, of 16, and down again."""
    rules = {"skips": (4, 16), "snapshot_every": 1000, "keep": None}
    reader = Reader(url)
    publish(url, range(2), rows=600, **rules)
    with Publisher(url, dtype=jnp.bfloat16, **rules) as publisher:
        for step in range(2, 75):
            publisher.publish(model(step, rows=600), step)
            if step == 2:  # A new publisher begins with a snapshot.
                publisher.flush()
                reader.update()
    hops = []
    follow = Reader._follow
    monkeypatch.setattr(Reader, "_follow", lambda s, h, n: (hops.extend(h), follow(s, h, n))[1])
    weights, version = reader.update()
    assert version == 75
    assert got(weights) == expected(model(74, rows=600))
    assert [hop[1].number for hop in hops] == [4, 8, 12, 16, 32, 48, 64, 68, 72, 73, 74, 75]


def test_snapshots_come_in_time(url):
    publish(url, range(12), snapshot_every=5, skips=())
    numbers = [e.id.number for e in Reader(url).versions() if any(b is None for b, _ in e.ways)]
    assert numbers == [1, 6, 11]


def test_a_snapshot_comes_when_patches_have_more_bytes(url):
    draw = np.random.default_rng(0)
    with Publisher(url, skips=(), snapshot_every=1000) as publisher:
        for step in range(8):  # Nothing of these numbers stays.
            publisher.publish({"w": jnp.asarray(draw.standard_normal(5000), jnp.float32)}, step)
    entries = Reader(url).versions()
    snapshots = [e.id.number for e in entries if any(base is None for base, _ in e.ways)]
    assert len(snapshots) > 2


def test_only_what_nobody_needs_is_removed(tmp_path):
    other = tmp_path / "files" / "mine"
    other.parent.mkdir()
    other.write_text("not of the publisher")
    publish(tmp_path, range(40), rows=600, keep=6, snapshot_every=8, skips=(4,))
    reader = Reader(tmp_path)
    entries = reader.versions()
    listed = {entry.id for entry in entries}
    # The oldest kept version is 35; its snapshot is that of 33.
    assert [entry.id.number for entry in entries] == list(range(33, 41))
    names = {p.relative_to(tmp_path).as_posix() for p in (tmp_path / "files").iterdir()}
    needed = {documents.file_name(entry.id, base, 0) for entry in entries for base, _ in entry.ways}
    assert names == needed | {"files/mine"}
    assert all(base is None or base in listed for entry in entries for base, _ in entry.ways)
    assert {p.name for p in (tmp_path / "manifests").iterdir()} == {str(one) for one in listed}
    assert got(reader.update()[0]) == expected(model(39, rows=600))


def test_a_reader_of_a_removed_version_takes_a_snapshot(url):
    reader = Reader(url)
    with Publisher(url, dtype=jnp.bfloat16, keep=3, snapshot_every=4, skips=()) as publisher:
        publisher.publish(model(0), 0)
        publisher.flush()
        reader.update()
        for step in range(1, 20):
            publisher.publish(model(step), step)
    assert got(reader.update()[0]) == expected(model(19))


def test_a_new_publisher_goes_on_with_the_numbers(url):
    reader = Reader(url)
    publish(url, range(3))
    assert reader.update()[1] == 3
    publish(url, range(3, 5))
    weights, version = reader.update()
    assert (version, reader.step) == (5, 4)
    assert got(weights) == expected(model(4))
    assert [entry.id.number for entry in reader.versions()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("published", [0, 2])
def test_a_begun_version_is_removed_by_the_next_publisher(published, tmp_path):
    """Its files are there, and neither its manifest nor its pointer: so a kill leaves it."""
    publish(tmp_path, range(published))
    begun = documents.Id(0, published + 1)
    base = documents.Id(0, published) if published else None
    left = tmp_path / documents.file_name(begun, base, 0)
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(b"begun")
    Publisher(tmp_path).close()
    assert not left.exists()
    publish(tmp_path, [5])
    weights, version = Reader(tmp_path).update()
    assert version == published + 1
    assert got(weights) == expected(model(5))


def test_a_second_publisher_of_this_process_takes_over(tmp_path):
    first = Publisher(tmp_path, dtype=jnp.bfloat16)
    first.publish(model(0), 0)
    first.flush()
    second = Publisher(tmp_path, dtype=jnp.bfloat16)
    second.publish(model(1), 1)
    second.flush()
    first.publish(model(2), 2)
    with pytest.raises(ValueError, match="generation 1 has taken over from generation 0"):
        first.flush()
    weights, version = Reader(tmp_path).update()
    assert version == 2
    assert got(weights) == expected(model(1))
    second.close()


def test_an_old_publisher_that_does_not_know_changes_nothing(url, monkeypatch):
    """It is stopped between its last look and its pointer."""
    first = Publisher(url, dtype=jnp.bfloat16)
    first.publish(model(0), 0)
    first.flush()
    reader = Reader(url)
    reader.update()
    publish(url, [1])
    monkeypatch.setattr(first._writer._owner, "check", lambda: None)
    first.publish(model(9), 9)
    first.flush()
    fresh = Reader(url)
    assert got(fresh.update()[0]) == expected(model(1))
    reader.update()
    reader.update()  # The pointer that it knew does not change any more: it asks for the owner.
    assert got(reader.update()[0]) == expected(model(1))


def test_nothing_is_published(url):
    with pytest.raises(WeightsError, match="nothing is published at memory://"):
        Reader(url).update()
    assert Reader(url).versions() == []
    assert Reader(url).version is None


def test_progress_is_told_in_bytes(tmp_path):
    publish(tmp_path, range(2), snapshot_every=9)
    told = []
    Reader(tmp_path, progress=lambda done, total: told.append((done, total))).update()
    size = sum(path.stat().st_size for path in (tmp_path / "files").iterdir())
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_reader_waits(url):
    publish(url, range(1))
    reader = Reader(url)
    reader.update()
    start = time.monotonic()
    assert reader.update(wait=0.3)[1] == 1
    assert time.monotonic() - start > 0.29


@pytest.mark.parametrize("damage", ["missing", "short", "altered"])
def test_a_damaged_patch_is_gone_around(damage, tmp_path):
    """By a snapshot that has the version too; without one, the reader says what is wrong."""
    reader = Reader(tmp_path)
    with Publisher(tmp_path, dtype=jnp.bfloat16, skips=(), snapshot_every=3) as publisher:
        for step in range(5):  # Snapshots are 1 and 4.
            publisher.publish(model(step), step)
            publisher.flush()
            if step == 1:
                reader.update()
        spoil(next(tmp_path.glob("files/0000000003-*from*")), damage)
        assert got(reader.update()[0]) == expected(model(4))  # By the snapshot of 4.
        publisher.publish(model(5), 5)
        publisher.flush()
        spoil(next(tmp_path.glob("files/0000000006-*from*")), damage)
        with pytest.raises(VersionGap, match=r"version 6 cannot be reached from version 5.* still"):
            reader.update()
        assert reader.version == 5
        publisher.publish(model(6), 6)
        publisher.flush()
        assert got(reader.update()[0]) == expected(model(6))


def spoil(path, damage):
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(data[:-3])
    else:
        path.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


def test_another_tree_is_an_error_of_the_old_reader(url):
    old = Reader(url)
    with Publisher(url) as publisher:
        publisher.publish({"w": jnp.ones(3), "gone": jnp.ones(2)}, 0)
        publisher.flush()
        old.update()
        publisher.publish({"w": jnp.ones(3), "new": jnp.ones(4)}, 1)
    with pytest.raises(VersionGap, match=r"gone: gone float32\[2\]; new: new float32\[4\]"):
        old.update()
    assert old.version == 1
    assert sorted(Reader(url).update()[0]) == ["new", "w"]


def sharded(step, mesh):
    specs = {"layer": {"w": PartitionSpec("a", "b"), "b": PartitionSpec()}}
    place = {
        "layer": {k: NamedSharding(mesh, s) for k, s in specs["layer"].items()},
        "count": NamedSharding(mesh, PartitionSpec()),
        "none": NamedSharding(mesh, PartitionSpec()),
    }
    return jax.device_put(model(step), place)


def test_shards_are_written_as_they_lie_and_meshes_may_change(url):
    """A reader does not see how the trainer is sharded, nor that it changes."""
    reader = Reader(url)
    for number, shape in enumerate([(4, 2), (2, 1), (8, 1)]):
        devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("a", "b"))
        with Publisher(url, dtype=jnp.bfloat16) as publisher:
            for step in (2 * number, 2 * number + 1):
                publisher.publish(sharded(step, mesh), step)
                publisher.flush()
                assert got(reader.update()[0]) == expected(model(step))


def test_shards_are_not_gathered(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    with Publisher(tmp_path) as publisher:
        publisher.publish(sharded(0, mesh), 0)
    [path] = (tmp_path / "layouts").iterdir()
    content = json.loads(path.read_bytes().split(b"\n")[0])
    leaf = [name for name, _, _ in content["leaves"]].index("layer/w")
    tiles = [(start, shape) for number, start, shape in content["parts"][0] if number == leaf]
    assert len(tiles) == 8
    assert {tuple(shape) for _, shape in tiles} == {(10, 65)}


def test_a_program_that_forgets_to_close_loses_nothing(tmp_path):
    script = f"""
import jax.numpy as jnp, jaxcomp
publisher = jaxcomp.weights.Publisher({str(tmp_path)!r})
for step in range(3):
    publisher.publish({{"w": jnp.full(50, step)}}, step)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    weights, version = Reader(tmp_path).update()
    assert version == 3
    assert set(weights["w"].tolist()) == {2}


def test_one_publisher_may_change_its_mesh(url):
    reader = Reader(url)
    devices = np.array(jax.devices())
    with Publisher(url, dtype=jnp.bfloat16) as publisher:
        for step, shape in enumerate([(4, 2), (4, 2), (8, 1)]):
            mesh = jax.sharding.Mesh(devices.reshape(shape), ("a", "b"))
            params = sharded(step, mesh)
            publisher.publish(params, step)
            publisher.flush()
            assert got(reader.update()[0]) == expected(model(step))


@pytest.mark.parametrize("coding", ["small", "fast"])
def test_a_selection_has_only_its_leaves_and_slices(coding, url):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    rank = Reader(url, select={"layer/w": np.s_[5:15, 65:], "count": None})
    named = Reader(url, select=["layer/b"])
    with Publisher(url, dtype=jnp.bfloat16, coding=coding) as publisher:
        for step in range(3):
            publisher.publish(sharded(step, mesh), step)
            publisher.flush()
            weights, _ = rank.update()
            assert sorted(weights) == ["count", "layer/w"]
            want = np.asarray(model(step)["layer"]["w"].astype(jnp.bfloat16))[5:15, 65:]
            np.testing.assert_array_equal(weights["layer/w"], want)
            assert weights["count"] == step
            assert list(named.update()[0]) == ["layer/b"]


def test_wrong_selections_are_told(url):
    publish(url, [0])
    with pytest.raises(ValueError, match="`select` must have names of leaves, got 'layer'; there"):
        Reader(url, select=["layer"]).update()
    with pytest.raises(ValueError, match=r"`select\['layer/w'\]` must have at most 2 slices"):
        Reader(url, select={"layer/w": np.s_[0]}).update()
    with pytest.raises(ValueError, match="`select` must be names of leaves"):
        Reader(url, select="layer/w")
    with pytest.raises(ValueError, match="`select` must have the names of leaves, got 3"):
        Reader(url, select=[3])


def test_changes_are_what_an_engine_applies(url):
    """Applied to the version before they give the next one, in pieces of a bounded size."""
    reader = Reader(url)
    with Publisher(url, dtype=jnp.bfloat16) as publisher:
        publisher.publish(model(0), 0)
        publisher.flush()
        held = {}
        for change in reader.changes():
            flat = held.setdefault(change.name, np.zeros(change.shape, change.values.dtype))
            flat.reshape(-1)[change.indices] = change.values
        publisher.publish(model(3), 3)
        publisher.publish(model(4), 4)
        publisher.flush()
        sizes = []
        for change in reader.changes(most=100):
            assert change.indices.dtype == np.int32
            held[change.name].reshape(-1)[change.indices] = change.values
            sizes.append(change.indices.size)
    assert max(sizes) <= 100 < sum(sizes) < 5000
    want = {name: bits for name, (bits, shape, _) in expected(model(4)).items() if 0 not in shape}
    assert {name: x.tobytes() for name, x in held.items()} == want
    assert list(reader.changes()) == []
    with pytest.raises(ValueError, match="`most` must be at least 1, got 0"):
        reader.changes(most=0)


def test_weights_are_written_into_arrays(url):
    publish(url, [0])
    reader = Reader(url)
    target = {name: np.zeros_like(x) for name, x in reader.update()[0].items()}
    reader.update(into=target)
    assert got(target) == expected(model(0))
    target["layer/b"][:] = 3
    publish(url, [1])
    reader.update(into=target)
    want = expected(model(1))
    want["layer/b"] = (target["layer/b"].tobytes(), (11,), target["layer/b"].dtype)
    assert got(target) != expected(model(0))
    with pytest.raises(ValueError, match="`into` must have all leaves that are read"):
        reader.update(into={"layer/w": target["layer/w"]})
    wrong = {**target, "layer/w": np.zeros((3, 3), np.float32)}
    with pytest.raises(ValueError, match=r"`into\['layer/w'\]` must be bfloat16\[40, 130\]"):
        reader.update(into=wrong)
    with pytest.raises(ValueError, match="`into` must be a dict"):
        reader.update(into=[1])


def test_weights_are_written_into_tensors(url):
    torch = pytest.importorskip("torch")
    publish(url, [0, 1])
    target = {
        "layer/w": torch.zeros(40, 130, dtype=torch.bfloat16),
        "layer/b": torch.zeros(11, dtype=torch.bfloat16),
        "count": torch.zeros((), dtype=torch.int32),
        "none": torch.zeros(0, 3, dtype=torch.bfloat16),
    }
    Reader(url).update(into=target)
    bits = target["layer/w"].view(torch.int16).numpy()
    assert bits.tobytes() == expected(model(1))["layer/w"][0]
    assert target["count"].item() == 1


def test_a_version_is_saved_as_safetensors(url, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    publish(url, [0])
    reader = Reader(url)
    with pytest.raises(WeightsError, match="call `update` first"):
        reader.save(tmp_path / "model.safetensors")
    reader.update()
    reader.save(tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "flax") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"step": "0"}
    assert got({name: np.asarray(x) for name, x in found.items()}) == expected(model(0))


class TestSigned:
    """A reader with a key refuses what is unsigned, altered, or an old document as a new one."""

    KEY = bytes(range(32))

    @pytest.fixture
    def public(self):
        ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
        key = ed25519.Ed25519PrivateKey.from_private_bytes(self.KEY)
        return key.public_key().public_bytes_raw()

    def test_signed_versions_are_read(self, public, url):
        publish(url, range(3), sign=self.KEY)
        assert got(Reader(url, verify=public).update()[0]) == expected(model(2))
        publish(url, range(3, 5), sign=self.KEY)
        assert Reader(url, verify=public).update()[1] == 5

    def test_unsigned_ones_and_those_of_others_are_not(self, public, url):
        publish(url, [0])
        with pytest.raises(Untrusted, match="owner is unsigned"):
            Reader(url, verify=public).update()
        publish(url, [1], sign=bytes(32))
        with pytest.raises(Untrusted, match="owner is signed by another key"):
            Reader(url, verify=public).update()

    def test_versions_of_others_are_not_taken_over(self, public, url):
        publish(url, [0, 1])
        publish(url, [2], sign=self.KEY)
        reader = Reader(url, verify=public)
        assert got(reader.update()[0]) == expected(model(2))
        assert len(reader.versions()) == 1

    @pytest.mark.parametrize("name", ["newest", "index", "manifests", "layouts", "owner"])
    def test_altered_documents_are_refused(self, name, public, tmp_path):
        publish(tmp_path, range(2), sign=self.KEY)
        [path] = [
            p
            for p in tmp_path.rglob("*")
            if p.is_file()
            and p.relative_to(tmp_path).as_posix().startswith(name)
            and "owners" not in p.parts
            and "0000000001" not in p.name
        ]
        text, _, signature, _ = path.read_bytes().split(b"\n")
        content = json.loads(text)
        content["more"] = 1
        forged = documents.seal(content.pop("name"), content).removesuffix(b"\n")
        path.write_bytes(forged + b"\n" + signature + b"\n")
        with pytest.raises((Untrusted, VersionGap), match="signed by another key"):
            Reader(tmp_path, verify=public).update()

    def test_an_old_pointer_is_refused(self, public, tmp_path):
        reader = Reader(tmp_path, verify=public)
        publish(tmp_path, [0], sign=self.KEY)
        old = (tmp_path / "newest-000000").read_bytes()
        with Publisher(tmp_path, dtype=jnp.bfloat16, sign=self.KEY) as publisher:
            publisher.publish(model(1), 1)
        reader.update()
        owner = (tmp_path / "owner").read_bytes()
        before = documents.seal("owner", {"generation": 0}, publisher._writer._sign)
        (tmp_path / "owner").write_bytes(before)
        with pytest.raises(Untrusted, match="an old document was replayed"):
            reader.update()
        (tmp_path / "owner").write_bytes(owner)
        pointer = {"version": [0, 1]}
        sealed = documents.seal("newest-000001", pointer, publisher._writer._sign)
        (tmp_path / "newest-000001").write_bytes(sealed)
        with pytest.raises(Untrusted, match="an old document was replayed"):
            reader.update()
        (tmp_path / "newest-000001").write_bytes(old)  # Under the name of another.
        with pytest.raises(WeightsError, match="newest-000001 is format 1 of 'newest-000000'"):
            reader.update()

    def test_notes_of_other_processes_must_be_signed(self, public, url):
        """What another process wrote becomes part of a signed manifest."""
        with Publisher(url, sign=self.KEY) as publisher:
            publisher._writer._store.write("work/1", documents.seal("work/1", {"files": []}))
            with pytest.raises(Untrusted, match="work/1 is unsigned"):
                publisher._writer._wait_for("work/1")

    def test_keys_of_other_kinds_are_told(self, url):
        with pytest.raises(ValueError, match="`sign` must be the 32 bytes of an ed25519"):
            Publisher(url, sign=b"short")
        with pytest.raises(ValueError, match="`verify` must be the 32 bytes of an ed25519"):
            Reader(url, verify="text")


def test_a_full_disk_is_told_and_the_next_version_goes_on(tmp_path, monkeypatch):
    from jaxcomp_files import durable

    reader = Reader(tmp_path)
    with Publisher(tmp_path, dtype=jnp.bfloat16) as publisher:
        publisher.publish(model(0), 0)
        publisher.flush()
        write = durable.write_new

        def full(path, chunks, mode):
            write(path, [b"begun"], mode)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(durable, "write_new", full)
        publisher.publish(model(1), 1)
        with pytest.raises(OSError, match="No space left"):
            publisher.flush()
        monkeypatch.undo()
        assert reader.update()[1] == 1
        publisher.publish(model(2), 2)
        publisher.flush()
        assert got(reader.update()[0]) == expected(model(2))
    assert len(list((tmp_path / "files").iterdir())) == 2  # What was begun is gone.


def test_a_version_that_readers_may_see_keeps_its_files(tmp_path, monkeypatch):
    """The pointer is written, and the store says that it is not."""
    with Publisher(tmp_path, dtype=jnp.bfloat16) as publisher:
        publisher.publish(model(0), 0)
        publisher.flush()
        store = publisher._writer._store
        write = store.write

        def lost(name, data):
            write(name, data)
            if name.startswith("newest"):
                raise OSError("connection lost")

        monkeypatch.setattr(store, "write", lost)
        publisher.publish(model(1), 1)
        with pytest.raises(OSError, match="connection lost"):
            publisher.flush()
        assert got(Reader(tmp_path).update()[0]) == expected(model(1))
        monkeypatch.undo()
        publisher.publish(model(2), 2)
        publisher.flush()
        assert got(Reader(tmp_path).update()[0]) == expected(model(2))


def test_old_files_that_stay_do_not_undo_a_version(tmp_path, monkeypatch):
    rules = {"keep": 1, "snapshot_every": 1, "skips": ()}
    with Publisher(tmp_path, dtype=jnp.bfloat16, **rules) as publisher:
        publisher.publish(model(0), 0)
        publisher.flush()

        def refused(name):
            raise OSError("access denied")

        monkeypatch.setattr(publisher._writer._store, "remove", refused)
        with pytest.warns(UserWarning, match="could not be removed: access denied"):
            publish_now(publisher, 1)
        assert got(Reader(tmp_path).update()[0]) == expected(model(1))
        monkeypatch.undo()
        publisher.publish(model(2), 2)
    assert {path.name[:10] for path in (tmp_path / "files").iterdir()} == {"0000000003"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        Publisher(tmp_path)


def test_wrong_arguments_are_told(url):
    with pytest.raises(ValueError, match=r"`dtype` must be None or one of bfloat16.*got int32"):
        Publisher(url, dtype=jnp.int32)
    with pytest.raises(ValueError, match=r"`coding` must be one of.*got 'tiny'"):
        Publisher(url, coding="tiny")
    with pytest.raises(ValueError, match="`keep` must be at least 1"):
        Publisher(url, keep=0)
    with pytest.raises(ValueError, match="`skips` must be at least 2"):
        Publisher(url, skips=(1,))
    with pytest.raises(ValueError, match="`url` must be a path or a URL"):
        Publisher("nosuch://x")
    with pytest.raises(ValueError, match="`link`"):
        Publisher(url, link="100Mbit")
    publisher = Publisher(url, export=lambda p: [p])
    with pytest.raises(ValueError, match="`export` must return a dict from names to arrays"):
        publisher.publish(jnp.ones(3), 0)
    publisher = Publisher(url)
    with pytest.raises(ValueError, match=r"`params` must have arrays of.*got complex64 in 'w'"):
        publisher.publish({"w": jnp.ones(3, jnp.complex64)}, 0)
    with pytest.raises(ValueError, match="at least one array"):
        publisher.publish({}, 0)
    for step, message in ((1.5, "`step` must be an integer"), (-1, "`step` must be at least 0")):
        with pytest.raises(ValueError, match=message):
            publisher.publish({"w": jnp.ones(3)}, step)
    publisher.publish({"w": jnp.ones(3)}, jnp.int32(4))  # As a training state has it.
    publisher.close()
    with pytest.raises(ValueError, match="before `close`"):
        publisher.publish({"w": jnp.ones(3)}, 0)


def test_the_link_chooses_the_coding(url):
    network = jaxcomp.planning.Network
    for bandwidth, coding in ((1e5, "small"), (12.5e6, "fast")):
        publisher = Publisher(url, link=network(bandwidth))
        assert publisher._writer._coding == coding
        publisher.close()
    assert pathlib.Path(jaxcomp_weights.__file__).exists()

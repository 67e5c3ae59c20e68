"""Readers by HTTP and S3, and readers without JAX, torch and ml_dtypes."""

import functools
import http.server
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.weights import Publisher
from jaxcomp_weights import Reader, WeightsError, stores

SIZES = {"w": (40, 130), "b": (7,)}


def model(step):
    draw = np.random.default_rng(1)
    return {
        name: jnp.asarray(1 + step / 64 * draw.random(shape), jnp.bfloat16)
        for name, shape in SIZES.items()
    }


def same(weights, step):
    assert sorted(weights) == sorted(SIZES)
    for name, want in model(step).items():
        np.testing.assert_array_equal(weights[name], np.asarray(want))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Keeps the requests, and serves no ranges."""

    requests = []

    def log_message(self, *args):
        self.requests.append((self.command, self.path))


class Unsized(Quiet):
    """Does not tell the size of a file."""

    def send_header(self, keyword, value):
        if keyword != "Content-Length":
            super().send_header(keyword, value)


@pytest.fixture(params=[Quiet, Unsized])
def site(request, tmp_path):
    """The URL of a folder."""
    handler = functools.partial(request.param, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("whole", [stores._WHOLE, 1000])
def test_a_folder_is_read_by_http(whole, site, tmp_path, monkeypatch):
    """Files in one request each, or from begin to end in blocks if they are long."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(stores, "_WHOLE", whole)
    Quiet.requests.clear()
    reader = Reader(site)
    with pytest.raises(WeightsError, match="nothing is published at http://"):
        reader.update()
    with Publisher(tmp_path, skips=(), snapshot_every=3) as publisher:
        for step in range(5):
            publisher.publish(model(step), step)
            publisher.flush()
            if step != 2:  # Then a reader is late.
                weights, version = reader.update()
                same(weights, step)
                assert (version, reader.step) == (step + 1, step)
    # With two requests, an index that is replaced between them is cut to the size of the old one.
    heads = [path for command, path in Quiet.requests if command == "HEAD"]
    assert all(path.startswith("/files/") for path in heads)
    assert not heads or whole == 1000
    [patch] = tmp_path.glob("files/0000000005-*from*")
    data = patch.read_bytes()
    for altered in (data[:-3], data[:-3] + b"\0\0\0"):
        patch.write_bytes(altered)
        fresh = Reader(site)
        with pytest.raises(WeightsError, match="version 5 cannot be reached from no version"):
            fresh.update()
    patch.unlink()
    with pytest.raises(WeightsError, match="is missing"):
        Reader(site).update()


@pytest.fixture(scope="module")
def server():
    """A server that speaks S3, and the options of a client."""
    pytest.importorskip("s3fs")
    pytest.importorskip("flask")
    moto = pytest.importorskip("moto.server")
    running = moto.ThreadedMotoServer("127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    yield {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    running.stop()


@pytest.fixture
def bucket(server, request):
    """A URL in a new bucket, its options and its file system."""
    import s3fs

    name = f"bucket{abs(hash(request.node.nodeid))}"
    files = s3fs.S3FileSystem(**server)
    files.mkdir(name)
    return f"s3://{name}/run", server, files


@pytest.mark.full
def test_weights_are_published_to_s3_and_read(bucket):
    url, options, files = bucket
    reader = Reader(url, options=options)
    with pytest.raises(WeightsError, match="nothing is published at s3://"):
        reader.update()
    rules = {"keep": 3, "snapshot_every": 4, "skips": ()}
    with Publisher(url, options=options, **rules) as publisher:
        for step in range(10):
            publisher.publish(model(step), step)
            publisher.flush()
            same(reader.update()[0], step)
    entries = reader.versions()
    # The oldest kept version is 8, and its snapshot that of 5.
    assert [entry.id.number for entry in entries] == [5, 6, 7, 8, 9, 10]
    files.invalidate_cache()
    assert len(files.ls(f"{url}/manifests")) == 6
    assert len(files.ls(f"{url}/files")) == sum(len(entry.ways) for entry in entries)
    same(Reader(url, options=options).update()[0], 9)


@pytest.mark.full
def test_a_second_publisher_takes_over_at_s3(bucket):
    url, options, _ = bucket
    reader = Reader(url, options=options)
    first = Publisher(url, options=options)
    first.publish(model(0), 0)
    first.flush()
    same(reader.update()[0], 0)
    with Publisher(url, options=options) as second:
        second.publish(model(1), 1)
        second.flush()
        first.publish(model(2), 2)
        with pytest.raises(ValueError, match="generation 1 has taken over from generation 0"):
            first.flush()
        weights, version = reader.update()
        assert version == 2
        same(weights, 1)
        second.publish(model(3), 3)
    same(reader.update()[0], 3)


@pytest.mark.full
def test_one_of_many_publishers_gets_a_generation_at_s3(bucket):
    """They begin at the same time, and each has its own generation."""
    url, options, _ = bucket
    found, errors = [], []

    def begin():
        try:
            found.append(Publisher(url, options=options)._writer._generation)
        except ValueError as error:  # Another one was newer before it had begun.
            errors.append(str(error))

    threads = [threading.Thread(target=begin) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) >= 1
    assert len(found) + len(errors) == 6
    assert all("has taken over from generation" in error for error in errors)


ALONE = """
import sys
import jaxcomp_weights
reader = jaxcomp_weights.Reader(sys.argv[1])
weights, version = reader.update()
assert version == 2, version
print(weights["w"].dtype, weights["w"].shape, weights["w"].tobytes().hex()[:40])
print(*sorted({"jax", "jaxlib", "torch", "jaxcomp", "ml_dtypes"} & set(sys.modules)))
"""
WITHOUT = 'import sys; sys.modules["ml_dtypes"] = None\n' + ALONE.replace(', "ml_dtypes"', "")


@pytest.mark.parametrize(("script", "kind", "used"), [(ALONE, "bfloat16", ["ml_dtypes"]),
                                                      (WITHOUT, "uint16", [])],
                         ids=["alone", "without ml_dtypes"])  # fmt: skip
def test_a_reader_needs_neither_jax_nor_torch(script, kind, used, tmp_path):
    with Publisher(tmp_path) as publisher:
        publisher.publish(model(0), 0)
        publisher.publish(model(1), 1)
    command = [sys.executable, "-c", script, str(tmp_path)]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    array, modules = said.stdout.splitlines()
    bits = np.asarray(model(1)["w"]).tobytes().hex()
    assert array == f"{kind} (40, 130) {bits[:40]}"
    assert modules.split() == used

"""Readers over a plain HTTP server."""

import functools
import http.server
import threading

import numpy as np
import pytest

from jaxcomp.weights import Publisher
from jaxcomp_weights import Reader

pytest.importorskip("aiohttp")


@pytest.fixture
def server(tmp_path):
    """The URL of a folder, and the requests so far."""
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            requests.append((self.command, self.path))

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}", requests
        found.shutdown()


def test_documents_are_read_in_one_request(server, tmp_path):
    """With two, an index that is replaced between them is cut to the size of the old one."""
    url, requests = server
    with Publisher(tmp_path) as publisher:
        for step in range(2):
            publisher.publish({"w": np.full(5, step, np.float32)}, step)
    weights, version = Reader(url).update()
    assert version == 2
    np.testing.assert_array_equal(weights["w"], np.ones(5, np.float32))
    heads = [path for command, path in requests if command == "HEAD"]
    assert all(path.startswith("/files/") for path in heads)

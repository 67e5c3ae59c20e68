"""Publishers and readers that are killed at random moments; what is read is what was published."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import publishing
from helpers.paths import TESTS

from jaxcomp_weights import Reader, documents


class Fork:
    """A process that is killed and started again by a server with JAX in its memory."""

    def __init__(self, way, folder, log, versions):
        command = [sys.executable, TESTS / "helpers" / "publishing.py", way, folder, log, versions]
        self.errors = open(f"{log}.errors", "w+")  # noqa: SIM115
        self.server = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        self.process, self.exits = None, []

    def start(self):
        self.server.stdin.write("\n")
        self.server.stdin.flush()
        self.process = int(self.server.stdout.readline())

    def wait(self):
        """The exit code of the process."""
        code = int(self.server.stdout.readline())
        self.process = None
        return code

    def kill(self):
        """Kills the process, and starts it again; False if it had ended."""
        os.kill(self.process, signal.SIGKILL)  # It is a zombie at worst: nobody else has its id.
        code = self.wait()
        assert code in (0, -signal.SIGKILL), self.said()
        if code == 0:
            return False
        self.start()
        return True

    def said(self):
        self.errors.seek(0)
        return self.errors.read()

    def close(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
        self.server.kill()
        self.server.wait()
        self.server.stdin.close()
        self.server.stdout.close()
        self.errors.close()


@pytest.mark.parametrize(
    ("kills", "versions"),
    [
        pytest.param(6, 60, marks=pytest.mark.full),
        pytest.param(100, 200, marks=pytest.mark.slow),
    ],
)
def test_publishers_and_readers_are_killed(kills, versions, tmp_path):
    folder, written = tmp_path / "run", tmp_path / "written"
    logs = [tmp_path / f"read{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        publisher = Fork("publish", folder, written, versions)
        stack.callback(publisher.close)
        readers = [Fork("read", folder, log, versions) for log in logs]
        for reader in readers:
            stack.callback(reader.close)
        guard = threading.Timer(1200, lambda: [one.server.kill() for one in (publisher, *readers)])
        guard.daemon = True
        guard.start()
        stack.callback(guard.cancel)
        for one in (publisher, *readers):
            one.start()
        draw, killed = random.Random(kills), 0
        before = 0
        while killed < kills:
            # Once it has written something, so that versions go on; then at any moment.
            until = time.monotonic() + 60
            while sum(1 for _ in publishing.lines(written)) <= before:
                assert time.monotonic() < until, publisher.said()
                time.sleep(0.01)
            time.sleep(draw.random() * 0.15)
            before = sum(1 for _ in publishing.lines(written))
            if not publisher.kill():
                break
            killed += 1
            if killed % 2 == 0:
                draw.choice(readers).kill()
        assert killed >= min(kills, 5)
        if publisher.process is not None:
            assert publisher.wait() == 0, publisher.said()
        for reader in readers:
            if reader.process is not None:
                assert reader.wait() == 0, reader.said()
    check(folder, written, logs, versions, killed)


def check(folder, written, logs, versions, killed):
    """Reads are what was published; only what is needed is there, and what kills have left."""
    published = {}
    for step, digests in publishing.lines(written):
        published.setdefault(step, []).append(digests)
    count = 0
    for log in logs:
        newest = {}
        for line in publishing.lines(log):
            assert line[0] != "gap", line
            process, number, step, digests = line
            assert digests in published[step]
            assert number > newest.get(process, 0)
            newest[process] = number
            count += 1
        assert max(newest.values()) == versions
    assert count >= 10
    fresh = Reader(folder)
    weights, version = fresh.update()
    assert version == versions
    assert publishing.digests(weights) in published[fresh.step]
    assert np.isfinite(weights["in"]).all()
    entries = fresh.versions()
    needed = {documents.file_name(e.id, base, 0) for e in entries for base, _ in e.ways}
    needed |= {documents.manifest_name(entry.id) for entry in entries}
    there = {
        path.relative_to(folder).as_posix()
        for name in ("files", "manifests")
        for path in (folder / name).iterdir()
    }
    assert needed <= there
    assert len(there - needed) <= 4 * killed, sorted(there - needed)

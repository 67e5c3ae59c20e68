"""Several processes publish the weights that they share."""

import os
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from helpers import publishers
from helpers.paths import TESTS

from jaxcomp_weights import Reader, VersionGap, WeightsError

PATIENCE = 240


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.full
def test_each_process_writes_its_own_shards(tmp_path):
    """A reader that follows from the begin, and one that comes late, get the arrays.

    Version 5 fails at one process alone, and version 6 is right again.
    """
    folder, address = tmp_path / "run", f"localhost:{free_port()}"
    script = TESTS / "helpers" / "publishers.py"
    running, reader, seen = [], Reader(folder), []
    try:
        for number in range(2):
            said = tempfile.TemporaryFile("w+")  # noqa: SIM115
            command = [sys.executable, script, address, 2, number, folder]
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )
            running.append((process, said))
        until = time.monotonic() + PATIENCE
        while any(process.poll() is None for process, _ in running) and time.monotonic() < until:
            try:
                weights, version = reader.update(wait=0.2)
            except VersionGap:
                raise
            except WeightsError:
                continue
            same(weights, version - 1)
            seen.append(version)
            if any(process.poll() not in (None, 0) for process, _ in running):
                break
        for process, said in running:
            code = process.wait(60)
            said.seek(0)
            assert code == 0, said.read()
    finally:
        for process, said in running:
            process.kill()
            process.wait()
            said.close()
    assert seen == sorted(seen)
    late = Reader(folder)
    weights, version = late.update()
    assert version == publishers.VERSIONS + 2
    same(weights, version - 1)
    same(reader.update()[0], version - 1)
    files = [path.name for path in (folder / "files").iterdir()]
    ways = sum(len(entry.ways) for entry in late.versions())
    assert sorted(name[-5:] for name in files) == ["00000"] * ways + ["00001"] * ways
    assert not list((folder / "work").iterdir())
    tiles = [len(part) for part in late._state.layout.parts]
    assert sum(tiles) == 2 * 2 + 2  # Each replicated leaf once.
    sizes = [path.stat().st_size for path in (folder / "files").glob("*snapshot-*")]
    assert min(sizes) > 1000


def same(weights, step):
    want = publishers.arrays(step)
    assert sorted(weights) == sorted(want)
    for name, leaf in want.items():
        np.testing.assert_array_equal(weights[name], leaf)

"""Clients over the devices of several processes: the bits of one process."""

import os
import socket
import subprocess
import sys

import clients as world
import pytest
from paths import TESTS

PATIENCE = 240  # Seconds, of a machine that is busy with other tests.


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_two_processes_change_no_bit(rounds):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    path = os.pathsep.join(filter(None, (str(TESTS.parent), os.environ.get("PYTHONPATH"))))
    running = [
        subprocess.Popen(
            [sys.executable, TESTS / "federated" / "clients.py", address, "2", str(n), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        )
        for n in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    alone = world.simulation()
    alone.run(rounds)
    for text, process in zip(said, running, strict=True):
        assert process.returncode == 0, text
        assert f"digest {world.digest(alone.params)}" in text

"""The benchmark of a slow wire: its network, and how it keeps results."""

import json
import subprocess
import sys
import time
from importlib import import_module

import pytest
from helpers.paths import ROOT

SEND = """
import socket, sys
where = (sys.argv[1], 29400)
if sys.argv[2] == "receive":
    with socket.create_server(where) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        while connection.recv(1 << 16):
            pass
        connection.sendall(b"!")
else:
    with socket.create_connection(where) as connection:
        connection.sendall(bytes(int(sys.argv[3])))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
"""


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the benchmark by its name."""
    monkeypatch.syspath_prepend(ROOT / "examples")  # As `reporting`, perhaps imported before.
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "network")
    return import_module


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_links_are_shaped_and_gone_afterwards(module, delay):
    """A megabyte at 10 Mbit/s takes 0.84 s, minus the burst of the bucket."""
    namespaces = module("namespaces")
    try:
        why = namespaces.missing()
    except RuntimeError as error:  # A benchmark is running.
        why = str(error)
    if why is not None:
        pytest.skip(why)

    def start(net, rank, *words, **settings):
        argv = [sys.executable, "-c", SEND, namespaces.address(0), *words]
        return net.start(rank, argv, **settings)

    def use():
        with namespaces.network(2, "10mbit", delay=delay) as net:
            with start(net, 0, "receive", stdout=subprocess.PIPE, text=True) as receiver:
                assert receiver.stdout.readline() == "ready\n"
                begin = time.monotonic()
                assert start(net, 1, "send", "1000000").wait(timeout=30) == 0
                assert 0.5 + 3 * delay < time.monotonic() - begin < 20
            left.append(net.start(1, ["sleep", "60"]))
            raise ZeroDivisionError

    left: list[subprocess.Popen] = []
    with pytest.raises(ZeroDivisionError):
        use()
    assert left[0].wait(timeout=10) != 0  # Removing the network ends its programs.
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert namespaces.PREFIX not in listed.stdout


def test_packets_take_their_time(module):
    """1,000 bytes at 10 kB/s take 0.1 s on each link, of which one runs beside the other's."""
    delays = module("delays")
    near, far = bytes((10, 77, 0, 10)), bytes((10, 77, 0, 11))
    packet = b"\x45" + bytes(15) + far + bytes(980)
    switch = delays.Switch(delay=0.05, rate=10_000)
    switch.take(near, packet, now=0.0)
    switch.take(near, packet, now=0.0)
    switch.take(near, b"\x60" + packet[1:], now=0.0)  # IPv6.
    assert switch.due(now=0.149) == []
    assert switch.due(now=0.151) == [(far, packet)]
    assert switch.wait(now=0.151) == pytest.approx(0.099)
    assert switch.due(now=0.251) == [(far, packet)]
    assert switch.wait(now=0.251) is None
    for _ in range(5000):  # 5 MB, of which 4 MB may wait.
        switch.take(near, packet, now=1.0)
    assert 3990 <= len(switch.due(now=1e9)) <= 4000


@pytest.mark.parametrize(
    ("rate", "bytes_"), [("100mbit", 12.5e6), ("1.5gbit", 187.5e6), ("unshaped", None)]
)
def test_rates(module, rate, bytes_):
    assert module("namespaces").bytes_a_second(rate) == bytes_


@pytest.mark.parametrize("rate", ["100", "fast", "1 gbit", "-1mbit"])
def test_a_wrong_rate_is_named(module, rate):
    with pytest.raises(ValueError, match="must be like 100mbit"):
        module("namespaces").bytes_a_second(rate)


def test_ranks_become_one(module):
    """A mean is complete when the last of its workers has it."""
    found = [{"a": [1.0, 5.0], "b": "x"}, {"a": [2.0, 3.0], "b": "x"}]
    assert module("run").slowest(found) == {"a": [2.0, 5.0], "b": "x"}


def test_a_training_is_the_median_of_its_races(module):
    curves = [[[0, 0.0, 8.0, 0], [5, seconds, 3.9, 7]] for seconds in (3.0, 9.0, 2.0)]
    found = module("run").middle({"curves": curves, "reducer": "r"}, target=4.0)
    assert found == {
        "reducer": "r",
        "curve": curves[0],
        "reached": True,
        "seconds": [3.0, 9.0, 2.0],
        "ends": [(5, 3.9, 7)] * 3,
    }
    curves[1][-1][2] = 4.1
    assert not module("run").middle({"curves": curves}, target=4.0)["reached"], "one seed did not"


def test_results_are_added_to(module, tmp_path, monkeypatch):
    """A second program adds to a cell, and names the differences in its environment."""
    run = module("run")
    path, cell = tmp_path / "mean.json", {"rate": "1gbit", "processes": 2}
    monkeypatch.setattr(run, "environment", lambda: {"torch": "absent"})
    run.keep(path, cell, {"methods": {"dense": {"seconds": [1.0]}}, "elements": 8}, "2026-01-01")
    monkeypatch.setattr(run, "environment", lambda: {"torch": "2.0"})
    run.keep(path, cell, {"methods": {"torch DDP": {"seconds": [2.0]}}}, "2026-01-02")
    run.keep(path, {**cell, "processes": 4}, {"methods": {}}, "2026-01-03")
    book = json.loads(path.read_text())
    first, second = book["cells"]
    assert first["methods"]["dense"] == {"seconds": [1.0]}
    assert first["methods"]["torch DDP"] == {"seconds": [2.0], "environment": {"torch": "2.0"}}
    assert (first["elements"], second["processes"]) == (8, 4)
    assert len(module("tables").elsewhere(book["cells"])) == 1

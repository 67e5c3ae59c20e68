"""Processes of sites and of the server are killed; what sites gave is where it belongs."""

import importlib

import pytest
from helpers.paths import ROOT

pytest.importorskip("flwr")
pytest.importorskip("flax")

ROUNDS = 6


@pytest.fixture
def parts(monkeypatch):
    """The network of the example, and the benchmark with the task in whole numbers."""
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return [importlib.import_module(name) for name in ("sites_network", "site_rounds")]


@pytest.mark.full
def test_a_site_and_the_server_are_killed_and_nothing_is_lost_or_counted_twice(parts, tmp_path):
    network, benchmark = parts
    config = {"task": "site_integers", "rounds": ROUNDS, "steps": 2, "quorum": 3}
    config |= {"deadline": 20.0, "patience": 60.0, "seed": 1}
    link = {"delay": 0.01, "rate": 50e6, "resets": 0.05}
    with network.Network(tmp_path, config, benchmark.SITES, link) as net:
        net.start_server()
        net.join(*range(benchmark.SITES))

        def taken():
            return net.rounds()[-1]["round"] if net.rounds() else 0

        net.wait(lambda: taken() >= 2, 200)
        net.kill("site1")
        net.start_site(1)
        net.wait(lambda: taken() >= 4, 200)
        net.kill_server()
        net.start_link()
        net.start_server()
        net.wait(lambda: net.ended, 200)
        assert taken() == ROUNDS
    found = benchmark.balance(tmp_path, 1, 2)
    assert found["difference"] == 0
    assert found["gave"] > found["held"] > 0

"""The benchmark of gossip over a slow ring: what each exchange puts on each link."""

import subprocess
import sys
import time
from importlib import import_module

import jax
import numpy as np
import pytest
from helpers.paths import ROOT
from test_network import SEND

import jaxcomp
from jaxcomp import graphs

LIKE, WORKERS = jax.ShapeDtypeStruct((64, 256), np.float32), 8
FOUR = jaxcomp.qsgd_inf(bits=4)
SWITCH = {"shape": "switch", "rate": 1.0, "slow": None}
RING = {"shape": "ring", "rate": 1.0, "slow": None}


@pytest.fixture
def traffic(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "network")
    return import_module("traffic")


def payload():
    return jaxcomp.wire_bytes(FOUR, LIKE)


def times(traffic, reducer, links):
    """Seconds of each round over links of one byte a second."""
    rounds = traffic.messages(reducer, LIKE, WORKERS)
    return [sum(traffic.seconds(load, links) for load in each) for each in rounds]


def test_every_host_sends_the_bytes_of_the_reducer(traffic):
    for reducer in (
        jaxcomp.Dense(),
        jaxcomp.TwoShot(FOUR, FOUR),
        jaxcomp.Gossip(FOUR),
        jaxcomp.Gossip(FOUR, graphs.Exponential()),
    ):
        (loads,) = traffic.messages(reducer, LIKE, WORKERS)
        assert not any(np.diag(load).any() for load in loads)
        want = jaxcomp.wire_bytes(reducer, LIKE, workers=WORKERS)
        np.testing.assert_allclose(sum(load.sum(axis=1) for load in loads), want)
        np.testing.assert_allclose(sum(load.sum(axis=0) for load in loads), want)
        assert times(traffic, reducer, SWITCH) == [pytest.approx(want)]


def test_a_ring_of_links_carries_a_payload_for_each_host_on_its_way(traffic):
    one = payload()
    assert times(traffic, jaxcomp.Gossip(FOUR), RING) == [2 * one]
    assert times(traffic, jaxcomp.Gossip(FOUR, graphs.OnePeer()), RING) == [one, 2 * one, 2 * one]
    # Of two shots, the first is shifts of an eighth by 1, 2, 3, 4 (both ways), 3, 2 and 1 hosts.
    shots = times(traffic, jaxcomp.TwoShot(FOUR, FOUR), RING)
    assert shots == [pytest.approx(one * (14 / 8 + 7 / 8), rel=1e-3)]


def test_a_slow_link_decides_unless_the_graph_goes_without_it(traffic):
    one, slow = payload(), {**RING, "slow": 0.1}
    assert times(traffic, jaxcomp.Gossip(FOUR), slow) == [pytest.approx(20 * one)]
    path = traffic.path(WORKERS)
    assert graphs.degree(path, WORKERS) == 2 * (WORKERS - 1) / WORKERS
    assert times(traffic, jaxcomp.Gossip(FOUR, path), slow) == [2 * one]
    host = {**SWITCH, "slow": 0.1}
    assert times(traffic, jaxcomp.Gossip(FOUR, path), host) == [pytest.approx(11 * one)]
    unshaped = {"shape": "ring", "rate": None, "slow": None}
    assert times(traffic, jaxcomp.Gossip(FOUR), unshaped) == [0.0]


def test_all_ways_are_the_short_ones_and_half_of_the_long_ones_go_up(traffic):
    namespaces = import_module("namespaces")
    for count in (2, 5, 8):
        hops = np.zeros((2, count))
        for source in range(count):
            for to in set(range(count)) - {source}:
                up = namespaces.clockwise(source, to, count)
                far = (to - source) % count if up else (source - to) % count
                assert far <= count / 2
                at = source if up else to
                hops[int(up), np.arange(at, at + far) % count] += 1
        if count > 2:
            assert (hops == hops[0, 0]).all()  # No link has more to carry than another one.


def test_a_payload_that_nobody_hears_is_not_sent(traffic):
    """Not even in place of the missing edge of a path, or to and from a silent worker."""
    (loads,) = traffic.messages(jaxcomp.Gossip(FOUR, traffic.path(WORKERS)), LIKE, WORKERS)
    load = sum(loads)
    slow = import_module("namespaces").slow_host(WORKERS)
    assert load[slow, slow + 1] == load[slow + 1, slow] == 0
    alone = jaxcomp.Gossip(FOUR, graphs.Without(graphs.Ring(), silent=(2,)))
    (loads,) = traffic.messages(alone, LIKE, WORKERS)
    load = sum(loads)
    assert not load[2].any()
    assert not load[:, 2].any()


def test_hosts_of_a_ring_pass_on_what_is_not_for_them(traffic):
    """From 0 to 2 through 1: half a megabyte over the slow link, minus the burst of the bucket."""
    namespaces = import_module("namespaces")
    try:
        why = namespaces.missing()
    except RuntimeError as error:  # A benchmark is running.
        why = str(error)
    if why is not None:
        pytest.skip(why)
    with namespaces.network(4, "100mbit", "ring", "2mbit") as net:

        def seconds(source, to):
            argv = [sys.executable, "-c", SEND, namespaces.address(to)]
            pipe = {"stdout": subprocess.PIPE, "text": True}
            with net.start(to, [*argv, "receive"], **pipe) as receiver:
                assert receiver.stdout.readline() == "ready\n"
                begin = time.monotonic()
                assert net.start(source, [*argv, "send", "500000"]).wait(timeout=30) == 0
                return time.monotonic() - begin

        assert namespaces.slow_host(4) == 1
        assert namespaces.clockwise(0, 2, 4)
        slow, fast = seconds(0, 2), seconds(3, 0)
    assert 0.7 < slow < 20
    assert fast < slow

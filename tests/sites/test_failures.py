"""Sites, their nodes, the SuperLink and the server's app fail in processes of their own, over TLS.

In whole numbers: what sites gave is what the centre got and what residuals hold, and no round takes
longer than its deadline and a restart.
"""

import contextlib
import json
import os
import resource
import signal
import time

import pytest
from helpers.paths import ROOT

pytest.importorskip("flwr")
pytestmark = pytest.mark.slow

ROUNDS, DEADLINE, RESTART = 8, 30.0, 60.0
"""Of a run; seconds of a round, and in which a process is back and has compiled."""
CONFIG = {
    "task": "site_integers",
    "rounds": ROUNDS,
    "steps": 2,
    "seed": 0,
    "quorum": 3,
    "deadline": DEADLINE,
}
LINK = {"delay": 0.01, "rate": 100e6}


@pytest.fixture(scope="module", autouse=True)
def importable():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


class Supervised:
    """Starts again what has ended, as a supervisor does, and lets failures happen in their rounds.

    Args:
        events: by the number of rounds that are done, what then happens, as functions of the
            network.
    """

    def __init__(self, events):
        self.events, self.left_alone = dict(events), set()
        self.last, self.since, self.longest = 0, time.monotonic(), 0.0

    def __call__(self, net, done):
        now = time.monotonic()
        if done > self.last:
            self.longest = max(self.longest, now - self.since)
            self.last, self.since = done, now
        for number in range(4):
            if f"site{number}" not in self.left_alone and not net.alive(f"site{number}"):
                net.start_site(number)
        if not net.alive("link"):
            net.start_link()
        if done and done < ROUNDS and net.server is None and not net.ended:
            with contextlib.suppress(RuntimeError):
                net.start_server()
                time.sleep(3)
        for at in [at for at in self.events if at <= done]:
            self.events.pop(at)(net)


def run(folder, events, **settings):
    """The report of a run with these events, whose sums are checked."""
    import site_rounds

    happens = Supervised(events)
    found = site_rounds.trained(dict(CONFIG), LINK, happens, 900, folder, **settings)
    balance = site_rounds.balance(folder, CONFIG["seed"], CONFIG["steps"])
    assert balance["gave"] > 0
    assert balance["difference"] == 0
    assert found["rounds"][-1]["round"] == ROUNDS
    assert happens.longest < DEADLINE + RESTART
    assert not happens.events
    return found["rounds"]


def stop(net, name):
    os.kill(net.pid(name), signal.SIGSTOP)


def go_on(net, name):
    os.kill(net.pid(name), signal.SIGCONT)


def limit(pid, size):
    """Sets how large a file the process may write: a full disk for it alone."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_the_superlink_is_killed_at_the_beginning_in_the_middle_and_at_the_end_of_a_round(tmp_path):
    def after(seconds):
        def kill(net):
            time.sleep(seconds)
            net.kill("link")

        return kill

    run(tmp_path, {2: after(0.0), 4: after(1.0), 6: after(2.0)})


def test_the_superlink_and_the_app_of_the_server_are_killed(tmp_path):
    run(tmp_path, {2: lambda net: net.kill_server(), 5: lambda net: net.kill_server()})


@pytest.mark.parametrize("node", [True, False], ids=["own", "flowers"])
def test_a_node_is_killed_beside_its_site_and_a_site_beside_its_node(tmp_path, node):
    run(
        tmp_path,
        {
            2: lambda net: net.kill("node1"),
            3: lambda net: net.kill("site2"),
            5: lambda net: (net.kill("node0"), net.kill("site0")),
        },
        node=node,
    )


def test_a_site_hangs_for_two_rounds(tmp_path):
    rounds = run(tmp_path, {2: lambda net: stop(net, "site1"), 4: lambda net: go_on(net, "site1")})
    assert sum(rounds[-1]["late"].values()) >= 1


def test_the_disk_of_a_site_is_full_for_two_rounds(tmp_path):
    rounds = run(
        tmp_path,
        {
            2: lambda net: limit(net.pid("site1"), 1000),
            4: lambda net: limit(net.pid("site1"), resource.RLIM_INFINITY),
        },
    )
    assert rounds[-1]["refused"]["failed"] >= 1


def test_the_disk_of_the_server_is_full(tmp_path):
    """Its app ends in the round that it cannot save, and takes it again when there is room."""
    ended = []

    def fill(net):
        limit(net.server, 1000)
        until = time.monotonic() + DEADLINE + RESTART
        while net.server is not None and time.monotonic() < until:
            time.sleep(0.5)
        ended.append(net.server is None)
        # Otherwise `Network.wait` would take the error for the end of the run.
        log = tmp_path / "server" / "server.log"
        log.write_text(log.read_text().replace("An unhandled exception", "A full disk"))

    run(tmp_path, {3: fill})
    assert ended == [True]


def test_a_certificate_expires_and_is_replaced(tmp_path):
    """Whoever connects anew is refused; after a new one of the same authority all go on."""
    import sites_network

    lifetime, begin, still = 60.0, time.monotonic(), []

    def expire(net):
        time.sleep(max(0.0, begin + lifetime + 2 - time.monotonic()))
        net.kill("link")
        net.start_link()
        done = len(net.rounds())
        time.sleep(15)
        still.append(len(net.rounds()) - done)
        sites_network.certificates(tmp_path)
        net.kill("link")

    run(tmp_path, {3: expire}, lifetime=lifetime)
    assert still == [0]


def test_a_node_is_removed_while_its_site_works(tmp_path):
    def remove(net):
        listed = json.loads(net.flwr("supernode", "list", "here", "--format", "json"))
        net.flwr("supernode", "unregister", listed["nodes"][0]["node-id"], "here")

    rounds = run(tmp_path, {3: remove})
    assert rounds[-1]["accepted"] == 3

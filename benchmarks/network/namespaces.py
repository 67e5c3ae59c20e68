"""A slow wire on one machine: processes in network namespaces of their own, on a shaped bridge.

Each process has one Ethernet device, a host name, and an `/etc/hosts` that says where the others
are: whatever a library asks for its own address, it finds that of the shaped link. Token buckets
hold both ways of every link to the same rate.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

PREFIX = "jaxcomp-wire-"
BRIDGE = PREFIX + "bridge"
BUCKET = ("burst", "256kb", "limit", "4mb")
"""Of the shapers: what may pass at once, and what may wait before packets are dropped."""
CONGESTION = "reno"
"""TCP's control of congestion. Some kernels take BBR by default, which leaves such links idle at
times where two hosts send to each other; this one fills them, and is in all kernels.
"""
TOOLS = ("ip", "tc", "unshare", "mount", "hostname")
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Network(NamedTuple):
    """Where processes can be started; `hosts` is a folder of what each finds as `/etc/hosts`."""

    processes: int
    hosts: pathlib.Path
    started: list[subprocess.Popen]

    def start(self, rank: int, argv: Sequence[str], **settings: Any) -> subprocess.Popen:
        """Starts a program in the namespaces of one rank; `settings` are those of `Popen`."""
        inside = ("unshare", "--mount", "--uts", "sh", "-c", _ENTER)
        names = (_host(rank), str(self.hosts / str(rank)))
        command = [*_within(_namespace(rank)), *inside, *names, *argv]
        self.started.append(subprocess.Popen(command, **settings))
        return self.started[-1]


def address(rank: int) -> str:
    return f"10.77.0.{10 + rank}"


@contextlib.contextmanager
def network(processes: int, rate: str | None) -> Iterator[Network]:
    """A network of hosts; on exit it is removed, and every program in it is ended.

    Args:
        processes: how many hosts.
        rate: of each link in each direction, as `tc` writes it; None does not shape.

    Raises:
        RuntimeError: if another program has such a network.
        subprocess.CalledProcessError: if this machine cannot have one.
    """
    with tempfile.TemporaryDirectory() as hosts, _alone():
        _clear()  # Remove the network of an interrupted run.
        started: list[subprocess.Popen] = []
        try:
            _build(processes, rate)
            for rank in range(processes):
                text = f"127.0.0.1 localhost\n{address(rank)} {_host(rank)}\n"
                pathlib.Path(hosts, str(rank)).write_text(text)
            yield Network(processes, pathlib.Path(hosts), started)
        finally:
            for (
                process
            ) in started:  # A process that has not entered its namespace yet is not found there.
                process.kill()
            _clear()


def missing() -> str | None:
    """The reason why such a network is not possible here, or None."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"these programs are needed: {', '.join(absent)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with network(1, "1gbit") as net:
            tried = net.start(0, ["true"], stderr=subprocess.PIPE, text=True)
            _, said = tried.communicate()
        return None if tried.returncode == 0 else f"a program cannot be started in one: {said}"
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


def _build(processes: int, rate: str | None) -> None:
    _run("ip", "netns", "add", BRIDGE)
    _run("ip", "-n", BRIDGE, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", BRIDGE, "link", "set", "br0", "up")
    for rank in range(processes):
        name, port = _namespace(rank), f"port{rank}"
        peer = ("type", "veth", "peer", "name", port, "netns", BRIDGE)
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "add", "eth0", *peer)
        _run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", BRIDGE, "link", "set", port, "master", "br0")
        _run("ip", "-n", BRIDGE, "link", "set", port, "up")
        control = f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control"
        _run(*_within(name), "sh", "-c", control)
        if rate is not None:
            shaper = ("root", "handle", "1:", "tbf", "rate", rate, *BUCKET)
            for place, device in ((name, "eth0"), (BRIDGE, port)):
                _run(*_within(place), "tc", "qdisc", "add", "dev", device, *shaper)


def _clear() -> None:
    for name in _found():
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)
    while _found():
        time.sleep(0.01)


def _found() -> list[str]:
    known = json.loads(_run("ip", "-json", "netns", "list") or "[]")
    return [one["name"] for one in known if one["name"].startswith(PREFIX)]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    path = pathlib.Path(tempfile.gettempdir(), f"{PREFIX}lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError("another program has a network of this kind now") from None
        yield


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _within(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def _namespace(rank: int) -> str:
    return f"{PREFIX}{rank}"


def _host(rank: int) -> str:
    return f"worker{rank}"

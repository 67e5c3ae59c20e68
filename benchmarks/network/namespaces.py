"""A slow wire on one machine: processes in network namespaces of their own, on shaped links.

Each process has one Ethernet device, a host name, and an `/etc/hosts` that says where the others
are: whatever a library asks for its own address, it finds that of the shaped link. Token buckets
hold both ways of every link to the same rate.

The hosts are on a switch, or in a ring in which each has links to the host before and after it
alone: what two others send to each other passes through the hosts between them. On a switch
packets may also take their time (`delays.py`).
"""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import delays

PREFIX = "jaxcomp-wire-"
BRIDGE = PREFIX + "bridge"
BUCKET = ("burst", "256kb", "limit", "4mb")
"""Of the shapers: what may pass at once, and what may wait before packets are dropped."""
CONGESTION = "reno"
"""TCP's control of congestion. Some kernels take BBR by default, which leaves such links idle at
times where two hosts send to each other; this one fills them, and is in all kernels.
"""
TOOLS = ("ip", "tc", "unshare", "mount", "hostname")
SHAPES = ("switch", "ring")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Bits a second, as `tc` writes them."""
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


def bytes_a_second(rate: str) -> float | None:
    """Bytes a second of a rate as `tc` writes it; None without one."""
    if rate == "unshaped":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found:
        raise ValueError(f"must be like 100mbit or 1gbit, or unshaped, got {rate!r}")
    return float(found[1]) * UNITS[found[2]] / 8


def address(rank: int) -> str:
    return f"10.77.0.{10 + rank}"


def slow_host(processes: int) -> int:
    """The host whose link, or whose link to the next host of a ring, has a rate of its own."""
    return processes // 2 - 1


def clockwise(source: int, to: int, processes: int) -> bool:
    """Whether messages of a ring go up the ranks: the short way; halfway, those of even ranks."""
    far = (to - source) % processes
    return 2 * far < processes or (2 * far == processes and source % 2 == 0)


@contextlib.contextmanager
def network(
    processes: int,
    rate: str | None,
    shape: str = "switch",
    slow: str | None = None,
    delay: float = 0.0,
) -> Iterator[Network]:
    """A network of hosts; on exit it is removed, and every program in it is ended.

    Args:
        processes: how many hosts.
        rate: of each link in each direction, as `tc` writes it; None does not shape.
        shape: "switch" or "ring".
        slow: another rate of one link: of `slow_host` on a switch, from it to the next in a ring.
        delay: seconds of a packet on its way over a switch, whose links then all have one rate.

    Raises:
        RuntimeError: if another program has such a network.
        subprocess.CalledProcessError: if this machine cannot have one.
    """
    with tempfile.TemporaryDirectory() as hosts, _alone():
        _clear()  # Remove the network of an interrupted run.
        started: list[subprocess.Popen] = []
        try:
            if delay:
                started.append(_build_delayed(processes, rate, delay))
            else:
                build = {"switch": _build, "ring": _build_ring}[shape]
                build(processes, rate, slow)
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


def _build(processes: int, rate: str | None, slow: str | None) -> None:
    _run("ip", "netns", "add", BRIDGE)
    _run("ip", "-n", BRIDGE, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", BRIDGE, "link", "set", "br0", "up")
    for rank in range(processes):
        name, port = _host_of(rank), f"port{rank}"
        peer = ("type", "veth", "peer", "name", port, "netns", BRIDGE)
        _run("ip", "-n", name, "link", "add", "eth0", *peer)
        _run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")
        _run("ip", "-n", BRIDGE, "link", "set", port, "master", "br0")
        _run("ip", "-n", BRIDGE, "link", "set", port, "up")
        own = slow if slow and rank == slow_host(processes) else rate
        for place, device in ((name, "eth0"), (BRIDGE, port)):
            _shape(place, device, own)


def _build_delayed(processes: int, rate: str | None, delay: float) -> subprocess.Popen:
    """The program that is the switch."""
    ends = {}
    for rank in range(processes):
        name, device = _host_of(rank), f"wire{rank}"
        ends[address(rank)] = delays.attach(device)
        _run("ip", "link", "set", device, "netns", name, "name", "eth0")
        _run("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "mtu", str(delays.LARGEST), "up")
    hosts = [f"{host}={end}" for host, end in ends.items()]
    speed = bytes_a_second(rate or "unshaped") or 0.0
    argv = [sys.executable, delays.__file__, str(delay), str(speed), *hosts]
    switch = subprocess.Popen(argv, pass_fds=tuple(ends.values()))
    for end in ends.values():
        os.close(end)
    return switch


def _build_ring(processes: int, rate: str | None, slow: str | None) -> None:
    ranks = range(processes)
    for rank in ranks:
        name = _host_of(rank)
        _run("ip", "-n", name, "addr", "add", f"{address(rank)}/32", "dev", "lo")
        _set(name, "ip_forward", "1")
    for rank in ranks:
        name, then = _namespace(rank), _namespace((rank + 1) % processes)
        own = slow if slow and rank == slow_host(processes) else rate
        peer = ("type", "veth", "peer", "name", "last", "netns", then)
        _run("ip", "-n", name, "link", "add", "next", *peer)
        for place, device, end in ((name, "next", 1), (then, "last", 2)):
            _run("ip", "-n", place, "addr", "add", f"10.78.{rank}.{end}/30", "dev", device)
            _run("ip", "-n", place, "link", "set", device, "up")
            _shape(place, device, own)
    for rank, to in ((rank, to) for rank in ranks for to in ranks if rank != to):
        up = clockwise(rank, to, processes)
        near = f"10.78.{rank}.2" if up else f"10.78.{(rank - 1) % processes}.1"
        way = ("via", near, "dev", "next" if up else "last", "src", address(rank))
        _run("ip", "-n", _namespace(rank), "route", "add", f"{address(to)}/32", *way)


def _host_of(rank: int) -> str:
    """Makes the namespace of a host."""
    name = _namespace(rank)
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _set(name, "tcp_congestion_control", CONGESTION)
    return name


def _set(namespace: str, name: str, value: str) -> None:
    _run(*_within(namespace), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")


def _shape(namespace: str, device: str, rate: str | None) -> None:
    if rate is not None:
        shaper = ("root", "handle", "1:", "tbf", "rate", rate, *BUCKET)
        _run(*_within(namespace), "tc", "qdisc", "add", "dev", device, *shaper)


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

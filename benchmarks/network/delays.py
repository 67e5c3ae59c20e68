"""A switch whose packets take their time: for kernels whose shapers have no delay.

    python delays.py DELAY RATE ADDRESS=DESCRIPTOR ...

The hosts' devices are TUN devices, whose other ends are file descriptors of this program. A packet
waits for its host's link, which has a rate, then for the delay, then for the link of the host that
it goes to. Packets have up to 64,000 bytes, so that a program in Python keeps up.
"""

import fcntl
import heapq
import itertools
import os
import selectors
import struct
import sys
import time
from collections.abc import Callable, Sequence

LARGEST = 64_000
"""Bytes of a packet."""
WAITING = 4_000_000
"""Bytes that may wait for a link before packets are dropped, as of the shapers in the kernel."""
_ATTACH, _TUN, _BARE = 0x400454CA, 0x0001, 0x1000


def attach(name: str) -> int:
    """Makes a TUN device in this namespace; the descriptor of its other end."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _ATTACH, struct.pack("16sH", name.encode(), _TUN | _BARE))
    return end


class Switch:
    """Takes packets, and gives them back when they are due.

    Args:
        delay: seconds of a packet on its way.
        rate: of each host's link in each direction, in bytes a second; 0 for no limit.
    """

    def __init__(self, delay: float, rate: float):
        self.delay, self.rate = delay, rate
        self._free: dict[tuple[bool, bytes], float] = {}
        self._order = itertools.count()
        self._due: list[tuple[float, int, bytes, bytes]] = []

    def take(self, source: bytes, packet: bytes, now: float) -> None:
        """A packet of a host, whose receiver is in its header; others than IPv4 are dropped."""
        if packet[0] >> 4 != 4:
            return
        to, took = packet[16:20], len(packet) / self.rate if self.rate else 0.0
        sent = max(self._free.get((False, source), 0.0), now) + took
        if (sent - now) * self.rate > WAITING:
            return
        self._free[False, source] = sent
        arrived = max(self._free.get((True, to), 0.0), sent + self.delay - took) + took
        self._free[True, to] = arrived
        heapq.heappush(self._due, (arrived, next(self._order), to, packet))

    def due(self, now: float) -> list[tuple[bytes, bytes]]:
        """Receivers and packets that have arrived."""
        found = []
        while self._due and self._due[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._due)
            found.append((to, packet))
        return found

    def wait(self, now: float) -> float | None:
        """Seconds until a packet is due; None if none is on its way."""
        return max(self._due[0][0] - now, 0.0) if self._due else None


def serve(
    ends: dict[bytes, int], switch: Switch, clock: Callable[[], float] = time.monotonic
) -> None:
    """Moves packets between the ends, without an end."""
    ready = selectors.DefaultSelector()
    for source, end in ends.items():
        ready.register(end, selectors.EVENT_READ, source)
    while True:
        for key, _ in ready.select(switch.wait(clock())):
            try:
                while True:
                    switch.take(key.data, os.read(key.fd, LARGEST + 1000), clock())
            except BlockingIOError:
                pass
        for to, packet in switch.due(clock()):
            if to in ends:
                os.write(ends[to], packet)


def main(arguments: Sequence[str]) -> None:
    delay, rate, *hosts = arguments
    ends = {}
    for host in hosts:
        address, _, end = host.partition("=")
        ends[bytes(int(part) for part in address.split("."))] = int(end)
    serve(ends, Switch(float(delay), float(rate)))


if __name__ == "__main__":
    main(sys.argv[1:])

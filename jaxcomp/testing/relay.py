"""A TCP relay on the loopback that stands for an internet link."""

import asyncio
import contextlib
import math
import random
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import final

from jaxcomp import checks

BUFFER = 2**20
"""Bytes of a connection that may wait in one direction, beyond those that fill the link."""
UNLIMITED = 2**24
"""Bytes of a connection that may wait in one direction if the link has no rate."""
TURN = 0.002
"""Seconds for which a connection may use the link while others wait."""
PACKET = 1460
"""Bytes that are not divided, however slow the link is."""
WITHIN = 2**20
"""A reset comes before this number of bytes."""
LINGER = struct.pack("ii", 1, 0)
"""Closing sends RST and drops what is not yet sent."""


@final
class Relay:
    """A TCP relay on the loopback that stands for an internet link to a server.

    Clients connect to `("127.0.0.1", relay.port)` in place of the server. Bytes that arrive at time
    `t` leave at `t + delay + jitter · u`, `u` uniform in [0, 1], in their order; many may be in
    flight. At a rate, they first take their turn on the link: connections share each direction in
    turns of 2 ms. The relay runs in a thread of its own until the `with` block ends, which resets
    all connections.

    `resets` is decided for each connection by the seed and the connection's number, in the order
    in which they are accepted. A chosen connection is reset (RST to both ends) once it has passed
    `2^(20 u)` bytes in both directions together, `u` uniform in [0, 1]: the request of a small
    message is as likely to break as a large answer. It is reset at the latest when either end
    closes its direction, in place of the end of the stream.

    Args:
        to: the host (IPv4) and port of the server.
        delay: seconds one way, in each direction.
        jitter: seconds; the largest random addition to `delay`.
        rate: bits per second in each direction, for all connections together; None for no limit;
            or a pair, to the server and to clients.
        resets: the probability that a connection is reset.
        seed: determines the connections that are reset.

    Attributes:
        port: the port to connect to, inside the `with` block.
        up: bytes that were passed to the server so far.
        down: bytes that were passed to clients so far.
        accepted: the number of connections so far.
        broken: the number of connections so far that were reset because of `resets`.

    Raises:
        ValueError: if an argument has a wrong type or is out of range.
        RuntimeError: if a method is called outside the `with` block.

    Note:
        The handshake, packet headers, slow start and loss are not simulated: a connection opens at
        once, and `rate` counts the bytes of the stream. Times are late by about a millisecond, and
        by more on a busy machine; they are never early. A sender blocks when its kernel buffers
        are full and, in that direction of its connection, 1 MiB waits beyond the bytes that fill
        the link (16 MiB in all without a rate). A connection takes two file descriptors; new
        connections wait until some are free.

    Example:
        >>> import socket
        >>> with (
        ...     socket.create_server(("127.0.0.1", 0)) as server,
        ...     Relay(to=server.getsockname(), delay=0.01, rate=1e6) as relay,
        ...     socket.create_connection(("127.0.0.1", relay.port)) as client,
        ... ):
        ...     client.sendall(b"hello")
        ...     connection, _ = server.accept()
        ...     with connection:
        ...         connection.recv(5), relay.up, relay.down
        (b'hello', 5, 0)
    """

    def __init__(
        self,
        *,
        to: tuple[str, int],
        delay: float = 0.0,
        jitter: float = 0.0,
        rate: float | tuple[float | None, float | None] | None = None,
        resets: float = 0.0,
        seed: int = 0,
    ):
        if not isinstance(to, tuple) or len(to) != 2 or not isinstance(to[0], str):
            raise ValueError(
                f"`to` must be a host and a port, such as ('127.0.0.1', 9092), got {to!r}"
            )
        checks.integer("to[1]", to[1], 1, 65535)
        checks.number("delay", delay, 0.0)
        checks.number("jitter", jitter, 0.0)
        rates = rate if isinstance(rate, tuple) and len(rate) == 2 else (rate, rate)
        for one in rates:
            if one is not None:
                checks.positive("rate", one)
        checks.number("resets", resets, 0.0, 1.0)
        checks.integer("seed", seed, 0)
        self._to, self._resets, self._seed = to, resets, seed
        self._links = _Link(delay, jitter, rates[0]), _Link(delay, jitter, rates[1])
        self._tasks: dict[asyncio.Task, _Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refusing = False
        self.port = self.accepted = self.broken = 0

    @property
    def up(self) -> int:
        """Bytes that were passed to the server so far."""
        return self._links[0].passed

    @property
    def down(self) -> int:
        """Bytes that were passed to clients so far."""
        return self._links[1].passed

    def stall(self) -> None:
        """Holds all bytes and ends of streams back; connections stay open, and new ones wait."""
        self._call(lambda: [link.flow.clear() for link in self._links])

    def resume(self) -> None:
        """Ends `stall`: bytes that were in flight arrive at once, others at the rate."""
        self._call(lambda: [link.flow.set() for link in self._links])

    def cut(self) -> None:
        """Resets all open connections; new ones are accepted."""
        self._call(self._cut)

    def refuse(self) -> None:
        """Resets new connections at once, so that connecting or reading fails; open ones stay."""
        self._call(lambda: setattr(self, "_refusing", True))

    def accept(self) -> None:
        """Ends `refuse`."""
        self._call(lambda: setattr(self, "_refusing", False))

    def __enter__(self) -> "Relay":
        if self._loop is not None:
            raise RuntimeError("the Relay is open already: use one Relay for each `with` block")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        for link in self._links:
            link.open()
        self._refusing, self._done = False, asyncio.Event()
        self._loop = loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=[loop], name="jaxcomp relay", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._done.set)
        self._thread.join()
        self._loop, self.port = None, 0

    def _call(self, function: Callable[[], object]) -> None:
        """Runs a function in the relay's thread; waits until it, and what it returns, is done."""
        if self._loop is None:
            raise RuntimeError("the Relay is not open: use `with Relay(...) as relay:`")

        async def run() -> None:
            found = function()
            if isinstance(found, Awaitable):
                await found

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._admit)
        await self._done.wait()
        loop.remove_reader(self._listener)
        await self._cut()
        self._listener.close()

    def _admit(self) -> None:
        """Accepts the connections that wait."""
        # Without two free file descriptors, the loop tries again until there are some.
        with contextlib.suppress(OSError), contextlib.ExitStack() as unused:
            while True:
                server = unused.enter_context(socket.socket())
                client, _ = self._listener.accept()
                if self._refusing:
                    _close(client, reset=True)
                    continue
                unused.pop_all()
                connection = _Connection(client, server, self._links, self._fate(self.accepted))
                self.accepted += 1
                task = asyncio.get_running_loop().create_task(connection.run(self._to))
                self._tasks[task] = connection
                # Not in a `finally`: a task that is cancelled before it starts would skip it.
                task.add_done_callback(self._end)

    def _fate(self, number: int) -> "_Fate":
        draw = random.Random(f"{self._seed} {number}")
        doomed = draw.random() < self._resets
        return _Fate(doomed, int(WITHIN ** draw.random()) if doomed else sys.maxsize, draw)

    def _end(self, task: asyncio.Task) -> None:
        connection = self._tasks.pop(task)
        self.broken += connection.fate.came
        connection.close()

    def _cut(self) -> Awaitable:
        self._admit()  # Their clients are connected already.
        for task in self._tasks:
            task.cancel()
        return asyncio.gather(*self._tasks, return_exceptions=True)


class _Link:
    """One direction of the relay, with a clock that says when the link is free."""

    def __init__(self, delay: float, jitter: float, rate: float | None):
        speed = math.inf if rate is None else rate / 8
        self.delay, self.jitter, self.pace = delay, jitter, 1 / speed
        self.turn = int(min(max(PACKET, TURN * speed), 2**16))
        self.most = UNLIMITED if rate is None else int(speed * (delay + jitter)) + BUFFER
        self.passed = 0

    def open(self) -> None:
        """Makes what belongs to one event loop."""
        self.lock, self.flow = asyncio.Lock(), asyncio.Event()
        self.flow.set()
        self.free, self.users = 0.0, 0

    async def transmit(self, size: int, backlog: bool) -> None:
        """Waits until this many bytes are on the link; `backlog` if they did not just arrive."""
        time = asyncio.get_running_loop().time
        # Sleeps are too long. So a backlog starts when the clock says, not when a sleep ends.
        if not (backlog or self.users):
            self.free = max(self.free, time())
        self.users += 1
        try:
            async with self.lock:  # First come, first served.
                if not self.flow.is_set():
                    await self.flow.wait()
                    self.free = max(self.free, time())
                self.free += size * self.pace
                await asyncio.sleep(max(0.0, self.free - time()))
        finally:
            self.users -= 1


class _Fate:
    """The random draws of a connection: its reset, after `left` bytes, and its jitter."""

    def __init__(self, doomed: bool, left: int, draw: random.Random):
        self.doomed, self.left, self.draw = doomed, left, draw
        self.came = False

    def strike(self) -> None:
        """Resets the connection."""
        self.came = True
        raise ConnectionResetError


class _Way:
    """One direction of a connection: a queue of bytes with the times at which they leave."""

    back: "_Way"

    def __init__(self, link: _Link, source: socket.socket, target: socket.socket, fate: _Fate):
        self.link, self.source, self.target, self.fate = link, source, target, fate
        self.queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self.room = asyncio.Event()
        self.room.set()
        self.flying, self.backlog = 0, False
        self.ended = self.broken = False

    async def read(self) -> None:
        """Queues all bytes, then `b""` at the end of the stream, or None after a reset."""
        loop, link = asyncio.get_running_loop(), self.link
        while True:
            data = await self._receive()
            size = len(data or b"")
            await link.transmit(size, self.backlog)
            self.backlog = True
            due = loop.time() + link.delay + link.jitter * self.fate.draw.random()
            self.queue.put_nowait((due, data))
            self.flying += size
            if not data:
                self.ended = True
                return
            while self.flying >= link.most:
                self.backlog = False
                self.room.clear()
                await self.room.wait()

    async def _receive(self) -> bytes | None:
        try:
            try:
                data = self.source.recv(self.link.turn)
            except BlockingIOError:
                self.backlog = False
                loop = asyncio.get_running_loop()
                data = await loop.sock_recv(self.source, self.link.turn)
        except OSError:
            return None
        return None if self.broken and not data else data

    async def write(self) -> None:
        """Passes bytes on when they are due."""
        loop, fate = asyncio.get_running_loop(), self.fate
        while True:
            due, data = await self.queue.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            await self.link.flow.wait()
            if data is None:
                raise ConnectionResetError
            if fate.left == 0 or (fate.doomed and not data):
                fate.strike()
            piece = data[: fate.left]
            fate.left -= len(piece)
            if not await self._send(piece) or not data:
                return
            if fate.left == 0:
                fate.strike()
            self.flying -= len(data)
            self.room.set()

    async def _send(self, data: bytes) -> bool:
        """Passes bytes, or the end of the stream, to the target; False if it is reset."""
        self.link.passed += len(data)  # Before they arrive, so that their receiver is right.
        try:
            if data:
                await asyncio.get_running_loop().sock_sendall(self.target, data)
            else:
                self.target.shutdown(socket.SHUT_WR)
        except OSError:
            # The bytes that the target sent before its reset arrive first, if they are read.
            if self.back.ended or self.broken or not self.back.room.is_set():
                raise
            self.back.broken = True
            return False
        return True


class _Connection:
    """A client's connection and the one that goes on to the server."""

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        links: tuple[_Link, _Link],
        fate: _Fate,
    ):
        self.sockets, self.links, self.fate = (client, server), links, fate
        self.complete = False

    async def run(self, to: tuple[str, int]) -> None:
        """Passes both streams on until both end, or either is reset."""
        (up, down), (client, server) = self.links, self.sockets
        try:
            await up.flow.wait()
            for side in self.sockets:
                side.setblocking(False)
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(server, to)
            there, back = _Way(up, client, server, self.fate), _Way(down, server, client, self.fate)
            there.back, back.back = back, there
            async with asyncio.TaskGroup() as group:
                for way in (there, back):
                    group.create_task(way.read())
                    group.create_task(way.write())
            self.complete = True
        except* OSError:
            pass  # The server refuses, an end resets its connection, or the fate does.

    def close(self) -> None:
        """Closes both sockets; resets them unless both streams came to their end."""
        for side in self.sockets:
            _close(side, reset=not self.complete)


def _close(side: socket.socket, reset: bool) -> None:
    if reset:
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    side.close()

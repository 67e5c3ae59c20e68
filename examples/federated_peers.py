"""The connections of `federated_socket.py`, the program to run: bounded in time and in bytes.

A connection first proves which client it is: it answers the server's random challenge with a keyed
hash, so that a stranger takes no client's place and an old answer is of no use. Then the server
sends a model in every round, and the client sends one message back. A connection that is late,
slow, too long or wrong is cut, and its place is free for a new connection with the same key.
"""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping
from typing import NamedTuple

CHALLENGE = 16
HELLO = struct.Struct("<I32s")
"""Which client this is, and the proof."""
HEADER = struct.Struct("<QI")
"""Bytes of the message that follows, and the round that it belongs to."""
REFUSED = (OSError, EOFError, ValueError)
"""Errors of one connection, which end only this connection: `TimeoutError` is an `OSError`,
`asyncio.IncompleteReadError` an `EOFError`, and `jaxcomp.MessageError` a `ValueError`."""


class Bounds(NamedTuple):
    """The limits of a server for each connection.

    Attributes:
        hello: seconds to prove which client it is.
        pause: seconds between two parts of a message that has begun.
        answer: seconds for a whole round: to take the model, train and answer.
        unproven: connections that may be open before they have proven anything; one more cuts the
            oldest.
    """

    hello: float = 5.0
    pause: float = 5.0
    answer: float = 60.0
    unproven: int = 16


class Peer:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    async def send(self, round_: int, data: bytes) -> None:
        self.writer.write(HEADER.pack(len(data), round_) + data)
        await self.writer.drain()

    async def receive(self, limit: int, pause: float) -> tuple[int, bytes]:
        """The round and the bytes of a message: at most `limit` bytes, none of them late."""
        size, round_ = HEADER.unpack(await self.reader.readexactly(HEADER.size))
        if size > limit:
            raise ValueError(f"it announced {size:,} bytes, of at most {limit:,}")
        data = bytearray()
        while len(data) < size:
            async with asyncio.timeout(pause):
                part = await self.reader.read(size - len(data))
            if not part:
                raise EOFError(f"it left after {len(data):,} of {size:,} bytes")
            data += part
        return round_, bytes(data)

    def cut(self) -> None:
        """Ends the connection at once: a peer that does not read must not keep our buffers."""
        self.writer.transport.abort()

    async def close(self) -> None:
        """Ends the connection after everything is sent."""
        with contextlib.suppress(OSError):
            self.writer.close()
            await self.writer.wait_closed()


def proof(key: bytes, challenge: bytes) -> bytes:
    return hashlib.blake2b(challenge, key=key, digest_size=32, person=b"hello").digest()


async def join(port: int, number: int, key: bytes) -> Peer:
    """A client's connection, with the proof that it has the key."""
    peer = Peer(*await asyncio.open_connection("127.0.0.1", port))
    challenge = await peer.reader.readexactly(CHALLENGE)
    peer.writer.write(HELLO.pack(number, proof(key, challenge)))
    return peer


class Door:
    """Accepts clients at any time; slow or hostile connections cannot delay the others.

    Attributes:
        peers: the connected clients by number.
    """

    def __init__(self, keys: Mapping[int, bytes], bounds: Bounds):
        self.keys, self.bounds = keys, bounds
        self.peers: dict[int, Peer] = {}
        self._unproven: list[Peer] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Lets one connection in, or cuts it; `asyncio.start_server` calls this for each."""
        # A task of ours, for `close` to wait for: asyncio would report its end as an error.
        task = asyncio.create_task(self._let_in(Peer(reader, writer)))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def close(self) -> None:
        """Ends every connection, also of those who have not yet proven who they are."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for peer in self.peers.values():
            peer.cut()

    async def _let_in(self, peer: Peer) -> None:
        self._unproven.append(peer)
        if len(self._unproven) > self.bounds.unproven:
            self._unproven.pop(0).cut()
        try:
            async with asyncio.timeout(self.bounds.hello):
                number = await self._ask_who(peer)
        except REFUSED as error:
            peer.cut()
            print(f"       a stranger is refused: {why(error)}", flush=True)
            return
        except asyncio.CancelledError:
            peer.cut()
            print("       a stranger is refused: it had proven nothing at the end", flush=True)
            raise
        finally:
            if peer in self._unproven:
                self._unproven.remove(peer)
        if number in self.peers:  # It has the key, so it is the same client, which came back.
            self.peers[number].cut()
        self.peers[number] = peer
        self._changed.set()

    async def _ask_who(self, peer: Peer) -> int:
        challenge = secrets.token_bytes(CHALLENGE)
        peer.writer.write(challenge)
        number, proven = HELLO.unpack(await peer.reader.readexactly(HELLO.size))
        key = self.keys.get(number)
        if key is None or not hmac.compare_digest(proven, proof(key, challenge)):
            raise ValueError("it does not have the key of a client")
        return number

    async def wait_for(self, count: int, seconds: float) -> None:
        """Returns once so many clients are here, or after so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.peers) < count:
                    self._changed.clear()
                    await self._changed.wait()

    def refuse(self, number: int, peer: Peer, error: Exception) -> None:
        """Cuts a client; a new connection with its key may take its place."""
        peer.cut()
        if self.peers.get(number) is peer:
            del self.peers[number]
        print(f"       client {number} is refused: {why(error)}", flush=True)

    async def ask(self, round_: int, models: Mapping[int, bytes], limit: int) -> dict[int, bytes]:
        """Sends these clients their models, all at once; returns the answers that came in time."""
        answers = {}

        async def one(number: int, peer: Peer) -> None:
            try:
                async with asyncio.timeout(self.bounds.answer):
                    await peer.send(round_, models[number])
                    answered, data = await peer.receive(limit, self.bounds.pause)
                if answered != round_:
                    raise ValueError(f"it answered round {answered}, not {round_}")
                answers[number] = data
            except REFUSED as error:
                self.refuse(number, peer, error)

        asked = [(number, self.peers[number]) for number in models if number in self.peers]
        await asyncio.gather(*(one(number, peer) for number, peer in asked))
        return dict(sorted(answers.items()))


def why(error: Exception) -> str:
    return "it was too slow" if isinstance(error, TimeoutError) else str(error) or repr(error)

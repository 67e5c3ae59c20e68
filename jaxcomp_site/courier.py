"""The connection between the two processes of a site: Flower's for a message, and the one that
stays up.

Both are on one machine. The site's process listens on the loopback, and writes its port and a
secret to a file that only its user can read. Both sides prove that they know the secret. While the
site works it says every second that it is there, so a site that is stopped is not waited for.
"""

import contextlib
import hmac
import io
import json
import logging
import pathlib
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from jaxcomp_files import durable

PATIENCE = 600.0
"""Seconds for which a message waits for a process that is not up, such as one that restarts."""

_AGAIN = 0.2
_GREETING = 10.0
"""Seconds in which a connection must prove that it knows the secret."""
_SENDING = 600.0
"""Seconds in which a message must have passed between two processes of one machine."""
_ENDS = 5
"""How often a process may end over one message, before the message is given up."""
_BEAT = 1.0
"""Seconds between two signs of life."""
_ALIVE, _GOOD, _BAD = b".", b"+", b"!"
_NONCE = 32
_LENGTH = struct.Struct("<Q")

log = logging.getLogger("jaxcomp.site")


class SiteError(RuntimeError):
    """The site's process could not do what a message asks for."""


def ask(
    folder: pathlib.Path,
    content: bytes | Callable[[], Iterable[bytes]],
    patience: float = PATIENCE,
) -> bytes:
    """The answer of the site's process.

    A process that ends while it works is asked again when it is back: it answers the same message
    with the same answer.

    Args:
        folder: the site's folder.
        content: the message, or what gives its parts, each time that it is sent.
        patience: the seconds for which a process may be away, or be there and give no sign of life.

    Raises:
        SiteError: for what the process could not do, or if it is away for longer, or ends again and
            again over this message.
    """
    seen, ends = time.monotonic(), 0
    while True:
        left, works = max(seen + patience - time.monotonic(), _AGAIN), False
        try:
            known = json.loads((folder / "address").read_text())
            with _connected(known["port"], bytes.fromhex(known["key"]), left) as line:
                seen = time.monotonic()
                line.settimeout(min(_SENDING, patience))
                _send(line, content)
                works = True
                line.settimeout(patience)
                while (kind := _read(line, 1)) == _ALIVE:
                    seen = time.monotonic()
                answer = _receive(line)
            break
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            ends += works and not isinstance(error, TimeoutError)
            if ends == _ENDS:
                raise SiteError(
                    f"the process of the site in {folder} has ended {ends} times while it worked "
                    "for this message: its log says why"
                ) from error
            if time.monotonic() - seen >= patience:
                silent = isinstance(error, TimeoutError)  # It is there, and stopped or stuck.
                raise SiteError(
                    f"{'the' if silent else 'no'} process of the site in {folder} has "
                    f"{'said nothing' if silent else 'answered'} for {patience:g} s ({error}): "
                    "start it with jaxcomp.adapters.flower.Site(...).serve()"
                ) from error
            time.sleep(min(_AGAIN, patience))
    if kind == _BAD:
        raise SiteError(f"the site in {folder}: {answer.decode()}")
    return answer


def serve(
    folder: pathlib.Path,
    answer: Callable[[bytes], bytes],
    until: Callable[[], bool],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Answers messages one after another, until `until()` is true after one of them.

    A connection that does not prove that it knows the secret, or sends nothing, holds nobody up.

    Args:
        folder: the site's folder.
        answer: from a message to its answer; an error is logged, and told to who asked.
        until: whether to return.
        then: called after each answer is sent.

    Raises:
        ValueError: if the folder has an `address` that somebody else wrote.
    """
    key, asked = secrets.token_bytes(32), queue.SimpleQueue[_Asked]()
    with socket.create_server(("127.0.0.1", 0)) as listener, _ending() as ended:
        _announce(folder, listener.getsockname()[1], key)
        listener.settimeout(_BEAT)  # A socket that is closed does not wake who waits for it.
        given = (listener, key, asked, ended)
        threading.Thread(target=_listen, args=given, daemon=True).start()
        while not until():
            one = asked.get()
            one.answer(reply(answer, one.content))
            then()


def reply(answer: Callable[[bytes], bytes], content: bytes) -> tuple[bytes, bytes]:
    """The answer to a message; an error is logged, and told to who asked."""
    try:
        return _GOOD, answer(content)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        expected = isinstance(error, ValueError | OSError)
        log.warning("a message is refused: %s", said, exc_info=None if expected else error)
        return _BAD, said.encode()


class _Asked:
    """A message, whose answer a thread of its own sends.

    Attributes:
        content: the message.
    """

    def __init__(self, line: socket.socket, content: bytes, ended: threading.Event):
        self.content = content
        self._line, self._ended = line, ended
        self._said: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
        self._sent = threading.Event()

    def answer(self, said: tuple[bytes, bytes]) -> None:
        """Sends the answer. Whoever asked may be gone, or stopped; then it will ask again."""
        self._said.put(said)
        self._sent.wait(_GREETING)

    def send(self) -> None:
        """Says that the site is there until there is an answer, and sends it."""
        try:
            while not self._ended.is_set():
                with contextlib.suppress(queue.Empty):
                    kind, said = self._said.get(timeout=_BEAT)
                    self._line.sendall(kind)
                    _send(self._line, said)
                    return
                self._line.sendall(_ALIVE)
        finally:
            self._sent.set()


@contextlib.contextmanager
def _ending() -> Iterator[threading.Event]:
    ended = threading.Event()
    try:
        yield ended
    finally:
        ended.set()


def _listen(
    listener: socket.socket,
    key: bytes,
    asked: "queue.SimpleQueue[_Asked]",
    ended: threading.Event,
) -> None:
    """Gives each connection a thread, so that none waits for another."""

    def hear(line: socket.socket) -> None:
        with line, contextlib.suppress(OSError, EOFError):
            _greet(line, key, b"site", b"app", _GREETING)
            line.settimeout(_SENDING)
            one = _Asked(line, _receive(line), ended)
            asked.put(one)
            one.send()

    while not ended.is_set():
        try:
            line = listener.accept()[0]
        except TimeoutError:
            continue
        except OSError:  # Whoever came is gone, or no more files can be open.
            time.sleep(_AGAIN)
            continue
        threading.Thread(target=hear, args=(line,), daemon=True).start()


@contextlib.contextmanager
def _connected(port: int, key: bytes, seconds: float) -> Iterator[socket.socket]:
    seconds = min(seconds, _GREETING)
    with socket.create_connection(("127.0.0.1", port), seconds) as line:
        _greet(line, key, b"app", b"site", seconds)
        yield line


def _greet(line: socket.socket, key: bytes, own: bytes, other: bytes, seconds: float) -> None:
    """Proves to the other side that this one knows the secret, and the other way round."""
    until = time.monotonic() + seconds
    nonce = secrets.token_bytes(_NONCE)
    line.settimeout(seconds)
    line.sendall(nonce)
    theirs = _read(line, _NONCE, until)
    line.sendall(hmac.digest(key, own + theirs + nonce, "sha256"))
    if not hmac.compare_digest(
        _read(line, _NONCE, until), hmac.digest(key, other + nonce + theirs, "sha256")
    ):
        raise ConnectionError("it does not know the secret")


def _send(line: socket.socket, content: bytes | Callable[[], Iterable[bytes]]) -> None:
    """Sends the parts, each with its length, and a length of 0 at the end."""
    for part in [content] if isinstance(content, bytes) else content():
        if part:
            line.sendall(_LENGTH.pack(len(part)))
            line.sendall(part)
    line.sendall(_LENGTH.pack(0))


def _receive(line: socket.socket) -> bytes:
    """All parts as one; the buffer is not copied."""
    found = io.BytesIO()
    while size := _LENGTH.unpack(_read(line, _LENGTH.size))[0]:
        while size:
            size -= found.write(_part(line, size))
    return found.getvalue()


def _read(line: socket.socket, size: int, until: float | None = None) -> bytes:
    """So many bytes, few; in all until this moment, or each part in the time of the connection."""
    found = b""
    while len(found) < size:
        if until is not None:
            line.settimeout(max(until - time.monotonic(), 0.001))
        found += _part(line, size - len(found))
    return found


def _part(line: socket.socket, most: int) -> bytes:
    """The next bytes, at most so many and at least one."""
    part = line.recv(min(most, 2**20))
    if not part:
        raise EOFError("the connection has ended")
    return part


def _announce(folder: pathlib.Path, port: int, key: bytes) -> None:
    durable.make_folder(folder)
    path = folder / "address"
    if path.exists():
        try:
            former = json.loads(path.read_text()).keys()
        except (OSError, ValueError, AttributeError):
            former = set()
        if former != {"port", "key"}:
            raise ValueError(f"`folder` must be a site's own, got one with another file {path}")
    durable.replace(path, json.dumps({"port": port, "key": key.hex()}).encode())

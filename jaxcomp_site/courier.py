"""The connection between the two processes of a site: Flower's for a message, and the one that
stays up.

Both are on one machine. The site's process listens on the loopback, and writes its port and a
secret to a file that only its user can read.
"""

import contextlib
import json
import os
import pathlib
import secrets
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener

PATIENCE = 600.0
"""Seconds for which a message waits for a process that is not up, such as one that restarts."""

_AGAIN = 0.2
_GOOD, _BAD = b"+", b"!"


class SiteError(RuntimeError):
    """The site's process could not do what a message asks for."""


def ask(folder: pathlib.Path, content: bytes, patience: float = PATIENCE) -> bytes:
    """The answer of the site's process.

    A process that ends while it works is asked again when it is back: it answers the same message
    with the same answer.

    Args:
        folder: the site's folder.
        content: the message.
        patience: the seconds for which a process may be away.

    Raises:
        SiteError: for what the process could not do, or if it is away for longer.
    """
    seen = time.monotonic()
    while True:
        try:
            known = json.loads((folder / "address").read_text())
            address = ("127.0.0.1", known["port"])
            with Client(address, authkey=bytes.fromhex(known["key"])) as line:
                line.send_bytes(content)
                answer = line.recv_bytes()
            break
        except (OSError, EOFError, AuthenticationError, ValueError, KeyError) as error:
            if time.monotonic() - seen > patience:
                raise SiteError(
                    f"no process of the site in {folder} has answered for {patience:g} s ({error}):"
                    " start it with jaxcomp.adapters.flower.Site(...).serve()"
                ) from error
            time.sleep(_AGAIN)
    if answer[:1] == _BAD:
        raise SiteError(answer[1:].decode())
    return answer[1:]


def serve(
    folder: pathlib.Path,
    answer: Callable[[bytes], bytes],
    until: Callable[[], bool],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Answers messages one after another, until `until()` is true after one of them.

    Args:
        folder: the site's folder.
        answer: from a message to its answer; a `ValueError` is told to who asked.
        until: whether to return.
        then: called after each answer is sent.
    """
    key = secrets.token_bytes(32)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        _announce(folder, int(listener.address[1]), key)
        while not until():
            try:
                line = listener.accept()
            except (OSError, EOFError, AuthenticationError):  # Somebody else, or one that is gone.
                continue
            with line, contextlib.suppress(OSError, EOFError):
                content = line.recv_bytes()
                try:
                    said = _GOOD + answer(content)
                except ValueError as error:
                    said = _BAD + str(error).encode()
                # Whoever asked may be gone; then the answer is kept for the next one.
                line.send_bytes(said)
            then()


def _announce(folder: pathlib.Path, port: int, key: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "address.new"
    fresh.touch(mode=0o600)
    os.chmod(fresh, 0o600)
    fresh.write_text(json.dumps({"port": port, "key": key.hex()}))
    fresh.replace(folder / "address")

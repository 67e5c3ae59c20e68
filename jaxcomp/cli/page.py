"""The page of `jaxcomp watch`, served on the loopback by the standard library.

Its files are those of `watch_page`. It has no inline scripts and takes nothing from elsewhere; the
numbers are JSON from an address of their own, so that no text of a site is ever part of the page.
"""

import errno
import json
import pathlib
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jaxcomp.telemetry.round_lines import plain
from jaxcomp.telemetry.rounds import Rounds

LOOPBACK = "127.0.0.1"
_FOLDER = pathlib.Path(__file__).with_name("watch_page")
_FILES = {
    "/": ("watch.html", "text/html"),
    "/watch.css": ("watch.css", "text/css"),
    "/watch.js": ("watch.js", "text/javascript"),
    "/chart.js": ("chart.js", "text/javascript"),
    "/text.js": ("text.js", "text/javascript"),
}
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Hosts of the loopback, with any port: that of a tunnel may be another one."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Page(ThreadingHTTPServer):
    """A server of the page of one training.

    Args:
        rounds: the rounds of the training.
        port: the port; 0 for any free one.

    Raises:
        ValueError: if the port is taken.
    """

    daemon_threads = True

    def __init__(self, rounds: Rounds, port: int = 0):
        self._rounds, self._one_at_a_time = rounds, threading.Lock()
        self.files = {path: (_FOLDER / name).read_bytes() for path, (name, _) in _FILES.items()}
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ValueError(
                f"--port must be one that is free, or 0 for any, got {port}: {error.strerror}"
            ) from None

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def news(self, epoch: int, after: int) -> dict[str, Any]:
        """Reads on, and returns the rows that a page with so many of an epoch lacks."""
        with self._one_at_a_time:
            self._rounds.read()
            found = self._rounds.news(epoch, after, time.time())
        return {"folder": plain(self._rounds.folder), **found}


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of a few paths, for a host of the loopback."""

    server: Page
    server_version, sys_version = "jaxcomp", ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # Seconds for which a connection may be idle.

    def parse_request(self) -> bool:
        """Refuses every method but GET, whatever its name."""
        if not super().parse_request():
            return False
        if self.command != "GET":
            self.close_connection = True  # The body of the request is not read.
            self._say(405, "only GET is answered", {"Allow": "GET"})
        return self.command == "GET"

    def do_GET(self) -> None:
        """Answers a request."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].strip()):
            self._say(403, "open the page by the address that the command prints")
            return
        path, _, query = self.path.partition("?")
        if path in _FILES:
            self._send(200, _FILES[path][1], self.server.files[path])
        elif path == "/rounds":
            self._rounds(query)
        else:
            self._say(404, "there is no such page")

    def _rounds(self, query: str) -> None:
        fields = urllib.parse.parse_qs(query)
        given = [fields.get(name, ["0"])[-1] for name in ("epoch", "after")]
        if not all(re.fullmatch(r"[0-9]{1,15}", text) for text in given):
            self._say(400, "epoch and after must be whole numbers")
            return
        try:
            found = self.server.news(*map(int, given))
        except ValueError as error:  # The file is gone.
            self._say(503, str(error))
            return
        text = json.dumps(found, separators=(",", ":"), allow_nan=False)
        self._send(200, "application/json", text.encode())

    def _say(self, status: int, text: str, more: dict[str, str] | None = None) -> None:
        self._send(status, "text/plain", f"{text}\n".encode(), more)

    def _send(
        self, status: int, kind: str, body: bytes, more: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: the page asks every few seconds."""

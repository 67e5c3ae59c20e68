"""A browser without a window, driven through its debugging pipe."""

import base64
import json
import os
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def found():
    """The path of a browser; None without one, or without the shell that starts it."""
    if not shutil.which("bash"):
        return None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page at a time.

    Attributes:
        faults: exceptions, and lines of the page's log, such as violations of its policy.
    """

    def __init__(self, folder):
        theirs, self._out = os.pipe()
        self._in, ours = os.pipe()
        start = f'exec "$@" 3<&{theirs} 4>&{ours}'
        command = [found(), *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", start, "bash", *command],
            pass_fds=(theirs, ours),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(ours)
        self._rest, self._number, self._session, self.faults = b"", 0, None, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, url, width=1366, height=900, dark=False):
        """Opens a page of this size, in light or dark."""
        self._session, self.faults = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        given = {"targetId": target, "flatten": True}
        self._session = self.call("Target.attachToTarget", **given)["sessionId"]
        for name in ("Runtime.enable", "Log.enable", "Page.enable"):
            self.call(name)
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def resize(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, expression):
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression, seconds=20.0):
        """Returns the value of an expression once it is true."""
        until = time.monotonic() + seconds
        while not (value := self.run(expression)):
            if time.monotonic() > until:
                raise TimeoutError(f"{expression}: {self.faults}")
            time.sleep(0.05)
        return value

    def picture(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method, **params):
        """Calls the browser, and keeps what it says in the meantime."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(said["error"])
                return said["result"]
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.faults.append(said["params"])

    def _read(self):
        while b"\0" not in self._rest:
            got = os.read(self._in, 1 << 20)
            if not got:
                raise RuntimeError("the browser has ended")
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

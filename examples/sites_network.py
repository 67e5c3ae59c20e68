"""A server and sites on this machine, each site behind a link of its own: for `sites.py`.

The SuperLink is Flower's, with TLS and keys for its nodes. Each site has a node and a process that
stays up. Between a node and the SuperLink is a relay with the delay and the rate of an internet
link.
"""

import contextlib
import datetime
import ipaddress
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from typing import Any

import federated_flower
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from jaxcomp.testing import Relay

HERE = pathlib.Path(__file__).parent
APP = HERE / "flower_sites"
MONTH = 30 * 86_400.0
PEM, NO_PASSWORD = serialization.Encoding.PEM, serialization.NoEncryption()


class Network:
    """A SuperLink, nodes behind relays, and the processes of sites.

    Args:
        folder: where everything is stored: keys, logs, the server's checkpoint, each site's state.
        config: the settings of the app, which replace those in its `pyproject.toml`.
        sites: how many sites have a key.
        link: the settings of every relay, such as `{"delay": 0.025, "rate": 10e6}`.
        resident: whether the process of a site stays up; else each message starts a new one.
        node: whether a site's node is `jaxcomp_site.node`; else it is Flower's SuperNode.
        lifetime: seconds from now for which the SuperLink's certificate is valid.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        config: dict[str, Any],
        sites: int,
        link: Any,
        *,
        resident: bool = True,
        node: bool = True,
        lifetime: float = MONTH,
    ):
        self.folder, self.sites, self._link, self._resident = folder, sites, link, resident
        self._lifetime = lifetime
        self._node: list[Any] = [federated_flower.BIN / "flower-supernode"]
        if node and resident:
            self._node = [sys.executable, "-m", "jaxcomp_site.node"]
        own = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        self._config = {**own, **config, "sites": sites, "folder": str(folder / "server")}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._nodes: set[int] = set()
        self.relays: dict[int, Relay] = {}
        (self._port,) = federated_flower.free_ports(1)
        self._environment = {
            **os.environ,
            "PATH": f"{federated_flower.BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(
                map(str, (HERE, APP, HERE.parent, HERE.parent / "benchmarks"))
            ),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            # Memory that a process gives back is the system's again: arrays come and go each round.
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "JAX_PLATFORMS": "cpu",
            # Processes share a few cores; each computes on one of them.
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        }

    def __enter__(self) -> "Network":
        for name in ("flwr", "server", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "task.json").write_text(json.dumps(self._config))
        certificates(self.folder, self._lifetime)
        for number in range(self.sites):
            key_pair(self.folder / f"node{number}")
        connection = (
            f'address = "127.0.0.1:{self._port}"\nroot-certificates = "{self.folder / "ca.pem"}"\n'
        )
        (self.folder / "flwr" / "config.toml").write_text(f"[superlink.here]\n{connection}")
        shutil.copytree(APP, self.folder / "app", dirs_exist_ok=True)
        if not self._resident:
            file = self.folder / "app" / "pyproject.toml"
            text = file.read_text().replace("jaxcomp_site.app:app", "byte_sites.client:app")
            file.write_text(text)
        self.start_link()
        for number in range(self.sites):
            self.flwr("supernode", "register", self.folder / f"node{number}.pub", "here")
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._running):
            self.kill(name)
        for relay in self.relays.values():
            relay.__exit__(None, None, None)

    def start_link(self) -> None:
        """Starts the SuperLink, whose database has its nodes, or the one that was killed again."""
        command = [federated_flower.BIN / "flower-superlink", "--enable-supernode-auth"]
        command += ["--ssl-ca-certfile", self.folder / "ca.pem"]
        command += ["--ssl-certfile", self.folder / "server.pem"]
        command += ["--ssl-keyfile", self.folder / "server.key"]
        command += ["--database", self.folder / "link.db", "--port", self._port]
        self._start("link", [*command, "--disable-runtime-dependency-installation"])
        federated_flower.wait_for(self._port, self.folder / "logs" / "link.log")

    def start_server(self) -> None:
        """Starts the run of the server's app, which goes on from its checkpoint if there is one."""
        given = " ".join(f"{name}={json.dumps(value)}" for name, value in self._config.items())
        shown = self.flwr("run", self.folder / "app", "here", "--run-config", given)
        self.say(f"server: {shown.strip().splitlines()[-1] if shown.strip() else 'started'}")

    def kill_server(self) -> None:
        """Kills the SuperLink and the server's app."""
        self.kill("link")
        # The app is in a process group of its own, and could outlive the SuperLink for a minute.
        subprocess.run(["pkill", "-9", "-f", f"api-address 127.0.0.1:{self._port}"], check=False)

    def start_node(self, number: int) -> None:
        """Starts a site's node, behind its relay."""
        if number not in self.relays:
            relay = Relay(to=("127.0.0.1", self._port), seed=number, **self._link)
            self.relays[number] = relay.__enter__()
        self._nodes.add(number)
        (own,) = federated_flower.free_ports(1)
        site = json.dumps(str(self.folder / f"site{number}"))
        command = [*self._node, "--port", own]
        command += ["--superlink", f"127.0.0.1:{self.relays[number].port}"]
        command += ["--root-certificates", self.folder / "ca.pem"]
        command += ["--auth-supernode-private-key", self.folder / f"node{number}"]
        self._start(f"node{number}", [*command, "--node-config", f"site={site}"])

    def start_site(self, number: int) -> None:
        """Starts the process of a site, which goes on from its folder if it has been there."""
        command = [sys.executable, "-m", "byte_sites.site", "--task", self.folder / "task.json"]
        self._start(f"site{number}", [*command, "--folder", self.folder / f"site{number}"])

    def join(self, *numbers: int) -> None:
        """Starts sites: the process and the node of each."""
        for number in numbers:
            if self._resident:
                self.start_site(number)
            self.start_node(number)

    def kill_site(self, number: int) -> None:
        """Kills all of a site."""
        self._nodes.discard(number)
        self.kill(f"node{number}")
        self.kill(f"site{number}")

    def kill(self, name: str) -> None:
        """Ends a process and all that it has started, as by `kill -9`."""
        process = self._running.pop(name, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def alive(self, name: str) -> bool:
        """Whether this process runs."""
        return name in self._running and self._running[name].poll() is None

    def pid(self, name: str) -> int:
        """The number of a process."""
        return self._running[name].pid

    @property
    def server(self) -> int | None:
        """The number of the process of the server's app; None if it does not run."""
        command = ["pgrep", "-f", f"flwr-serverapp.*127.0.0.1:{self._port}"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
        return int(found[0]) if found else None

    def rounds(self) -> list[dict[str, Any]]:
        """The report of the server so far, a record for each round."""
        file = self.folder / "server" / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def ended(self) -> bool:
        """Whether the server has taken all rounds."""
        return (self.folder / "server" / "ended").exists()

    @property
    def failed(self) -> bool:
        """Whether the server's app has raised an error."""
        file = self.folder / "server" / "server.log"
        return file.exists() and "An unhandled exception" in file.read_text(errors="replace")

    def wait(self, done: Any, seconds: float) -> None:
        """Returns once `done()` is true.

        A node that has ended is started again, as by a supervisor: for a minute after it was
        killed, the SuperLink takes its successor for a second one, and refuses it.
        """
        until = time.monotonic() + seconds
        while not done():
            if time.monotonic() > until:
                raise TimeoutError(f"not done after {seconds:g} s:\n{self.logs()}")
            if self.failed:
                raise RuntimeError(f"the server's app has failed:\n{self.logs()}")
            for number in self._nodes:
                if not self.alive(f"node{number}"):
                    self.start_node(number)
            time.sleep(0.5)

    def flwr(self, *arguments: Any) -> str:
        """Runs a command of Flower."""
        command = [str(federated_flower.BIN / "flwr"), *map(str, arguments)]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def say(self, text: str) -> None:
        """Adds a line to the log of events."""
        with (self.folder / "logs" / "events.log").open("a") as file:
            file.write(f"{time.time():.3f} {text}\n")

    def logs(self, last: int = 2000) -> str:
        """The end of every log."""
        files = [*(self.folder / "logs").glob("*.log"), self.folder / "server" / "server.log"]
        texts = [(file, file.read_text(errors="replace")) for file in files if file.exists()]
        return "\n".join(f"== {file.name}\n{text[-last:]}" for file, text in texts)

    def _start(self, name: str, command: list[Any]) -> None:
        log = (self.folder / "logs" / f"{name}.log").open("ab")
        self._running[name] = subprocess.Popen(
            [str(part) for part in command],
            env=self._environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()


def certificates(folder: pathlib.Path, lifetime: float = MONTH) -> None:
    """An authority of our own, unless the folder has one, and the certificate of a server here.

    Args:
        folder: where they are.
        lifetime: seconds for which the certificate of the server is valid.
    """
    form = serialization.PrivateFormat.TraditionalOpenSSL
    key, own = ec.generate_private_key(ec.SECP384R1()), folder / "ca.key"
    if not own.exists():
        new = ec.generate_private_key(ec.SECP384R1())
        own.write_bytes(new.private_bytes(PEM, form, NO_PASSWORD))
    authority: Any = serialization.load_pem_private_key(own.read_bytes(), None)
    ours = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sites")])
    host = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])

    def signed(name: x509.Name, public: Any, extension: Any, seconds: float) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        made = x509.CertificateBuilder().subject_name(name).issuer_name(ours).public_key(public)
        made = made.serial_number(x509.random_serial_number())
        made = made.not_valid_before(now - datetime.timedelta(days=1))
        made = made.not_valid_after(now + datetime.timedelta(seconds=seconds))
        made = made.add_extension(extension, critical=True)
        return made.sign(authority, hashes.SHA256()).public_bytes(PEM)

    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    authoritative = x509.BasicConstraints(ca=True, path_length=None)
    if not (folder / "ca.pem").exists():
        root = signed(ours, authority.public_key(), authoritative, MONTH)
        (folder / "ca.pem").write_bytes(root)
    server = signed(host, key.public_key(), alternative, lifetime)
    (folder / "server.pem").write_bytes(server)
    (folder / "server.key").write_bytes(key.private_bytes(PEM, form, NO_PASSWORD))


def key_pair(path: pathlib.Path) -> None:
    """The key with which a SuperNode signs, and the public one with which it is registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.OpenSSH, NO_PASSWORD))
    path.chmod(0o600)
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*form))

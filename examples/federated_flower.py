"""Runs a Flower app on this machine: a SuperLink, a SuperNode for each client, and real sockets.

The app in `flower_digits` trains a small classifier of handwritten digits with compressed messages
both ways. At the end the parameters are compared with those of `jaxcomp.federated.Simulation`, to
the bit, and the bytes with those on the sockets.

    python examples/federated_flower.py
    python examples/federated_flower.py --clients 3 --rounds 5

It needs `pip install '.[examples,flower]'` in a clone and downloads nothing.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import options

APP = pathlib.Path(__file__).parent / "flower_digits"
BIN = pathlib.Path(sys.executable).parent


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--clients", type=options.at_least(1), default=3, help="SuperNodes (default: 3)")
    add("--rounds", type=options.at_least(1), default=5, help="of training (default: 5)")
    add("--seed", type=options.at_least(0), default=0, help="of everything (default: 0)")
    add("--timeout", type=options.positive, default=600.0, help="seconds for all (default: 600)")
    return parser.parse_args(argv)


class Counter:
    """Passes connections on to a port of this machine, and counts their bytes.

    Attributes:
        port: where it listens.
        up: bytes that were sent to the port.
        down: bytes that came back.
    """

    def __init__(self, port: int):
        self._to, self._lock = port, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.up, self.down = self._listener.getsockname()[1], 0, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                with self._lock:
                    setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Ran(NamedTuple):
    """What a run leaves: what was printed, and the bytes on the SuperNodes' sockets."""

    said: str
    up: int
    down: int


def run(app: pathlib.Path, clients: int, config: dict[str, Any], timeout: float) -> Ran:
    """Runs a Flower app with so many SuperNodes, all of them processes that share nothing."""
    with contextlib.ExitStack() as stack:
        home = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "JAX_PLATFORMS": "cpu",
            # Each message meets a new process, which must not compile everything again.
            "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                "JAX_COMPILATION_CACHE_DIR", str(home / "xla")
            ),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        fleet, control, link = superlink()
        stack.enter_context(process(link, home / "link.log", environment))
        for port in {fleet, control}:
            wait_for(port, home / "link.log")
        counter = stack.enter_context(contextlib.closing(Counter(fleet)))
        for number in range(clients):
            node = supernode(counter.port, number)
            stack.enter_context(process(node, home / f"node{number}.log", environment))
        connection = f'address = "127.0.0.1:{control}"\ninsecure = true\n'
        (home / "config.toml").write_text(f"[superlink.here]\n{connection}")
        given = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
        # A copy, since Flower puts the packed app beside it.
        copy = shutil.copytree(app, home / "app", ignore=shutil.ignore_patterns("__pycache__"))
        command = [BIN / "flwr", "run", copy, "here", "--stream", "--run-config", given]
        with process(command, home / "run.log", environment) as running:
            running.wait(timeout)
        said = "".join(file.read_text(errors="replace") for file in sorted(home.glob("*.log")))
        return Ran(said, counter.up, counter.down)


def superlink() -> tuple[int, int, list[str]]:
    """The ports of a SuperLink for nodes and for commands, and how to start it."""
    command = [str(BIN / "flower-superlink"), "--insecure"]
    if "--serverappio-api-address" in options_of("flower-superlink"):  # Several gRPC services.
        apps, fleet, control = free_ports(3)
        command += ["--serverappio-api-address", f"127.0.0.1:{apps}"]
        command += ["--fleet-api-address", f"127.0.0.1:{fleet}"]
        return fleet, control, [*command, "--control-api-address", f"127.0.0.1:{control}"]
    (port,) = free_ports(1)
    command += ["--host", "127.0.0.1", "--port", str(port)]
    return port, port, [*command, "--disable-runtime-dependency-installation"]


def supernode(port: int, number: int) -> list[str]:
    """How to start a SuperNode; `number` says which data are its own."""
    (own,) = free_ports(1)
    command = [str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{port}"]
    command += ["--node-config", f"partition-id={number}"]
    if "--clientappio-api-address" in options_of("flower-supernode"):
        return [*command, "--clientappio-api-address", f"127.0.0.1:{own}"]
    return [*command, "--port", str(own)]


@functools.cache
def options_of(name: str) -> str:
    """The options of a program, which differ between versions of Flower."""
    return subprocess.run([BIN / name, "--help"], capture_output=True, text=True).stdout


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [listener.getsockname()[1] for listener in sockets]


@contextlib.contextmanager
def process(command: Any, log: pathlib.Path, environment: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which ends with all that it has started."""
    with log.open("wb") as file:
        started = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield started
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(5)


def wait_for(port: int, log: pathlib.Path) -> None:
    """Returns once somebody listens on this port."""
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise SystemExit(f"nobody listens on port {port}:\n{log.read_text(errors='replace')}")


def simulated(args: argparse.Namespace) -> Any:
    """The same training without sockets, after its rounds."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import numpy as np

    sys.path.insert(0, str(APP))
    from digits import task

    from jaxcomp.federated import Simulation

    def batches(numbers: Any, round_: int) -> Any:
        rows = [task.batches(int(number), args.clients, round_) for number in numbers]
        return jax.tree.map(lambda *parts: np.stack(parts), *rows)

    simulation = Simulation(
        task.METHOD, task.params(), args.clients, batches, key=args.seed, messages=1_000
    )
    simulation.run(args.rounds)
    return simulation


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "report.json"
        config = {"clients": args.clients, "rounds": args.rounds, "seed": args.seed}
        ran = run(APP, args.clients, {**config, "report": str(file)}, args.timeout)
        if not file.exists():
            raise SystemExit(f"the run has no report:\n{ran.said}")
        report = json.loads(file.read_text())
    for row in report["rounds"]:
        print("round {round}: {accepted} of {sampled} clients, loss {loss:.3f}".format(**row))
    expected = simulated(args)
    sys.path.insert(0, str(APP))
    from digits import server, task

    assert task.params  # pyright
    whole = sum(leaf.nbytes for leaf in __import__("jax").tree.leaves(expected.params))
    same = report["sha256"] == server.sha256(expected.params)
    print(f"accuracy {report['accuracy']:.1f} %; the bits of the simulation: {same}")
    dense = whole * args.clients * args.rounds
    print("         float32  simulation    strategy     sockets")
    for way in ("up", "down"):
        counts = (dense, getattr(expected.ledger, way), report[way], getattr(ran, way))
        print(f"{way:<4} " + " ".join(f"{count:>11,}" for count in counts))
    if not same:
        raise SystemExit(f"the parameters differ; {report['refused'] or 'nothing was refused'}")


if __name__ == "__main__":
    main()

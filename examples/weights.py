"""Trains by policy gradients while two other processes answer with the newest weights.

A small transformer learns to add, first from examples and then by REINFORCE at a learning rate of
1e-5. The trainer publishes bfloat16 weights to a folder after every step. Two readers in processes
of their own fetch them over HTTP, behind links of 20 Mbit/s, and check every leaf bit for bit. One
reader is killed and comes back.

    python examples/weights.py
    python examples/weights.py --rate 3e-6 --link 5Mbit

It needs `pip install '.[examples]' aiohttp` in a clone, takes two to three minutes, and
downloads nothing.
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import options
import report
import weights_report
from weights_reader import digests
from weights_trainer import Trainer

import jaxcomp
from jaxcomp.testing import Relay
from jaxcomp.weights import Publisher
from jaxcomp_command.options import bandwidth
from jaxcomp_weights import Reader

HERE = pathlib.Path(__file__).parent
READERS, KILLED = 2, 1
DELAY = 0.01
"""Seconds one way."""
ENOUGH = 0.4
"""Part of right answers at which the supervised phase ends."""
TIMEOUT = 120.0
"""Seconds to wait for a reader."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--steps", type=options.at_least(8), default=120, help="of REINFORCE (default: 120)")
    add("--rate", type=options.positive, default=1e-5, help="learning rate (default: 1e-5)")
    add("--every", type=options.at_least(1), default=1, help="steps a version (default: 1)")
    add("--link", type=bandwidth, default=bandwidth("20Mbit"), help="(default: 20Mbit)")
    add("--width", type=int, choices=(64, 128, 192, 256, 384), default=192, help="(default: 192)")
    add("--layers", type=options.at_least(1), default=3, help="(default: 3)")
    add("--examples", type=int, default=600, help="most supervised steps (default: 600)")
    add("--seed", type=options.at_least(0), default=0, help="(default: 0)")
    add("--quick", action="store_true", help="a tiny model and few steps")
    out = pathlib.Path("out/weights")
    add("--out", type=pathlib.Path, default=out, help=f"folder for results (default: {out})")
    args = parser.parse_args(argv)
    if args.quick:
        args.width, args.layers, args.examples, args.steps = 64, 1, 20, 12
    return args


class Readers:
    """The processes of readers, each behind a link of its own."""

    def __init__(self, folder: pathlib.Path, relays: list[Relay]):
        self._folder, self._relays = folder, relays
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        """Starts a reader, or a new process of the one that was killed."""
        command = [sys.executable, str(HERE / "weights_reader.py"), "--number", str(number)]
        command += ["--url", f"http://127.0.0.1:{self._relays[number].port}"]
        one_core = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"reader{number}.log").open("ab") as log:
            self._running[number] = subprocess.Popen(
                [*command, "--folder", str(self._folder)],
                env={**os.environ, **one_core},
                stdout=log,
                stderr=log,
            )

    def kill(self, number: int) -> None:
        """Ends a reader as by `kill -9`."""
        self._running[number].send_signal(signal.SIGKILL)
        self._running.pop(number).wait()

    def rows(self, number: int) -> list[dict[str, Any]]:
        """The lines that a reader has written."""
        file = self._folder / f"reader{number}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, version: int) -> None:
        """Returns once all readers that run show this version."""
        until = time.monotonic() + TIMEOUT
        for number, process in self._running.items():
            while not any(row["version"] >= version for row in self.rows(number)[-1:]):
                if process.poll() is not None or time.monotonic() > until:
                    log = (self._folder / f"reader{number}.log").read_text()
                    raise RuntimeError(f"reader {number} does not show {version}:\n{log}")
                time.sleep(0.05)

    def stop(self) -> None:
        """Lets all readers end."""
        (self._folder / "stop").touch()
        for process in self._running.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[tuple[str, int]]:
    """A static HTTP server of a folder."""
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield "127.0.0.1", server.server_port
        server.shutdown()


class Published:
    """Publishes versions, with the digests of their leaves beside, and keeps some for the bound."""

    def __init__(self, publisher: Publisher, folder: pathlib.Path, often: int):
        self._publisher, self._folder, self._often = publisher, folder, often
        self._before: dict[str, np.ndarray] = {}
        self.version = 0
        self.pairs: dict[int, tuple[Any, Any]] = {}

    def publish(self, params: Any, step: int) -> float:
        """Publishes a version; returns the seconds for which the trainer waits."""
        self.version += 1
        weights = {name: np.asarray(x.astype(jnp.bfloat16)) for name, x in params.items()}
        (self._folder / f"{self.version}.json").write_text(json.dumps(digests(weights)))
        if self.version > 1 and self.version % self._often == 0:
            self.pairs[self.version] = self._before, weights
        self._before = weights
        begin = time.perf_counter()
        self._publisher.publish(params, step)
        return time.perf_counter() - begin


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, publishes and lets others read; returns what happened."""
    folder = (args.out / "run").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("weights", "sha256"):
        (folder / name).mkdir(parents=True)
    console, trainer, rows, events = (
        report.console(),
        Trainer(args.width, args.layers, args.seed),
        [],
        [],
    )
    with contextlib.ExitStack() as stack:
        bars = stack.enter_context(report.progress(console))
        learn(trainer, args, bars)
        trainer.start_reinforcing(args.rate)
        link = jaxcomp.planning.Network(args.link)
        publisher = Publisher(folder / "weights", dtype=jnp.bfloat16, link=link, keep=None)
        stack.enter_context(publisher)
        versions = args.steps // args.every
        published = Published(publisher, folder / "sha256", max(versions // 12, 1))
        for _ in range(2):  # Before anybody waits: the first patch compiles.
            published.publish(trainer.params, 0)
            trainer.reinforce()
        publisher.flush()
        server = stack.enter_context(served(folder / "weights"))
        settings = {"to": server, "delay": DELAY, "rate": 8 * args.link}
        relays = [stack.enter_context(Relay(**settings)) for _ in range(READERS)]
        readers = Readers(folder, relays)
        stack.callback(readers.stop)
        for number in range(READERS):
            readers.start(number)
        readers.wait(1)
        begun = time.time()
        happens = {
            2 * args.steps // 5: ("killed", readers.kill),
            3 * args.steps // 5: ("comes back", readers.start),
        }
        show = report_line(bars, "REINFORCE", args.steps)
        for step in range(1, args.steps + 1):
            begin = time.perf_counter()
            reward, waited = trainer.reinforce(), 0.0
            if step % args.every == 0:
                waited = published.publish(trainer.params, step)
            seconds = time.perf_counter() - begin
            rows.append({"time": time.time(), "step": step, "reward": reward})
            rows[-1] |= {"seconds": seconds, "publish_seconds": waited}
            show(step, f"reward {np.mean([row['reward'] for row in rows[-10:]]):.2f}")
            if step in happens:
                text, do = happens[step]
                do(KILLED)
                events.append({"time": time.time(), "step": step, "text": text})
                console.print(f"step {step}: reader {KILLED} {text}")
        publisher.flush()
        readers.wait(published.version)
        readers.stop()
        listed = Reader(folder / "weights").versions()
        sockets = [relay.down for relay in relays]
        read = [readers.rows(number) for number in range(READERS)]
    return {
        "parameters": sum(x.size for x in trainer.params.values()),
        "link": args.link,
        "rate": args.rate,
        "begun": begun,
        "steps": rows,
        "events": events,
        "readers": read,
        "sockets": sockets,
        "versions": [weights_report.sizes(entry) for entry in listed],
        "bounds": {version: weights_report.bound(*p) for version, p in published.pairs.items()},
    }


def learn(trainer: Trainer, args: argparse.Namespace, bars: Any) -> None:
    """Supervised steps until enough answers are right."""
    show = report_line(bars, "examples", args.examples)
    for step in range(1, args.examples + 1):
        trainer.learn()
        if step % 20 == 0:
            reward = trainer.reward()
            show(step, f"reward {reward:.2f}")
            if reward >= ENOUGH:
                bars.console.print(f"examples   step {step:>4}  reward {reward:.2f}: enough")
                break


def report_line(bars: Any, name: str, steps: int) -> Any:
    """A bar of a phase; a line at every quarter where output is not a terminal."""
    task = bars.add_task(name, total=steps, now="")

    def show(step: int, now: str) -> None:
        bars.update(task, completed=step, now=now)
        if bars.disable and step % max(steps // 4, 1) == 0:
            bars.console.print(f"{name:<10} step {step:>4} of {steps}  {now}")

    return show


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    found = run(args)
    versions = {"jax": jax.__version__, "jaxcomp": jaxcomp.__version__, "cores": os.cpu_count()}
    results = {"environment": versions, **json.loads(json.dumps(found))}
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    weights_report.print_tables(report.console(), results)
    weights_report.draw(results, args.out / "weights.png")


if __name__ == "__main__":
    main()

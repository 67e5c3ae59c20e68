"""Trains a byte-level language model in rounds of local steps, over several processes.

The workers of DiLoCo take steps alone, and exchange once a round how far they have moved. Compared
are training that averages every gradient, DiLoCo, streaming DiLoCo whose exchanges run beside the
steps, and SparseLoCo. One command starts all workers on this machine:

    python examples/diloco.py
    python examples/diloco.py --workers 4 --method diloco sparseloco --rounds 12
    python examples/diloco.py --checkpoint-every 2 --out out/long --resume

On several machines, the same command on each names the first one, as with `multihost.py`:

    python examples/diloco.py --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 0
    python examples/diloco.py --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 1

It needs `pip install '.[examples]'`, downloads nothing, and leaves `diloco.png` and
`results.json` in the `--out` folder: the loss against the bytes that a worker sent, and against
seconds. Between processes of one machine the link costs nothing, so the seconds are those of the
fastest method's steps here, and of a link of `--link` by `jaxcomp`'s model.

A checkpoint may be taken while an exchange is under way: `--resume` goes on with the same bits.
"""

import argparse
import functools
import hashlib
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import byte_lm_model
import checkpoints
import diloco_report
import jax
import multihost
import numpy as np
import optax
import options
import report
import training
from jax.sharding import Mesh
from rich.console import Console

import jaxcomp
from jaxcomp import algorithms
from jaxcomp_command import options as units

AXIS = training.AXIS
FOUR_BITS = jaxcomp.Link(jaxcomp.qsgd_inf(bits=4))
SPARSE = jaxcomp.Policy(jaxcomp.chunk_top_k(), min_size=0, min_ndim=0)


class Method(NamedTuple):
    """A way to train.

    Attributes:
        label: its name in the picture.
        reducer: what takes its mean; its bytes are those of an exchange.
        make: the transformation, of the inner optimizer, the reducer and the steps of a round.
        local: whether it exchanges once a round only.
        delay: the steps beside which an exchange runs.
    """

    label: str
    reducer: Any
    make: Callable[[Any, Any, int], Any]
    local: bool = True
    delay: int = 0


METHODS = {
    "dense": Method(
        "dense gradients",
        jaxcomp.Dense(),
        lambda inner, mean, _: optax.chain(jaxcomp.compressed_mean(mean, AXIS), inner),
        local=False,
    ),
    "diloco": Method(
        "4-bit DiLoCo",
        jaxcomp.TwoShot(FOUR_BITS, FOUR_BITS),
        lambda inner, mean, every: algorithms.diloco(mean, AXIS, every=every, inner=inner),
    ),
    "streaming": Method(
        "4-bit streaming DiLoCo",
        jaxcomp.TwoShot(FOUR_BITS, FOUR_BITS),
        lambda inner, mean, every: algorithms.streaming_diloco(
            mean, AXIS, every=every, inner=inner, fragments=2, delay=4
        ),
        delay=4,
    ),
    "sparseloco": Method(
        "0.16-bit SparseLoCo",
        jaxcomp.Gather(jaxcomp.Link(SPARSE, jaxcomp.Residual(0.95))),
        lambda inner, _, every: algorithms.sparseloco(
            SPARSE, AXIS, every=every, inner=inner, learning_rate=2.0
        ),
    ),
}


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add, at_least = parser.add_argument, options.at_least
    add("--method", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    add("--workers", type=at_least(2), default=2, help="to start on this machine (default: 2)")
    add("--coordinator", type=multihost.host_and_port, metavar="HOST:PORT", help="of the workers")
    add("--num-processes", type=at_least(1), help="how many workers there are")
    add("--process-id", type=at_least(0), help="which one this is")
    add("--timeout", type=at_least(1), default=300, help="to wait, in seconds (default: 300)")
    add("--rounds", type=at_least(1), default=10, help="of training (default: 10)")
    add("--every", type=at_least(2), default=20, help="the steps of a round (default: 20)")
    add("--learning-rate", type=options.positive, default=2e-3, help="of Adam (default: 0.002)")
    add("--batch-size", type=at_least(1), default=8, help="of all workers (default: 8)")
    add("--layers", type=at_least(1), default=4, help="blocks of the model (default: 4)")
    add("--width", type=at_least(1), default=160, help="of them, 32 times a number (default: 160)")
    add("--context", type=at_least(1), default=64, help="bytes that it sees (default: 64)")
    add("--seed", type=at_least(0), default=0, help="of parameters, order, noise (default: 0)")
    add("--link", type=units.bandwidth, default="100Mbit", help="to count with (100Mbit)")
    add("--checkpoint-every", type=at_least(1), metavar="STEPS", help="(default: never)")
    add("--resume", action="store_true", help="go on from the checkpoints in the --out folder")
    folder = pathlib.Path("out/diloco")
    add("--out", type=pathlib.Path, default=folder, help=f"folder for results (default: {folder})")
    parser.set_defaults(devices_per_process=2)
    args = parser.parse_args(argv)
    multihost.check(parser, args)
    if "streaming" in args.method and (args.every % 2 or args.every <= 8):
        options.refuse(parser, "--every", "even and above 8 for streaming", args.every)
    if args.batch_size % (args.num_processes or args.workers):
        options.refuse(parser, "--batch-size", "a multiple of the workers", args.batch_size)
    return parser, args


def start(args: argparse.Namespace, argv: list[str]) -> int:
    """Starts all workers on this machine; the exit status of the first that fails, or 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    group = ["--coordinator", f"localhost:{port}", "--num-processes", str(args.workers)]
    command = [sys.executable, __file__, *argv, *group, "--process-id"]
    running = [subprocess.Popen([*command, str(number)]) for number in range(args.workers)]
    try:
        codes = [worker.wait() for worker in running]
    finally:
        for worker in running:
            worker.kill()
    return next(filter(None, codes), 0)


class Trainer:
    """One method on the mesh: its steps, and the state that a checkpoint has."""

    def __init__(self, method: Method, args: argparse.Namespace, mesh: Mesh):
        self.model = byte_lm_model.ByteModel(args.layers, args.width)
        self.mesh, self.method, self.every = mesh, method, args.every
        steps = args.every * args.rounds
        warm = min(20, steps // 4)
        rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warm, steps)
        self.tx = method.make(optax.adam(rate), method.reducer, args.every)
        self.grads = jax.value_and_grad(functools.partial(training.loss_of, self.model))
        example = np.zeros((1, args.context), np.int32)
        init = jax.jit(lambda: self.model.init(jax.random.key(args.seed), example))
        self.params = jaxcomp.place(init(), mesh, AXIS)
        self.state: Any = jaxcomp.init_state(self.tx, self.params, mesh, AXIS)
        self.overlapped = None
        if method.delay:
            self.overlapped = jaxcomp.Overlapped(self.tx, self.grads, mesh, AXIS)
        elif method.local:
            self.alone, self.last = self._program(exchange=False), self._program(exchange=True)
        else:
            self.alone = self.last = self._program()

    def _program(self, **settings: Any) -> Callable[..., Any]:
        def step(params, state, batch):
            here = jaxcomp.local(jaxcomp.view(params, state), AXIS)
            loss, grads = self.grads(here, batch)
            updates, state = self.tx.update(grads, state, params, **settings)
            return optax.apply_updates(params, updates), state, jaxcomp.PerWorker.wrap(loss, "loss")

        return jaxcomp.data_parallel(step, self.mesh, AXIS, donate_argnums=(0, 1))

    def step(self, batch: Any) -> None:
        """One step; those without an exchange run a program without collectives."""
        run = self.overlapped
        if run is None:
            alone = self.method.local and jaxcomp.steps_alone(self.state)
            run = self.alone if alone else self.last
        self.params, self.state, loss = run(self.params, self.state, batch)
        jax.block_until_ready((self.params, loss))

    def settled(self) -> tuple[Any, Any]:
        """Parameters and state, after exchanges that are under way have ended."""
        state = self.overlapped.settle(self.state) if self.overlapped else self.state
        return self.params, state


def train(
    name: str, text: byte_lm_model.Text, args: argparse.Namespace, mesh: Mesh, console: Console
) -> diloco_report.Run:
    """A method's run, from its newest checkpoint if it is to be resumed."""
    method, folder = METHODS[name], args.out / "checkpoints" / name
    trainer = Trainer(method, args, mesh)
    held_out = byte_lm_model.validation_of(text, args.context)
    which = {"size": args.batch_size, "context": args.context, "seed": args.seed}
    which["rows"] = multihost.own_rows(mesh, args.batch_size)
    done, times, scores = 0, [], []
    found = checkpoints.read_record(folder) if args.resume or args.checkpoint_every else None
    if found is not None:
        if not args.resume:
            raise SystemExit(f"{folder} holds a checkpoint: go on with --resume, or give --out")
        done, record = found
        changed = checkpoints.differences(record["settings"], settings_of(args))
        if changed:
            raise SystemExit(f"--resume: {folder} was made with {', '.join(changed)}")
        times, scores = record["times"], record["scores"]
        trainer.params, trainer.state = checkpoints.restore(folder, trainer.settled())
    for number in range(done + 1, args.every * args.rounds + 1):
        batch = training.put(byte_lm_model.batch_of(text, number, **which), mesh)
        begin = time.perf_counter()
        with multihost.within(args.timeout, f"step {number}: another worker may have stopped"):
            trainer.step(batch)
        times.append(time.perf_counter() - begin)
        if number % args.every == 0:
            params = training.first_copy(trainer.params)
            scores.append(float(byte_lm_model.bits_per_byte(trainer.model, params, held_out)))
            console.print(
                f"{method.label:<36} round {number // args.every:>3} of {args.rounds}: "
                f"{scores[-1]:.3f} bits per byte"
            )
        if args.checkpoint_every and number % args.checkpoint_every == 0:
            record = {"settings": settings_of(args), "times": times, "scores": scores}
            checkpoints.save(folder, number, trainer.settled(), record)
    sent = float(jaxcomp.wire_bytes(method.reducer, trainer.params, workers=mesh.devices.size))
    exchanges = 1 if method.local else args.every
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(training.first_copy(trainer.params)):
        digest.update(np.asarray(leaf).tobytes())
    return diloco_report.Run(
        name=name,
        label=method.label,
        scores=scores,
        sent=sent * exchanges,
        exchanges=exchanges,
        delay=method.delay,
        step=statistics.median(times),
        digest=digest.hexdigest(),
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the bits of a run depend on."""
    names = ("rounds", "every", "learning_rate", "batch_size", "layers", "width", "context", "seed")
    workers = {"workers": args.num_processes, "jax": jax.__version__}
    return {name: getattr(args, name) for name in names} | workers


def work(args: argparse.Namespace) -> None:
    """A worker: all methods one after another; the first worker reports."""
    mesh = training.make_mesh(jax.devices()[:: args.devices_per_process])
    leads = jax.process_index() == 0
    console = report.console() if leads else Console(quiet=True)
    text = byte_lm_model.read_text()
    console.print(
        f"{mesh.devices.size} workers; {args.rounds} rounds of {args.every} steps of Adam, "
        f"batch {args.batch_size} times {args.context} bytes of {len(text.train):,}"
    )
    runs = [train(name, text, args, mesh, console) for name in args.method]
    if not leads:
        return
    diloco_report.table(console, runs, args.link, args.every)
    args.out.mkdir(parents=True, exist_ok=True)
    told = {"settings": settings_of(args), "link": args.link, "runs": [r._asdict() for r in runs]}
    (args.out / "results.json").write_text(json.dumps(told, indent=1) + "\n")
    diloco_report.draw(runs, args.link, settings_of(args), args.out / "diloco.png")
    console.print(f"Saved {args.out / 'results.json'}")


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    if args.coordinator is None:
        sys.exit(start(args, sys.argv[1:] if argv is None else argv))
    multihost.connect(parser, args)
    try:
        work(args)
    except jax.errors.JaxRuntimeError as error:
        multihost.fail(f"another worker is lost: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()

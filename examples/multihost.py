"""Trains the language model of `byte_lm.py` over all devices of several processes, on many hosts.

Without a launcher, each process is told who it is, here in two shells of one machine:

    python examples/multihost.py --coordinator localhost:1234 --num-processes 2 --process-id 0
    python examples/multihost.py --coordinator localhost:1234 --num-processes 2 --process-id 1

Under Slurm and Open MPI 4 JAX finds out by itself, and gives a task the GPU of its number:

    srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 python examples/multihost.py
    mpirun -np 4 --map-by node python examples/multihost.py

On Kubernetes, this is the command of an indexed Job (`completionMode: Indexed`, as many
`completions` as `parallelism`) whose `subdomain` is a headless Service. JAX asks the API server
(`pip install 'jax[k8s]'`; the service account must be allowed to read pods, services and jobs), or
the Job says it, here for 4 pods of a Job named `lm` and a Service named `pods`:

    command: [python, examples/multihost.py, --out, /shared/multihost]
    command: [python, examples/multihost.py, --out, /shared/multihost, --num-processes, "4",
              --process-id, $(JOB_COMPLETION_INDEX), --coordinator, "lm-0.pods:1234"]

Each process reads the bytes of its own devices' rows of a batch, which is the same for any number
of processes. For `--checkpoint-every` and `--resume`, `--out` is a folder that all hosts share. On
CPUs, processes talk over the address that their host's name resolves to.

Who waits for longer than `--timeout` seconds, for others to join or in a step, says so and ends;
all are then started again, with `--resume`. One that stops at another moment, as while a checkpoint
is written, has JAX abort the others, after up to four times as long.
"""

import argparse
import contextlib
import hashlib
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import byte_lm
import byte_lm_model
import byte_lm_report
import checkpoints
import jax
import numpy as np
import options
import report
import training
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

METRIC = byte_lm_report.METRIC


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, each checked as far as it can be before there are devices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add, at_least = parser.add_argument, options.at_least
    where = "where process 0 listens (default: launcher's)"
    add("--coordinator", type=host_and_port, metavar="HOST:PORT", help=where)
    add("--num-processes", type=at_least(1), help="how many there are (default: launcher's)")
    add("--process-id", type=at_least(0), help="which one this is (default: launcher's)")
    add("--timeout", type=at_least(1), default=100, help="to wait, in seconds (default: 100)")
    add("--devices-per-process", type=at_least(1), help="simulated ones, of the CPU")
    add("--codec", nargs=1, choices=options.METHODS, default=["qsgd_inf"], help="(qsgd_inf)")
    add("--steps", type=at_least(1), default=300, help="batches to train on (default: 300)")
    add("--learning-rate", type=options.positive, default=3e-3, help="of Adam (default: 0.003)")
    add("--batch-size", type=at_least(1), default=16, help="over all devices (default: 16)")
    add("--layers", type=at_least(1), default=4, help="blocks of the model (default: 4)")
    add("--width", type=at_least(1), default=160, help="of them, 32 times a number (default: 160)")
    add("--context", type=at_least(1), default=128, help="bytes that it sees (default: 128)")
    add("--seed", type=at_least(0), default=0, help="of parameters, order, noise (default: 0)")
    add("--checkpoint-every", type=at_least(1), metavar="STEPS", help="(default: never)")
    add("--resume", action="store_true", help="go on from the checkpoint in the --out folder")
    folder = pathlib.Path("out/multihost")
    add("--out", type=pathlib.Path, default=folder, help=f"folder for results (default: {folder})")
    parser.set_defaults(optimizer="adam", rates=byte_lm.RATES, save_gradients=False)
    args = parser.parse_args(argv)
    check(parser, args)
    return parser, args


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses a width, or a place among the processes, that cannot be."""
    if args.width % byte_lm_model.HEAD:
        options.refuse(parser, "--width", f"a multiple of {byte_lm_model.HEAD}", args.width)
    which = (args.coordinator, args.num_processes, args.process_id)
    if None in which and any(value is not None for value in which):
        parser.error("--coordinator, --num-processes and --process-id: give all three, or none")
    if args.num_processes and args.process_id >= args.num_processes:
        options.refuse(parser, "--process-id", f"below {args.num_processes}", args.process_id)


def host_and_port(text: str) -> str:
    """Checks an address, which JAX does not check."""
    host, _, port = text.rpartition(":")
    known = host and (":" not in host or host[0] + host[-1] == "[]")  # IPv6 needs brackets.
    if not known or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(
            f"must be HOST:PORT with a port from 1 to 65535, as in localhost:1234, got {text!r}"
        )
    return text


def fail(said: str) -> NoReturn:
    """Ends this process at once: an orderly exit would wait for the others."""
    print(f"multihost.py: error: {said}", file=sys.stderr, flush=True)
    os._exit(1)


@contextlib.contextmanager
def within(seconds: int, awaited: str) -> Iterator[None]:
    """Ends this process with a message if the body takes longer; JAX would abort later."""
    said = f"waited {seconds} seconds (--timeout) for {awaited}"
    alarm = threading.Timer(seconds, fail, (said,))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def connect(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Joins the other processes."""
    if args.devices_per_process:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices_per_process)
    count, address = args.num_processes or "the launcher's", args.coordinator or "its address"
    with within(args.timeout, f"{count} processes to join at {address}: at least one is missing"):
        try:
            jax.distributed.initialize(
                args.coordinator,
                args.num_processes,
                args.process_id,
                initialization_timeout=2 * args.timeout,
                heartbeat_timeout_seconds=2 * args.timeout,
                shutdown_timeout_seconds=args.timeout,
            )
            jax.devices()  # Of all processes: each tells the others of its own.
        except ValueError as error:
            parser.error(f"JAX finds no launcher here, and no --coordinator is given ({error})")
        except RuntimeError as error:
            fail(str(error).splitlines()[0])


def unlike(value: str) -> list[int]:
    """The processes whose value differs from that of process 0; all processes wait here."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    found = multihost_utils.process_allgather(digest).reshape(-1, digest.size)
    return np.flatnonzero((found != found[0]).any(axis=1)).tolist()


def check_alike(
    parser: argparse.ArgumentParser, args: argparse.Namespace, settings: dict[str, Any]
) -> None:
    """Checks that all processes have the same settings and the same output folder."""
    marker = args.out / "unfinished"
    if jax.process_index() == 0:
        marker.write_text(os.urandom(8).hex())
    others = unlike(repr((settings, args.checkpoint_every, args.resume)))
    if others:
        parser.error(f"options, libraries or text of processes {others} are not those of process 0")
    others = unlike(marker.read_text() if marker.exists() else "")
    if jax.process_index() == 0:
        marker.unlink()
    if others and (args.checkpoint_every or args.resume):
        parser.error(
            f"argument --out: must be a folder that all processes share, and {str(args.out)!r} of "
            f"processes {others} is not that of process 0"
        )


def own_rows(mesh: Mesh, size: int) -> np.ndarray:
    """The rows of a batch on the devices of this process."""
    split = NamedSharding(mesh, PartitionSpec(training.AXIS))
    parts = split.addressable_devices_indices_map((size,)).values()
    return np.sort(np.concatenate([np.arange(size)[part] for part in parts]))


def train(
    text: byte_lm_model.Text,
    args: argparse.Namespace,
    mesh: Mesh,
    settings: dict[str, Any],
    show: Callable[[int, int, float, float], None],
) -> tuple[report.Run, str]:
    """The result of the run, with a digest of its parameters."""
    (name,), steps = args.codec, args.steps
    model = byte_lm_model.ByteModel(args.layers, args.width)
    held_out = byte_lm_model.validation_of(text, args.context)
    rate = byte_lm.warm_and_decay(args.learning_rate, steps)
    which = {"size": args.batch_size, "context": args.context, "seed": args.seed}
    which["rows"] = own_rows(mesh, args.batch_size)
    first = byte_lm_model.batch_of(text, 1, **which)
    ready = training.prepare(name, args, mesh, model=model, rate=rate, batch=first)
    folder = byte_lm.folder_of(args, name)
    done, params, state, curve, times = byte_lm.begin(ready, folder, args.resume)
    for step in range(done + 1, steps + 1):
        batch = training.put(byte_lm_model.batch_of(text, step, **which), mesh)
        start = time.perf_counter()
        with within(args.timeout, f"step {step}, in which another process may have stopped"):
            params, state, loss = ready.step(params, state, batch)
            loss = float(loss)  # Waits for all.
        times.append(time.perf_counter() - start)
        if step in (1, steps) or step % math.ceil(steps / 4) == 0:
            # Every process scores: those that wait for long would take the others for dead.
            score = byte_lm_model.bits_per_byte(model, training.first_copy(params), held_out)
            curve.append(report.Point(step, loss, float(score)))
        if args.checkpoint_every and (step % args.checkpoint_every == 0 or step == steps):
            record = {"settings": settings, "curve": curve, "times": times}
            checkpoints.save(folder, step, (params, state), record)
        show(step, steps, loss, curve[-1].score)
    leaves = jax.tree.leaves(training.first_copy(params))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    return training.summary(name, ready, curve, times), digest.hexdigest()


def work(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """The work of each process after all have joined; the first one reports it."""
    devices, leads = jax.devices(), jax.process_index() == 0
    options.check(parser, args, len(devices))
    text = byte_lm_model.read_text()
    (name,) = args.codec
    settings = byte_lm.settings_of(name, args, text, devices)
    with within(args.timeout, "all processes to tell of their options"):
        check_alike(parser, args, settings)
    byte_lm.check_checkpoints(parser, args, text, devices)

    console = report.console() if leads else Console(quiet=True)
    console.print(
        f"{jax.process_count()} processes, {len(devices)} {devices[0].platform} devices; "
        f"{args.steps} steps of Adam at {args.learning_rate:g}, batch {args.batch_size} times "
        f"{args.context} bytes of {len(text.train):,}"
    )
    with report.progress(console) as bars:
        show = report.watcher(bars, options.label(name), METRIC)
        run, digest = train(text, args, training.make_mesh(devices), settings, show)
    console.print(
        f"{run.label}: loss {run.curve[-1].loss:.3f}, {run.score:.3f} bits per byte on held-out "
        f"files; a device sends {run.bytes_per_step:,} bytes a step, "
        f"{run.times_less_than_dense:.1f} times less than dense"
    )
    if leads:
        told = {**vars(args), "out": str(args.out), "text": text.digest}
        told |= {"processes": jax.process_count(), "parameters_sha256": digest}
        report.save(args.out, [run], devices, METRIC, told)
        console.print(f"Saved {args.out / 'results.json'}")


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    options.check(parser, args, 1)  # A folder that only this host cannot write, before any wait.
    connect(parser, args)
    try:
        work(parser, args)
    except jax.errors.JaxRuntimeError as error:
        what = str(error).splitlines()[0]
        fail(f"another process is lost, or process {jax.process_index()} failed in a step: {what}")


if __name__ == "__main__":
    main()

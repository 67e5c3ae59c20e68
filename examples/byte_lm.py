"""Trains a byte-level language model, dense and compressed, and compares what it cost.

The text is the source of Python's own standard library: real data on every machine, and nothing to
download. The score is the loss on held-out files, in bits per byte. Every run has the same initial
parameters, the same batches in the same order and the same optimizer; only what crosses the wire
differs. The workers are the accelerators of this machine, or eight simulated devices of its CPU:

    python examples/byte_lm.py
    python examples/byte_lm.py --codec dense sign --steps 1000 --checkpoint-every 50
    python examples/byte_lm.py --codec dense sign --steps 1000 --checkpoint-every 50 --resume

It needs `pip install '.[examples]'`, and leaves `byte_lm.png` and `results.json` in the
folder that `--out` names.

With `--checkpoint-every`, the newest checkpoint of each codec is kept there in `checkpoints/`.
`--resume` goes on from them: finished codecs are read, unbegun ones are begun, and the result has
the same bits as that of a run that never stopped. It is refused if a setting, the text, the devices
or a library that the result depends on has changed; and without it, a folder that holds checkpoints
of one of the codecs is refused, so that none is ever overwritten or mixed up with another.

With `--save-gradients`, the run of the first codec leaves three gradients for codecs to be judged
by: the first worker's own, before the mean, at 2 % of the steps, at half of them and at the last,
as `early.npz`, `middle.npz` and `late.npz` in `gradients/`. Each holds one float32 array a
parameter, in its own shape and under its path in the tree, such as `params/block_0/query/kernel`.
`settings.gradients` in `results.json` has their steps; `benchmarks/gradients.py` reads them.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

import byte_lm_model
import byte_lm_report
import checkpoints
import jax
import numpy as np
import optax
import options
import pictures
import report
import training
from jax.sharding import Mesh

import jaxcomp

RATES = {"sgd": 1.0, "momentum": 0.1, "adam": 3e-3}
DECISIVE = (
    *("steps", "optimizer", "learning_rate", "batch_size", "seed"),
    *("layers", "width", "context"),
)


class Trained(NamedTuple):
    """A run as far as it has come; `times` are the seconds of each step."""

    step: int
    params: Any
    state: Any
    curve: list[report.Point]
    times: list[float]


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options, each checked as far as it can be on its own."""
    parser = options.parser(
        (__doc__ or "").split("\n\n")[0],
        optimizer="adam",
        rates=RATES,
        decay="peak, after a warm-up and before a cosine decay",
        length=("--steps", 300, "batches to train on"),
        batch_size=16,
        out="out/byte_lm",
    )
    add, at_least = parser.add_argument, options.at_least
    add("--layers", type=at_least(1), default=4, help="blocks of the model (default: 4)")
    add("--width", type=at_least(byte_lm_model.HEAD), default=160, help="of them (default: 160)")
    add("--context", type=at_least(1), default=128, help="bytes that it sees (default: 128)")
    add("--checkpoint-every", type=at_least(1), metavar="STEPS", help="(default: never)")
    add("--resume", action="store_true", help="go on from the checkpoints in the --out folder")
    add("--save-gradients", action="store_true", help="three of the first codec's run, for study")
    args = options.parse(parser, argv, RATES)
    head = byte_lm_model.HEAD
    if args.width % head:
        options.refuse(parser, "--width", f"a multiple of {head}", args.width)
    return parser, args


def settings_of(
    name: str, args: argparse.Namespace, text: byte_lm_model.Text, devices: list[Any]
) -> dict[str, Any]:
    """All settings that determine the result of a run: a resumed run must have the same."""
    return {
        **{option: getattr(args, option) for option in DECISIVE},
        "save_gradients": args.save_gradients and name == args.codec[0],
        "devices": f"{len(devices)} {devices[0].device_kind}",
        "codec": repr(options.METHODS[name].mean),
        "text": text.digest,
        "jaxcomp": jaxcomp.__version__,
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
    }


def check_checkpoints(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    text: byte_lm_model.Text,
    devices: list[Any],
) -> None:
    """Whether the content of the folder is what the options require."""
    found = {name: checkpoints.read_record(folder_of(args, name)) for name in args.codec}
    held = {name: saved for name, saved in found.items() if saved}
    if args.resume and not held:
        parser.error(f"argument --resume: there is no checkpoint in {str(args.out)!r} to resume")
    if held and not args.resume:
        which = ", ".join(f"{name} at step {step}" for name, (step, _) in held.items())
        parser.error(
            f"argument --out: {str(args.out)!r} holds checkpoints ({which}): go on from them with "
            "--resume, delete them, or name another folder"
        )
    for name, (_, record) in held.items():
        changed = checkpoints.differences(
            record["settings"], settings_of(name, args, text, devices)
        )
        if changed:
            parser.error(
                f"argument --resume: must have the settings of the checkpoint of {name}, which "
                f"has {', '.join(changed)}"
            )


def folder_of(args: argparse.Namespace, name: str) -> pathlib.Path:
    return args.out / "checkpoints" / name


def moments(steps: int) -> dict[str, int]:
    """The steps whose gradients are saved."""
    return {"early": max(1, round(0.02 * steps)), "middle": max(1, steps // 2), "late": steps}


def build_gradient(model: byte_lm_model.ByteModel, mesh: Mesh) -> Callable[..., Any]:
    """The gradients that each worker passes to `compressed_mean`."""

    def gradient(params, batch):
        own = jax.grad(training.loss_of, argnums=1)(
            model, jaxcomp.local(params, training.AXIS), batch
        )
        return jaxcomp.PerWorker.wrap(own, "local", training.AXIS)

    return jaxcomp.data_parallel(gradient, mesh, training.AXIS)


def save_gradient(args: argparse.Namespace, step: int, gradients: Any) -> None:
    """Writes the first worker's gradients, one array a name; a file is complete or absent."""
    arrays: dict[str, Any] = {}
    for at, leaf in jax.tree_util.tree_leaves_with_path(gradients.tree):
        name = jax.tree_util.keystr(at, simple=True, separator="/")
        arrays[name] = np.asarray(leaf.addressable_data(0)[0], np.float32)
    folder = args.out / "gradients"
    folder.mkdir(exist_ok=True)
    for moment in [moment for moment, at in moments(args.steps).items() if at == step]:
        with (folder / "unfinished").open("wb") as file:
            np.savez(file, **arrays)
        (folder / "unfinished").replace(folder / f"{moment}.npz")


def warm_and_decay(peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up over a tenth of the steps, then cosine decay to zero."""
    warm = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(peak / warm, peak, warm, steps + 1)


def begin(ready: training.Ready, folder: pathlib.Path, resume: bool) -> Trained:
    """A run before its first step, or as the newest checkpoint has it."""
    found = checkpoints.read_record(folder) if resume else None
    if found is None:
        return Trained(0, ready.params, ready.state, [], [])
    step, record = found
    params, state = checkpoints.restore(folder, (ready.params, ready.state))
    curve = [report.Point(*point) for point in record["curve"]]
    return Trained(step, params, state, curve, record["times"])


def train(
    name: str,
    text: byte_lm_model.Text,
    args: argparse.Namespace,
    mesh: Mesh,
    settings: dict[str, Any],
    show: Callable[..., None],
) -> report.Run:
    """One run, from its start or its newest checkpoint to the end."""
    model = byte_lm_model.ByteModel(args.layers, args.width)
    held_out = byte_lm_model.validation_of(text, args.context)
    size, context, seed = args.batch_size, args.context, args.seed
    batch_of = functools.partial(
        byte_lm_model.batch_of, text, size=size, context=context, seed=seed
    )
    rate = warm_and_decay(args.learning_rate, args.steps)
    ready = training.prepare(name, args, mesh, model=model, rate=rate, batch=batch_of(1))
    gradient = build_gradient(model, mesh)
    steps, every = args.steps, args.checkpoint_every
    # Evenly spaced on both axes of the picture, one of which is logarithmic.
    watched = {*np.geomspace(1, steps, 12).round(), *np.linspace(0, steps, 13).round()}

    folder = args.out / "checkpoints" / name
    done, params, state, curve, times = begin(ready, folder, args.resume)
    if done:
        show(done, steps, curve[-1].loss, curve[-1].score)
    for step in range(done + 1, steps + 1):
        batch = training.put(batch_of(step), mesh)
        if settings["save_gradients"] and step in moments(steps).values():
            save_gradient(args, step, jax.block_until_ready(gradient(params, batch)))
        start = time.perf_counter()
        params, state, loss = ready.step(params, state, batch)
        loss = float(loss)  # Waits: on a few cores, simulated devices must not queue up steps.
        times.append(time.perf_counter() - start)
        if step in watched:
            first = training.first_copy(params)
            score = float(byte_lm_model.bits_per_byte(model, first, held_out))
            curve.append(report.Point(step, loss, score))
        if every and (step % every == 0 or step == steps):
            record = {"settings": settings, "curve": curve, "times": times}
            checkpoints.save(folder, step, (params, state), record)
        show(step, steps, loss, curve[-1].score)
    return training.summary(name, ready, curve, times)


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    devices = options.find_devices(parser, args.devices)
    options.check(parser, args, len(devices))
    text = byte_lm_model.read_text()
    shorter = min(len(text.train), len(text.validation)) - 1
    if args.context > shorter:
        options.refuse(parser, "--context", f"at most {shorter}, for this text", args.context)
    check_checkpoints(parser, args, text, devices)
    mesh = training.make_mesh(devices)

    console, metric = report.console(), byte_lm_report.METRIC
    console.print(
        f"{len(devices)} {devices[0].platform} devices; {args.steps} steps of {args.optimizer} at "
        f"{args.learning_rate:g}, batch {args.batch_size} times {args.context} bytes of "
        f"{len(text.train):,}, the same for each codec; {len(text.validation):,} are held out"
    )
    with report.progress(console) as bars:
        runs = [
            train(
                name,
                text,
                args,
                mesh,
                settings_of(name, args, text, devices),
                report.watcher(bars, options.label(name), metric),
            )
            for name in args.codec
        ]
    report.print_table(console, runs, devices, metric)
    settings = {**vars(args), "out": str(args.out), "text": text.digest}
    if args.save_gradients:
        settings["gradients"] = {"codec": args.codec[0], **moments(args.steps)}
    report.save(args.out, runs, devices, metric, settings)
    picture = byte_lm_report.picture(runs, len(devices), settings)
    pictures.save(picture, args.out / "byte_lm.png")
    console.print(f"Saved {args.out / 'results.json'}")


if __name__ == "__main__":
    main()

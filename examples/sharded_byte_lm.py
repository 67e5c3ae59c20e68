"""Trains a sharded byte-level language model whose slices are far apart, dense and compressed.

The model of `byte_lm.py` on eight devices: two slices of four. Within a slice, over the mesh axis
"fsdp", parameters and optimizer are sharded: every array of at least 1,024 elements along its
longest dimension that four devices divide, the others on all of them. Between the slices, over
"dcn", each device compresses its own shard of the gradients and sends nothing else:

    python examples/sharded_byte_lm.py
    python examples/sharded_byte_lm.py --codec dense sign --steps 500

What crosses "dcn" is read from the compiled step: the collectives whose groups have devices of both
slices. It needs `pip install '.[examples]'`.
"""

import argparse
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import byte_lm_model
import byte_lm_report
import jax
import numpy as np
import optax
import options
import report
import training
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

import jaxcomp

SLICES, SHARDS = 2, 4
WHOLE_BATCH = PartitionSpec(("dcn", "fsdp"))
CODECS = ["dense", "qsgd_inf", "sign"]
SENDERS = {
    "dense": jaxcomp.Dense(),
    "qsgd_inf": jaxcomp.qsgd_inf(bits=4),
    "sign": jaxcomp.sign(),
    "top_k": jaxcomp.top_k(fraction=0.01),
}


class Run(NamedTuple):
    """The result of a run; bytes are those that one device sends in a step."""

    codec: str
    score: float
    slow: int
    fast: int
    step_ms: float


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add, at_least = parser.add_argument, options.at_least
    add("--codec", nargs="+", choices=SENDERS, default=CODECS, help="what to compare")
    add("--steps", type=at_least(1), default=60, help="batches to train on (default: 60)")
    add("--learning-rate", type=options.positive, default=3e-3, help="of AdamW (default: 0.003)")
    add("--batch-size", type=at_least(1), default=16, help="over all devices (default: 16)")
    add("--layers", type=at_least(1), default=2, help="blocks of the model (default: 2)")
    add("--width", type=at_least(1), default=128, help="of them, 32 times a number (default: 128)")
    add("--context", type=at_least(1), default=64, help="bytes that it sees (default: 64)")
    add("--seed", type=at_least(0), default=0, help="of parameters, order, noise (default: 0)")
    args = parser.parse_args(argv)
    if args.batch_size % (SLICES * SHARDS):
        options.refuse(parser, "--batch-size", "a multiple of 8", args.batch_size)
    if args.width % byte_lm_model.HEAD:
        options.refuse(parser, "--width", f"a multiple of {byte_lm_model.HEAD}", args.width)
    return parser, args


def spec_of(leaf: Any) -> PartitionSpec:
    """The rule by which the model is sharded."""
    fits = [n if n % SHARDS == 0 else 0 for n in leaf.shape]
    if math.prod(leaf.shape) < 1024 or not any(fits):
        return PartitionSpec()
    longest = fits.index(max(fits))
    return PartitionSpec(*[None] * longest, "fsdp")


def build_step(
    model: byte_lm_model.ByteModel, tx: optax.GradientTransformationExtraArgs, mesh: Mesh
) -> Callable[..., Any]:
    """Data-parallel over the slices; within one, the compiler follows the parameters."""

    def step(params, state, batch):
        value_and_grad = jax.value_and_grad(training.loss_of, argnums=1)
        loss, grads = value_and_grad(model, jaxcomp.local(params, "dcn"), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "dcn")

    return jaxcomp.data_parallel(step, mesh, "dcn", batch_spec=WHOLE_BATCH, donate_argnums=(0, 1))


def crossing(compiled: Any, mesh: Mesh) -> tuple[int, int]:
    """Bytes that a device sends in a step: to the other slice, and within its own."""
    sent = jaxcomp.collective_bytes(compiled, mesh)
    slow = sum(size for axes, size in sent.items() if "dcn" in axes)
    return slow, sum(sent.values()) - slow


def train(
    codec: str,
    text: byte_lm_model.Text,
    args: argparse.Namespace,
    mesh: Mesh,
    show: Callable[[int, int, float, float], None],
) -> Run:
    """One run: parameters that stay sharded, the step, and its cost."""
    model = byte_lm_model.ByteModel(args.layers, args.width)
    draw = {"size": args.batch_size, "context": args.context, "seed": args.seed}
    held_out = byte_lm_model.validation_of(text, args.context)
    first = byte_lm_model.batch_of(text, 1, **draw)
    key = jax.random.key(args.seed)
    like = jax.eval_shape(model.init, key, first[0][:1])
    specs = jax.tree.map(spec_of, like)
    at_home = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params: Any = jax.jit(model.init, out_shardings=at_home)(key, first[0][:1])

    tx = optax.chain(
        jaxcomp.compressed_mean(SENDERS[codec], "dcn", key=args.seed, param_specs=specs),
        optax.adamw(args.learning_rate),
    )
    state = jaxcomp.init_state(tx, params, mesh, "dcn")
    split = NamedSharding(mesh, WHOLE_BATCH)
    step = build_step(model, tx, mesh).lower(params, state, jax.device_put(first, split)).compile()
    slow, fast = crossing(step, mesh)

    times, score = [], math.nan
    for number in range(1, args.steps + 1):
        batch = jax.device_put(byte_lm_model.batch_of(text, number, **draw), split)
        start = time.perf_counter()
        params, state, loss = step(params, state, batch)
        loss = float(loss)  # Waits: on a few cores, simulated devices must not queue up steps.
        times.append(time.perf_counter() - start)
        if number % math.ceil(args.steps / 4) == 0 or number == args.steps:
            score = float(byte_lm_model.bits_per_byte(model, jax.device_get(params), held_out))
        show(number, args.steps, loss, score)
    return Run(codec, score, slow, fast, 1e3 * float(np.median(times)))


def print_table(console: Console, runs: list[Run], dense: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("codec")
    for heading in (
        "bits\nper byte",
        "bytes per step\nover dcn",
        "against\ndense",
        "within\na slice",
    ):
        table.add_column(heading, justify="right")
    table.add_column("median\nstep", justify="right")
    for run in runs:
        less = f"{dense / run.slow:.1f} times less"
        row = (f"{run.score:.3f}", f"{run.slow:,}", less, f"{run.fast:,}", f"{run.step_ms:.1f} ms")
        table.add_row(run.codec, *row)
    console.print(table)
    console.print(
        "Bytes are what one device sends over a ring, read from the compiled step; what it sends "
        "within its slice\nis what sharding costs, compressed or not. No link of one machine is "
        "slow: times show what compressing costs."
    )


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    devices = options.find_devices(parser, SLICES * SHARDS)
    text = byte_lm_model.read_text()
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((SLICES, SHARDS), ("dcn", "fsdp"), axis_types=kinds, devices=devices)
    console = report.console()
    console.print(
        f"{SLICES} slices of {SHARDS} {devices[0].platform} devices; {args.steps} steps of AdamW "
        f"at {args.learning_rate:g}, batch {args.batch_size} times {args.context} bytes"
    )
    with report.progress(console) as bars:
        runs = [
            train(name, text, args, mesh, report.watcher(bars, name, byte_lm_report.METRIC))
            for name in dict.fromkeys(args.codec)
        ]
    model = byte_lm_model.ByteModel(args.layers, args.width)
    like = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, args.context), np.int32))
    # What each device would send of its shards; those on all devices are shared out.
    dense = jaxcomp.wire_bytes(jaxcomp.Dense(), like, workers=SLICES) // SHARDS
    print_table(console, runs, dense)


if __name__ == "__main__":
    main()

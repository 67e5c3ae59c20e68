"""Trains over several hosts: sharded inside each, a compressed mean between them, and restarts.

One process a host. The parameters and Adam's moments are sharded over the devices of a host, so
that weights cross its fast links only; between hosts each device compresses the shard of the
gradient that it has. On every host, with the same folder:

    COORDINATOR=host0:1234 PROCESSES=8 NUMBER=0 python examples/hosts.py --out /shared/run

Under Slurm, Open MPI or Kubernetes start one process on each host, leave the three variables out,
and give --launcher. Alone, without either, one process simulates two hosts of four devices. A run
that was stopped goes on from its last checkpoint when the same command is given again. It needs
`pip install '.[examples]'`.
"""

import argparse
import math
import os
import pathlib
import time
from typing import Any

import byte_lm_model
import checkpoints
import jax
import numpy as np
import optax
import options
import training
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxcomp

BATCH = P(("dcn", "fsdp"))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add, at_least = parser.add_argument, options.at_least
    launched = "a launcher tells who and where the processes are, one on each host"
    add("--launcher", action="store_true", help=launched)
    add("--steps", type=at_least(1), default=60, help="of the whole run (default: 60)")
    add("--checkpoint-every", type=at_least(1), default=20, metavar="STEPS", help="(default: 20)")
    add("--learning-rate", type=options.positive, default=3e-3, help="of AdamW (default: 0.003)")
    add("--bits", type=at_least(2), default=4, help="of an element between hosts (default: 4)")
    low = "send matrices of so low a rank (PowerSGD) instead of codes"
    add("--rank", type=at_least(1), help=low)
    add("--batch-size", type=at_least(1), default=16, help="over all devices (default: 16)")
    add("--layers", type=at_least(1), default=2, help="blocks of the model (default: 2)")
    add("--width", type=at_least(32), default=128, help="of them, 32 times a number (default: 128)")
    add("--context", type=at_least(1), default=64, help="bytes that it sees (default: 64)")
    folder = pathlib.Path("out/hosts")
    add("--out", type=pathlib.Path, default=folder, help=f"shared folder (default: {folder})")
    return parser.parse_args(argv)


def connected(args: argparse.Namespace) -> Mesh:
    """The mesh of all hosts, after this process has found the others."""
    if args.launcher:
        jax.distributed.initialize()
    elif "NUMBER" in os.environ:
        where, count, own = (os.environ[name] for name in ("COORDINATOR", "PROCESSES", "NUMBER"))
        jax.distributed.initialize(where, int(count), int(own))
    else:
        jax.config.update("jax_num_cpu_devices", 8)  # Two simulated hosts, if these are CPUs.
    hosts = max(jax.process_count(), 2)
    return jaxcomp.hybrid_mesh({"dcn": hosts}, {"fsdp": jax.device_count() // hosts})


def spec_of(leaf: Any, shards: int) -> P:
    """Splits the longest dimension that all devices of a host divide; small leaves are whole."""
    fits = [n if n % shards == 0 else 0 for n in leaf.shape]
    if math.prod(leaf.shape) < 1024 or not any(fits):
        return P()
    return P(*[None] * fits.index(max(fits)), "fsdp")


def own_rows(mesh: Mesh, size: int) -> np.ndarray:
    """The rows of a batch that the devices of this host work on."""
    parts = NamedSharding(mesh, BATCH).addressable_devices_indices_map((size,)).values()
    return np.sort(np.concatenate([np.arange(size)[part] for part in parts]))


def main(argv: list[str] | None = None) -> float:
    args = parse(argv)
    mesh = connected(args)
    leads = jax.process_index() == 0
    text, model = byte_lm_model.read_text(), byte_lm_model.ByteModel(args.layers, args.width)
    draw: Any = {"size": args.batch_size, "context": args.context, "seed": 0}
    first = byte_lm_model.batch_of(text, 1, **draw)[0][:1]

    specs = jax.tree.map(
        lambda leaf: spec_of(leaf, mesh.shape["fsdp"]),
        jax.eval_shape(model.init, jax.random.key(0), first),
    )
    at_home = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params: Any = jax.jit(model.init, out_shardings=at_home)(jax.random.key(0), first)
    codec = jaxcomp.PowerIteration(args.rank) if args.rank else jaxcomp.qsgd_inf(bits=args.bits)
    tx = optax.chain(
        jaxcomp.compressed_mean(codec, "dcn", param_specs=specs),
        optax.adamw(args.learning_rate),
    )
    state = jaxcomp.init_state(tx, params, mesh, "dcn")

    def train(params: Any, state: Any, batch: Any) -> Any:
        own = jaxcomp.local(params, "dcn")
        loss, grads = jax.value_and_grad(training.loss_of, argnums=1)(model, own, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "dcn")

    step = jaxcomp.data_parallel(train, mesh, "dcn", batch_spec=BATCH, donate_argnums=(0, 1))
    split, rows = NamedSharding(mesh, BATCH), own_rows(mesh, args.batch_size)
    done, loss = 0, math.nan
    found = checkpoints.read_record(args.out)
    settings = {name: getattr(args, name) for name in ("layers", "width", "bits", "rank")}
    if found:
        done, loss = found[0], found[1]["loss"]
        if found[1]["settings"] != settings:
            raise SystemExit(f"{args.out} has a run with {found[1]['settings']}, got {settings}")
        if leads:
            print(f"goes on after step {done} of {args.steps}")
        params, state = checkpoints.restore(args.out, (params, state))
    start = 0.0
    for number in range(done + 1, args.steps + 1):
        own = byte_lm_model.batch_of(text, number, **draw, rows=rows)
        batch = jax.tree.map(lambda x: jax.make_array_from_process_local_data(split, x), own)
        params, state, mean = step(params, state, batch)
        loss = float(mean)  # Waits for all hosts.
        if number == done + 1:
            start = time.perf_counter()  # The first step compiled.
        if number % args.checkpoint_every == 0 or number == args.steps:
            record = {"loss": loss, "settings": settings}
            checkpoints.save(args.out, number, (params, state), record)
            if leads:
                seconds = (time.perf_counter() - start) / max(number - done - 1, 1)
                print(f"step {number}: loss {loss:.4f}, {seconds:.3f} s a step", flush=True)
    if leads:
        shards = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), params
        )
        sent = jaxcomp.describe(codec, shards, workers=mesh.shape["dcn"]).link_bytes
        print(f"a host sends {mesh.shape['fsdp'] * sent:,} bytes a step to the others")
    return loss


if __name__ == "__main__":
    main()

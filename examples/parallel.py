"""Shared code of the examples of sharded training: options, the loop, and the bytes of a step."""

import argparse
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import byte_lm_model
import jax
import jax.numpy as jnp
import optax
import options
import report
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich import box
from rich.table import Table

import jaxcomp

DEVICES = 8


def parser(
    doc: str | None, *, bits: Mapping[str, int], layers: int | None = 2, steps: int = 60
) -> argparse.ArgumentParser:
    """The options of every example of sharded training.

    Args:
        doc: the docstring of the example.
        bits: options for bits an element, with their defaults.
        layers: the default number of blocks; None if the example fixes it.
        steps: the default number of steps.
    """
    made = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    add, at_least = made.add_argument, options.at_least
    for name, default in bits.items():
        words = f"bits of {name}, 32 for dense (default: {default})"
        add(f"--{name}", type=int, choices=(2, 4, 8, 32), default=default, help=words)
    add("--steps", type=at_least(1), default=steps, help=f"(default: {steps})")
    if layers is not None:
        add("--layers", type=at_least(1), default=layers, help=f"blocks (default: {layers})")
    add("--batch-size", type=at_least(1), default=16, help="over all devices (default: 16)")
    add("--width", type=at_least(1), default=128, help="of the blocks (default: 128)")
    add("--context", type=at_least(1), default=64, help="bytes that it sees (default: 64)")
    add("--learning-rate", type=options.positive, default=3e-3, help="of AdamW (default: 0.003)")
    add("--seed", type=at_least(0), default=0, help="of parameters and batches (default: 0)")
    return made


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options, for eight devices."""
    args = parser.parse_args(argv)
    args.devices = options.find_devices(parser, DEVICES)
    if args.batch_size % DEVICES:
        options.refuse(parser, "--batch-size", f"a multiple of {DEVICES}", args.batch_size)
    if args.width % 128:
        options.refuse(parser, "--width", "a multiple of 128", args.width)
    return args


def codec(bits: int) -> jaxcomp.Codec:
    """Unbiased codes of so many bits; `Identity` sends dense."""
    return jaxcomp.codecs.Identity() if bits == 32 else jaxcomp.qsgd_inf(bits=bits)


def mesh_of(args: argparse.Namespace, axis_name: str) -> Mesh:
    return jax.make_mesh(
        (DEVICES,), (axis_name,), axis_types=(AxisType.Auto,), devices=args.devices
    )


def put(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Arrays on the mesh, each by its spec; a spec may stand for a part of the tree."""
    return jax.tree.map(
        lambda spec, part: jax.device_put(part, NamedSharding(mesh, spec)),
        specs,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def init(block: byte_lm_model.Block, layers: int, seed: int) -> dict[str, Any]:
    """Two tables, and blocks whose parameters are stacked: their first axis indexes layers."""
    table, logits, *keys = jax.random.split(jax.random.key(seed), 2 + layers)
    x = jnp.zeros((1, 1, block.width))
    return {
        "embedding": jax.random.normal(table, (256, block.width)) / 16,
        "blocks": jax.vmap(lambda key: block.init(key, x)["params"])(jnp.stack(keys)),
        "logits": 0.02 * jax.random.normal(logits, (block.width, 256)),
    }


def loss_of(params: Any, x: Any, targets: jax.Array) -> jax.Array:
    """The mean loss of the next bytes, from what the last block returns."""
    logits = jax.nn.standardize(x) @ params["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def step_of(
    loss_and_grad: Callable[..., Any], tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """A step of `jax.jit`, in which the optimizer updates each device's own part."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, number, *batch):
        loss, grads = loss_and_grad(params, number, *batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(
    step: Callable[..., Any],
    params: Any,
    state: Any,
    args: argparse.Namespace,
    dense: Mapping[str, int],
    sent: Mapping[str, int],
) -> None:
    """Trains on Python's standard library, and prints losses and bytes.

    Args:
        step: from parameters, state, the number of the step, inputs and targets.
        params: the parameters, on the mesh.
        state: the optimizer's state.
        args: the options.
        dense: the bytes that one device would send in a step without compression, by purpose.
        sent: the bytes that it sends.
    """
    # Counts move to the mesh too, so that the second step is the program of the first.
    everywhere = NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, PartitionSpec())
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), state)
    text, out = byte_lm_model.read_text(), report.console()
    draw = {"size": args.batch_size, "context": args.context, "seed": args.seed}
    begin = time.perf_counter()
    for number in range(1, args.steps + 1):
        batch = byte_lm_model.batch_of(text, number, **draw)
        params, state, loss = step(params, state, number, *batch)
        loss = float(loss)  # Waits: on a few cores, simulated devices must not queue up steps.
        if number in (1, args.steps) or number % math.ceil(args.steps / 4) == 0:
            out.print(f"step {number}: loss {loss:.3f}, after {time.perf_counter() - begin:.1f} s")
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("bytes a step")
    for heading in ("dense", "compressed", "against dense"):
        table.add_column(heading, justify="right")
    rows = [(name, dense[name], sent[name]) for name in sent]
    rows.append(("in all", sum(dense.values()), sum(sent.values())))
    for name, before, after in rows:
        table.add_row(name, f"{before:,}", f"{after:,}", f"{before / after:.2f} times less")
    out.print(table)

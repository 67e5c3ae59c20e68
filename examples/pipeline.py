"""Trains a byte-level language model as a pipeline: each device has one block, a stage.

A batch is cut into microbatches, which follow each other through the stages, as in GPipe. A stage
sends its activations to the next one, and in the backward pass, which JAX derives, their gradients
to the one before. Both travel in 8 bits, and each byte of the text has its own scale. All stages
copy the two tables, whose gradients are added up in 8 bits, too:

    python examples/pipeline.py
    python examples/pipeline.py --activations 32  # Dense, for comparison.

It needs `pip install '.[examples]'`.
"""

import argparse
import functools
from typing import Any

import byte_lm_model
import jax
import jax.numpy as jnp
import optax
import parallel
from jax.sharding import PartitionSpec as P

from jaxcomp import collectives

STAGES = parallel.DEVICES
TABLES = ("embedding", "logits")
SPECS = {"embedding": P(), "blocks": P("stages"), "logits": P()}
NEXT = [(stage, stage + 1) for stage in range(STAGES - 1)]
MICROBATCHES = 8


def loss_fn(
    block: byte_lm_model.Block,
    codec: Any,
    params: Any,
    step: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
) -> jax.Array:
    """The mean loss, the same on all devices."""
    inputs, targets = (x.reshape(MICROBATCHES, -1, x.shape[1]) for x in (inputs, targets))
    stage = jax.lax.axis_index("stages")
    own = jax.tree.map(lambda p: p[0], params["blocks"])
    tables = {name: params[name] for name in TABLES}
    tables = collectives.pvary(tables, "stages", codec, key=step, site="tables")
    entering = jnp.pad(tables["embedding"][inputs], ((0, STAGES - 1), *[(0, 0)] * 3))

    def tick(arrived, microbatch):
        number, first = microbatch
        x = block.apply({"params": own}, jnp.where(stage == 0, first, arrived))
        sent = collectives.ppermute(x, "stages", codec, perm=NEXT, key=step, site=("next", number))
        return sent, x

    ticks = jnp.arange(len(entering))
    _, left = jax.lax.scan(tick, jnp.zeros_like(entering[0]), (ticks, entering))
    # The first microbatch reaches the last stage after as many ticks as there are stages before.
    loss = parallel.loss_of(tables, left[STAGES - 1 :], targets)
    return jax.lax.psum(jnp.where(stage == STAGES - 1, loss, 0), "stages")


def bytes_of(args: argparse.Namespace, codec: Any, params: Any) -> dict[str, int]:
    """The bytes of a step of a stage between two others."""
    tables = {name: params[name] for name in TABLES}
    shape = (args.batch_size // MICROBATCHES, args.context, args.width)
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    sent = collectives.wire_bytes(collectives.ppermute, like, codec, STAGES, perm=NEXT)
    ticks = MICROBATCHES + STAGES - 1
    return {
        "to the next stage": ticks * sent.forward,
        "to the one before": ticks * sent.backward,
        "gradients of tables": sum(
            collectives.wire_bytes(collectives.pvary, tables, codec, STAGES)
        ),
    }


def main(argv: list[str] | None = None) -> None:
    parser = parallel.parser(__doc__, bits={"activations": 8}, layers=None, steps=20)
    args = parallel.parse(parser, argv)
    mesh = parallel.mesh_of(args, "stages")
    block = byte_lm_model.Block(args.width, STAGES)
    codec = parallel.codec(args.activations)
    tx = optax.adamw(args.learning_rate)
    loss_and_grad = jax.shard_map(
        jax.value_and_grad(functools.partial(loss_fn, block, codec)),
        mesh=mesh,
        in_specs=(SPECS, P(), P(), P()),
        out_specs=(P(), SPECS),
    )

    step = parallel.step_of(loss_and_grad, tx)
    params = parallel.put(parallel.init(block, STAGES, args.seed), mesh, SPECS)
    dense = bytes_of(args, None, params)
    parallel.train(step, params, tx.init(params), args, dense, bytes_of(args, codec, params))


if __name__ == "__main__":
    main()

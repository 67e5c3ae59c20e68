"""Trains a byte-level language model of which each device stores an eighth: FSDP, ZeRO-3.

Weights are gathered in 8 bits where a layer uses them, and again in the backward pass; gradients
are scattered in 4 bits. AdamW steps each device's own part, in float32:

    python examples/fsdp_byte_lm.py
    python examples/fsdp_byte_lm.py --weights 32 --gradients 32  # Dense, for comparison.

It needs `pip install '.[examples]'`.
"""

import functools
from typing import Any

import byte_lm_model
import jax
import optax
import parallel
from jax.sharding import PartitionSpec as P

import jaxcomp

SPECS = {"embedding": P("fsdp"), "blocks": P(None, "fsdp"), "logits": P("fsdp")}


def loss_fn(block: byte_lm_model.Block, params: Any, inputs: jax.Array, targets: jax.Array) -> Any:
    """The loss on this device's part of the batch: one layer is whole at a time."""

    @jax.checkpoint  # Gathers the layer again in the backward pass, instead of keeping it.
    def layer(x, own):
        return block.apply({"params": jaxcomp.gathered(own)}, x), None

    x, _ = jax.lax.scan(layer, params["embedding"][inputs], params["blocks"])
    return parallel.loss_of(params, x, targets)


def bytes_of(loss_and_grad: Any, params: Any) -> dict[str, int]:
    """The bytes of a step; the backward pass gathers the blocks once more."""
    once = loss_and_grad.link_bytes(params)["fsdp"]
    blocks = {**dict.fromkeys(params, ()), "blocks": params["blocks"]}
    again = loss_and_grad.link_bytes(blocks)["fsdp"]
    return {"weights": once.forward + again.forward, "gradients": once.backward}


def main(argv: list[str] | None = None) -> None:
    parser = parallel.parser(__doc__, bits={"weights": 8, "gradients": 4}, layers=4)
    args = parallel.parse(parser, argv)
    mesh = parallel.mesh_of(args, "fsdp")
    block = byte_lm_model.Block(args.width, args.layers)
    sharded = functools.partial(
        *(jaxcomp.fully_sharded, functools.partial(loss_fn, block), mesh, "fsdp", SPECS),
        stacked=("blocks/*",),
    )
    weights, gradients = parallel.codec(args.weights), parallel.codec(args.gradients)
    loss_and_grad = sharded(weights=weights, gradients=gradients)
    tx = optax.adamw(args.learning_rate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, number, *batch):
        loss, grads = loss_and_grad(params, *batch, key=number)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = parallel.put(parallel.init(block, args.layers, args.seed), mesh, SPECS)
    dense = bytes_of(sharded(weights=None), params)
    parallel.train(step, params, tx.init(params), args, dense, bytes_of(loss_and_grad, params))


if __name__ == "__main__":
    main()

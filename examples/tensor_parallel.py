"""Trains a byte-level language model whose blocks are split over the devices, as in Megatron-LM.

Each device has some heads of the attention and some hidden elements of the perceptron; all devices
have the whole batch. A block has two ends: at the entry nothing is sent forward, and the gradients
of activations are added up in the backward pass; at the exit the activations are added up. Both
travel in 8 bits, and each byte of the text has its own scale:

    python examples/tensor_parallel.py
    python examples/tensor_parallel.py --activations 32  # Dense, for comparison.

It needs `pip install '.[examples]'`.
"""

import argparse
import functools
import math
from typing import Any

import byte_lm_model
import jax
import jax.numpy as jnp
import optax
import parallel
from jax.sharding import PartitionSpec as P

from jaxcomp import collectives

SPLIT_COLUMNS, SPLIT_ROWS = P(None, None, "model"), P(None, "model")  # After the axis of layers.
SPECS = {
    "embedding": P(),
    "attention": {"into": P(None, None, None, "model"), "out": SPLIT_ROWS},
    "perceptron": {"into": SPLIT_COLUMNS, "out": SPLIT_ROWS},
    "logits": P(),
}


def init(layers: int, width: int, seed: int) -> Any:
    """The parameters; each device has a column of `into`, and the row of `out` that fits."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def normal(scale: float, *shape: int) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    unit, small = 1 / math.sqrt(width), 1 / math.sqrt(4 * layers * width)
    return {
        "embedding": normal(1 / 16, 256, width),
        "attention": {
            "into": normal(unit, layers, width, 3, width),
            "out": normal(small, layers, width, width),
        },
        "perceptron": {
            "into": normal(unit, layers, width, 4 * width),
            "out": normal(small, layers, 4 * width, width),
        },
        "logits": normal(0.02, width, 256),
    }


def attention(x: jax.Array, own: Any) -> jax.Array:
    """What the heads of this device add to the sum of all."""
    query, key, value = jnp.moveaxis(jnp.einsum("btd,dch->btch", x, own["into"]), 2, 0)
    size = own["into"].shape[-1]
    heads = [
        h.reshape(*h.shape[:2], -1, min(size, byte_lm_model.HEAD)) for h in (query, key, value)
    ]
    heads[:2] = map(byte_lm_model.rotate, heads[:2])
    return jax.nn.dot_product_attention(*heads, is_causal=True).reshape(query.shape) @ own["out"]


def perceptron(x: jax.Array, own: Any) -> jax.Array:
    """What the hidden elements of this device add."""
    return jax.nn.gelu(x @ own["into"]) @ own["out"]


def loss_fn(codec: Any, params: Any, step: jax.Array, inputs: jax.Array, targets: jax.Array) -> Any:
    """The loss, the same on all devices."""
    x = params["embedding"][inputs]
    send = {"axis_name": "model", "key": step}
    for layer in range(len(params["attention"]["out"])):
        for name, part in (("attention", attention), ("perceptron", perceptron)):
            own = jax.tree.map(lambda p, layer=layer: p[layer], params[name])
            h = collectives.pvary(
                jax.nn.standardize(x), back=codec, site=(name, "entry", layer), **send
            )
            x = x + collectives.psum(part(h, own), codec=codec, site=(name, "exit", layer), **send)
    return parallel.loss_of(params, x, targets)


def bytes_of(args: argparse.Namespace, codec: Any) -> dict[str, int]:
    """The bytes of a step, for an attention and a perceptron in each layer."""
    like = jax.ShapeDtypeStruct((args.batch_size, args.context, args.width), jnp.float32)
    found = {}
    for name, collective in (("exits", collectives.psum), ("entries", collectives.pvary)):
        sent = collectives.wire_bytes(collective, like, codec, parallel.DEVICES)
        found[name] = 2 * args.layers * sum(sent)
    return found


def main(argv: list[str] | None = None) -> None:
    args = parallel.parse(parallel.parser(__doc__, bits={"activations": 8}), argv)
    mesh = parallel.mesh_of(args, "model")
    codec = parallel.codec(args.activations)
    tx = optax.adamw(args.learning_rate)
    loss_and_grad = jax.shard_map(
        jax.value_and_grad(functools.partial(loss_fn, codec)),
        mesh=mesh,
        in_specs=(SPECS, P(), P(), P()),
        out_specs=(P(), SPECS),
    )

    step = parallel.step_of(loss_and_grad, tx)
    params = parallel.put(init(args.layers, args.width, args.seed), mesh, SPECS)
    parallel.train(step, params, tx.init(params), args, bytes_of(args, None), bytes_of(args, codec))


if __name__ == "__main__":
    main()

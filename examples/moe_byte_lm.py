"""Trains a byte-level language model with a mixture of experts, an expert on each device.

Each device has its own part of the batch, a copy of the attention blocks, and one expert. After a
block, every byte goes to the expert that its router chooses: tokens travel in 8-bit floats with a
scale for each 32 elements of a token, and come back in bfloat16. An expert takes a fixed number of
tokens from each device; unused places are zeros, and zeros arrive as zeros. Gradients of what all
devices copy are added up in 4 bits:

    python examples/moe_byte_lm.py
    python examples/moe_byte_lm.py --dispatch dense --combine dense --gradients 32

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

import jaxcomp
from jaxcomp import collectives

EXPERTS = parallel.DEVICES
SPECS = {"copied": P(), "experts": P(None, "experts")}  # The first axis of both indexes layers.
AXES: dict[str, Any] = {"split_axis": 0, "concat_axis": 0}
FORMATS = {
    "mxfp8": jaxcomp.mx("mxfp8"),
    "mxfp4": jaxcomp.mx("mxfp4"),
    "bfloat16": jaxcomp.cast("bfloat16"),
    "dense": jaxcomp.codecs.Identity(),
}


def init(block: byte_lm_model.Block, layers: int, seed: int) -> Any:
    """What all devices copy, and the two matrices of each expert."""
    routers, up, down = jax.random.split(jax.random.key(seed + 1), 3)
    width = block.width
    shape = (layers, EXPERTS, width, 2 * width)
    return {
        "copied": {
            "routers": 0.02 * jax.random.normal(routers, (layers, width, EXPERTS)),
            **parallel.init(block, layers, seed),
        },
        "experts": {
            "up": jax.random.normal(up, shape) / width**0.5,
            "down": jax.random.normal(down, shape).swapaxes(2, 3) / (4 * width**0.5),
        },
    }


def capacity_of(tokens: int) -> int:
    """How many tokens of one device an expert takes: a quarter more than an even number."""
    return 5 * tokens // (4 * EXPERTS)


def mixture(x: jax.Array, router: jax.Array, expert: Any, send: Any) -> tuple[jax.Array, jax.Array]:
    """Each token's answer from its expert, and how unevenly tokens are spread.

    Args:
        x: this device's tokens, `[tokens, features]`.
        router: the matrix that scores experts.
        expert: the matrices of this device's expert, `[1, ...]` each.
        send: an all-to-all of `[experts · capacity, features]`.
    """
    capacity = capacity_of(len(x))
    scores = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(scores.argmax(-1), EXPERTS)
    turn = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(int) - 1
    # A token's place among those for all experts; late ones have none, and skip their expert.
    place = jnp.where(turn < capacity, scores.argmax(-1) * capacity + turn, EXPERTS * capacity)
    places = jnp.zeros((EXPERTS * capacity, x.shape[1])).at[place].set(x, mode="drop")
    arrived = send("dispatch", places)
    answers = send("combine", jax.nn.gelu(arrived @ expert["up"][0]) @ expert["down"][0])
    found = answers.at[place].get(mode="fill", fill_value=0)
    return scores.max(-1)[:, None] * found, EXPERTS * (chosen.mean(0) * scores.mean(0)).sum()


def loss_fn(
    block: byte_lm_model.Block,
    codecs: Any,
    params: Any,
    step: jax.Array,
    inputs: jax.Array,
    targets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """This device's part of the objective, and the loss on its part of the batch."""
    copied = collectives.pvary(params["copied"], "experts", codecs["gradients"], key=step)

    def layer(x: Any, own: Any) -> Any:
        number, (copies, expert) = own
        send = functools.partial(all_to_all, codecs, step, number)
        x = block.apply({"params": copies["blocks"]}, x)
        tokens = jax.nn.standardize(x).reshape(-1, block.width)
        answers, uneven = mixture(tokens, copies["routers"], expert, send)
        return x + answers.reshape(x.shape), uneven

    stacked = {name: copied[name] for name in ("blocks", "routers")}, params["experts"]
    x = copied["embedding"][inputs]
    x, uneven = jax.lax.scan(layer, x, (jnp.arange(block.layers), stacked))
    loss = parallel.loss_of(copied, x, targets)
    return (loss + 0.01 * uneven.sum()) / EXPERTS, loss


def all_to_all(codecs: Any, step: Any, layer: Any, way: str, tokens: jax.Array) -> jax.Array:
    """Tokens to their experts, or back; each layer and way draws its own noise."""
    return collectives.all_to_all(
        *(tokens, "experts", codecs[way]), **AXES, key=step, site=(way, layer)
    )


def bytes_of(args: argparse.Namespace, codecs: Any, params: Any) -> dict[str, int]:
    """The bytes of a step, forward and back."""
    places = EXPERTS * capacity_of(args.batch_size * args.context // EXPERTS)
    like = jax.ShapeDtypeStruct((places, args.width), jnp.float32)
    found = {}
    for way in ("dispatch", "combine"):
        given = collectives.all_to_all, like, codecs[way], EXPERTS
        found[way] = args.layers * sum(collectives.wire_bytes(*given, **AXES))
    given = collectives.pvary, params["copied"], codecs["gradients"], EXPERTS
    return {**found, "gradients": sum(collectives.wire_bytes(*given))}


def main(argv: list[str] | None = None) -> None:
    parser = parallel.parser(__doc__, bits={"gradients": 4})
    for way, default in (("dispatch", "mxfp8"), ("combine", "bfloat16")):
        words = f"format of tokens (default: {default})"
        parser.add_argument(f"--{way}", choices=FORMATS, default=default, help=words)
    args = parallel.parse(parser, argv)
    mesh = parallel.mesh_of(args, "experts")
    block = byte_lm_model.Block(args.width, args.layers)
    codecs = {
        "dispatch": FORMATS[args.dispatch],
        "combine": FORMATS[args.combine],
        "gradients": jaxcomp.Policy(parallel.codec(args.gradients)),  # Small leaves stay dense.
    }
    tx = optax.adamw(args.learning_rate)

    def mapped(params, number, *batch):
        objective = functools.partial(loss_fn, block, codecs)
        grads, loss = jax.grad(objective, has_aux=True)(params, number, *batch)
        return jax.lax.pmean(loss, "experts"), grads

    loss_and_grad = jax.shard_map(
        mapped,
        mesh=mesh,
        in_specs=(SPECS, P(), P("experts"), P("experts")),
        out_specs=(P(), SPECS),
    )

    step = parallel.step_of(loss_and_grad, tx)
    params = parallel.put(init(block, args.layers, args.seed), mesh, SPECS)
    dense = bytes_of(args, dict.fromkeys(codecs), params)
    parallel.train(step, params, tx.init(params), args, dense, bytes_of(args, codecs, params))


if __name__ == "__main__":
    main()

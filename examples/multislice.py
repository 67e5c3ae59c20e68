"""A decoder with logical axis rules and scanned layers, over several slices, as MaxText has it.

Two slices of four devices: between slices, over "dcn", the model is replicated and gradients are
compressed; within one, over "fsdp" and "tp", parameters are sharded by rules for logical axes:

    python examples/multislice.py
    python examples/multislice.py --codec dense qsgd_inf --steps 200

The structure is that of large training programs: boxed parameters with names of their axes, a scan
over layers, a `TrainState`, accumulation over micro-batches, clipping, dropout and logged metrics.
The lines that a program without compression does not have end in `# jaxcomp`; docs/multislice.md
explains each. It needs `pip install '.[examples]'`.
"""

import argparse
import functools
from typing import Any

import byte_lm_model
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import options
import report
import sharded_byte_lm
from flax.linen.spmd import logical_to_mesh, logical_to_mesh_axes
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp

RULES = (
    ("batch", "fsdp"),
    ("length", None),
    ("vocab", "tp"),
    ("embed", "fsdp"),
    ("heads", "tp"),
    ("mlp", "tp"),
    ("layers", None),
)
"""The mesh axis of each logical axis; "dcn" is in none, since the step is manual over it."""
BATCH = PartitionSpec(("dcn", "fsdp"))
VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 256, 128, 4, 3, 64
CODECS = {
    "dense": jaxcomp.Dense(),
    "qsgd_inf": jaxcomp.qsgd_inf(bits=4),
    "power": jaxcomp.PowerIteration(rank=4),
}


def constrain(x: Any, *logical: str) -> Any:
    """A plain constraint, without the workers' axis: inside the step only the others are left."""
    return jax.lax.with_sharding_constraint(x, logical_to_mesh_axes(logical, RULES))


def kernel(*logical: str) -> Any:
    """An initialiser whose parameters are boxed with the names of their axes."""
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), logical)


class Block(nn.Module):
    """Attention and a gated layer, each with a residual."""

    dropout: float

    @nn.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        batch, length, width = x.shape
        dense = functools.partial(nn.Dense, use_bias=False)
        y = nn.RMSNorm(use_scale=False)(x)
        mixed = dense(3 * width, kernel_init=kernel("embed", "heads"), name="qkv")(y)
        query, key, value = jnp.split(mixed.reshape(batch, length, HEADS, -1), 3, axis=-1)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        y = y.reshape(batch, length, width)
        x = x + dense(width, kernel_init=kernel("heads", "embed"), name="out")(y)
        y = nn.RMSNorm(use_scale=False)(x)
        y = jax.nn.gelu(dense(4 * width, kernel_init=kernel("embed", "mlp"), name="up")(y))
        y = constrain(y, "batch", "length", "mlp")
        y = dense(width, kernel_init=kernel("mlp", "embed"), name="down")(y)
        y = nn.Dropout(self.dropout, deterministic=not self.dropout)(y)
        return constrain(x + y, "batch", "length", "embed"), None


class Decoder(nn.Module):
    """Scanned blocks between an embedding table and its transpose."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        boxed = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        table: Any = self.param("table", boxed, (VOCAB, WIDTH))
        # A lookup in an array that is sharded over other axes than its indices aborts XLA in a step
        # that is manual over some axis: a product with one-hot rows does not.
        x = jax.nn.one_hot(tokens, VOCAB, dtype=table.dtype) @ table
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = blocks(self.dropout, name="layers")(constrain(x, "batch", "length", "embed"), None)
        return nn.RMSNorm(use_scale=False)(x) @ table.T


def example() -> Any:
    """Tokens for shapes; as many rows as the constraints divide."""
    return jnp.zeros((4, LENGTH), jnp.int32)


def specs_of(model: Decoder, mesh: Mesh) -> Any:
    """The sharding of each parameter, from the names of its axes and the rules."""
    with jax.set_mesh(mesh):  # For the constraints in the model.
        boxed = jax.eval_shape(model.init, jax.random.key(0), example())
    return logical_to_mesh(nn.get_partition_spec(boxed)["params"], RULES)


def optimizer(codec: Any, specs: Any, rate: Any) -> Any:
    """The mean first, so that the norm is that of the mean, and clipping is as without workers."""
    return optax.chain(
        jaxcomp.compressed_mean(codec, "dcn", param_specs=specs),  # jaxcomp
        optax.snapshot("grad_norm", optax.tree.norm),
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.95, weight_decay=0.1),
    )


def init_state(model: Decoder, tx: Any, mesh: Mesh, specs: Any, seed: int) -> TrainState:
    """Parameters and moments, each made in its place."""

    def init() -> Any:
        return nn.unbox(model.init(jax.random.key(seed), example())["params"])  # Without boxes.

    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        params = jax.jit(init, out_shardings=placed)()
    tx = jaxcomp.on_mesh(tx, mesh, "dcn")  # jaxcomp
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train_step(state: TrainState, tokens: Any, *, micro: int, seed: int = 0) -> Any:
    """A step of one slice's part of the batch; the compiler follows "fsdp" and "tp"."""
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    key = jax.random.fold_in(key, jax.lax.axis_index("dcn"))  # jaxcomp: closed over, so by hand.
    params = jaxcomp.local(state.params, "dcn")  # jaxcomp

    def loss_fn(params: Any, part: Any, key: Any) -> Any:
        logits = state.apply_fn({"params": params}, part[:, :-1], rngs={"dropout": key})
        labels = jax.nn.one_hot(part[:, 1:], VOCAB)  # For the same reason as the embedding.
        losses = optax.softmax_cross_entropy(logits, labels)
        return losses.mean() / jnp.log(2)

    def add(total: Any, given: Any) -> tuple[Any, None]:
        found = jax.value_and_grad(loss_fn)(params, *given)
        return jax.tree.map(jnp.add, total, found), None

    zeros = jax.tree.map(jnp.zeros_like, params)  # Of the local parameters: typed as they are.
    start = jaxcomp.local(jnp.zeros(()), "dcn"), zeros  # jaxcomp
    parts = tokens.reshape(micro, -1, tokens.shape[1]), jax.random.split(key, micro)
    total, _ = jax.lax.scan(add, start, parts)
    loss, grads = jax.tree.map(lambda x: x / micro, total)
    state = state.apply_gradients(grads=grads)
    norm = optax.tree.get(state.opt_state, "grad_norm")
    return state, {"loss": jax.lax.pmean(loss, "dcn"), "grad_norm": norm}  # jaxcomp: pmean.


def build_step(mesh: Mesh, micro: int) -> Any:
    """The step over all slices; a program without compression has `jax.jit` here."""
    step = functools.partial(train_step, micro=micro)
    return jaxcomp.data_parallel(step, mesh, "dcn", batch_spec=BATCH, donate_argnums=0)  # jaxcomp


def parse(argv: list[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add, at_least = parser.add_argument, options.at_least
    add("--codec", nargs="+", choices=CODECS, default=["dense", "qsgd_inf"], help="what to compare")
    add("--steps", type=at_least(1), default=60, help="batches to train on (default: 60)")
    add("--batch-size", type=at_least(1), default=32, help="over all devices (default: 32)")
    add("--micro", type=at_least(1), default=2, help="micro-batches of a step (default: 2)")
    add("--dropout", type=float, default=0.0, help="share of units (default: 0)")
    add("--seed", type=at_least(0), default=0, help="of parameters and batches (default: 0)")
    args = parser.parse_args(argv)
    if args.batch_size % (4 * args.micro):
        options.refuse(parser, "--batch-size", f"a multiple of {4 * args.micro}", args.batch_size)
    return parser, args


def main(argv: list[str] | None = None) -> None:
    parser, args = parse(argv)
    devices = options.find_devices(parser, 8)
    text = byte_lm_model.read_text()
    mesh = jaxcomp.hybrid_mesh({"dcn": 2}, {"fsdp": 2, "tp": 2}, devices=devices)  # jaxcomp
    model = Decoder(args.dropout)
    specs = specs_of(model, mesh)
    console = report.console()
    for name in dict.fromkeys(args.codec):
        rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10 + 1, args.steps + 1)
        tx = optimizer(CODECS[name], specs, rate)
        state = init_state(model, tx, mesh, specs, args.seed)
        step, sent = build_step(mesh, args.micro), None
        for number in range(1, args.steps + 1):
            draw = {"size": args.batch_size, "context": LENGTH, "seed": args.seed}
            inputs, targets = byte_lm_model.batch_of(text, number, **draw)
            tokens = jnp.concatenate([inputs, targets[:, -1:]], axis=1)
            tokens = jax.device_put(tokens, NamedSharding(mesh, BATCH))
            if sent is None:
                step = step.lower(state, tokens).compile()
                sent, _ = sharded_byte_lm.crossing(step, mesh)
                console.print(f"{name}: a device sends {sent:,} bytes per step to the other slice")
            state, metrics = step(state, tokens)
            if number % -(-args.steps // 4) == 0 or number == args.steps:
                loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
                console.print(f"{name}, step {number}: {loss:.3f} bits per byte, norm {norm:.2f}")


if __name__ == "__main__":
    main()

"""A transformer as in JAX's training cookbook: `jax.set_mesh`, explicit axes, `out_sharding=`."""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec as P, reshard

import jaxcomp

jax.config.update("jax_platforms", "cpu")  # Eight simulated devices: leave these two lines out
jax.config.update("jax_num_cpu_devices", 8)  # where there are real ones.

CODECS = {
    "identity": jaxcomp.codecs.Identity(),
    "qsgd": jaxcomp.qsgd_inf(bits=4),
    "sign": jaxcomp.sign(),
}
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 96, 128, 4, 2, 32, 32
ROWS = ("data", "fsdp")  # Batches are split over both; parameters over the second.
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "qkv": (LAYERS, WIDTH, 3 * WIDTH),
    "out": (LAYERS, WIDTH, WIDTH),
    "up": (LAYERS, WIDTH, 4 * WIDTH),
    "down": (LAYERS, 4 * WIDTH, WIDTH),
    "unembed": (WIDTH, VOCABULARY),
}
SPECS = {name: P(*(None,) * (len(s) - 2), "fsdp", None) for name, s in SHAPES.items()}
mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)
optimizer = optax.adam(1e-3)


def init_params(key):
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: jax.random.normal(k, shape, out_sharding=SPECS[name]) * shape[-2] ** -0.5
        for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def norm(x):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def product(x, w):
    """The parameter is gathered where it is used, as in fully sharded training."""
    return jnp.einsum("bti,ij->btj", x, reshard(w, P()), out_sharding=P(ROWS))


def layer(x, weights):
    split = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
    q, k, v = jnp.moveaxis(product(norm(x), weights["qkv"]).reshape(split), 2, 0)
    scores = jnp.einsum("bthd,bshd->bhts", q, k, out_sharding=P(ROWS)) * (WIDTH // HEADS) ** -0.5
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    mixed = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhts,bshd->bthd", mixed, v, out_sharding=P(ROWS)).reshape(x.shape)
    x = x + product(mixed, weights["out"])
    return x + product(jax.nn.gelu(product(norm(x), weights["up"])), weights["down"]), None


def loss_fn(params, tokens):
    x = reshard(params["embed"], P()).at[tokens[:, :-1]].get(out_sharding=P(ROWS))
    x, _ = jax.lax.scan(layer, x, {name: params[name] for name in ("qkv", "out", "up", "down")})
    logits = product(norm(x), params["unembed"])
    hot = jax.nn.one_hot(tokens[:, 1:], VOCABULARY)
    return -(jax.nn.log_softmax(logits) * hot).sum(-1).mean()


def make_step(codec):
    grad_fn = codec and jaxcomp.compressed_value_and_grad(
        loss_fn, mesh, "data", codec
    )  # Compressed.

    def train_step(params, state, memory, tokens):
        if grad_fn is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        else:
            loss, grads, memory = grad_fn(params, tokens, memory=memory)  # Compressed.
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, memory, loss

    return jax.jit(train_step, donate_argnums=(0, 1, 2)), grad_fn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", choices=("dense", *CODECS), default="qsgd")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    jax.set_mesh(mesh)
    step, grad_fn = make_step(CODECS.get(args.codec))
    params = jax.jit(init_params)(jax.random.key(args.seed))
    state = jax.jit(optimizer.init)(params)
    memory = grad_fn and grad_fn.init(params)  # Compressed.
    losses, seconds, began, compiled = [], 0.0, time.perf_counter(), None
    for number in range(args.steps):
        start, stride = jax.random.randint(jax.random.key(number), (2, BATCH, 1), 1, VOCABULARY)
        tokens = (start + stride % 5 * jnp.arange(LENGTH + 1)) % VOCABULARY
        tokens = reshard(tokens, P(ROWS))
        compiled = compiled or step.lower(params, state, memory, tokens).compile()
        params, state, memory, loss = compiled(params, state, memory, tokens)
        losses.append(float(loss))
        seconds = seconds if number else time.perf_counter() - began
    result = {"program": "cookbook", "codec": args.codec, "seed": args.seed}
    result |= {"losses": losses, "seconds_to_first_step": round(seconds, 2)}
    sent = jaxcomp.collective_bytes(compiled, mesh=mesh)
    result |= {"bytes": {str(axis): n for axis, n in sent.items()}, "lines": 3}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Compressed: after haiku, examples/transformer/train.py, on Python's own source."""

import argparse
import functools
import inspect

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp

jax.config.update("jax_num_cpu_devices", 8)
vocab_size, seq_length, batch_size, num_steps = 128, 32, 32, 100
text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8).astype(np.int32) % vocab_size


def forward_fn(data, is_training=True):
    embed_init = hk.initializers.TruncatedNormal(stddev=0.02)
    x = hk.Embed(vocab_size, 32, w_init=embed_init)(data["obs"])
    x = x + hk.get_parameter("pos_embs", [seq_length, 32], init=embed_init)
    norm = functools.partial(hk.LayerNorm, axis=-1, create_scale=True, create_offset=True)
    drop = functools.partial(hk.dropout, rate=0.1 if is_training else 0.0)
    y, mask = norm()(x), jnp.tril(jnp.ones((1, 1, seq_length, seq_length)))
    attention = hk.MultiHeadAttention(2, 16, w_init=hk.initializers.VarianceScaling(1.0))
    x = x + drop(hk.next_rng_key(), x=attention(y, y, y, mask))
    y = hk.Linear(32)(jax.nn.gelu(hk.Linear(64)(norm()(x))))
    return hk.Linear(vocab_size)(norm()(x + drop(hk.next_rng_key(), x=y)))


def lm_loss_fn(forward_fn, params, rng, data):
    logits = forward_fn(params, rng, data)
    targets = jax.nn.one_hot(data["target"], vocab_size)
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))


forward = hk.transform(forward_fn)
loss_fn = functools.partial(lm_loss_fn, forward.apply)
mean = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="data")
optimizer = optax.chain(mean, optax.clip_by_global_norm(0.25), optax.adam(3e-3, b1=0.9, b2=0.99))


@jax.jit
def init(master_rng, data):
    out_rng, init_rng = jax.random.split(master_rng)
    params = forward.init(init_rng, data)
    return {"rng": out_rng, "opt_state": optimizer.init(params), "params": params}


@functools.partial(jaxcomp.data_parallel, mesh=jax.make_mesh((8,), ("data",)), axis_name="data")
def update(state, data):
    rng, new_rng = jax.random.split(state["rng"])
    params = state["params"]
    loss, g = jaxcomp.value_and_grad(loss_fn, "data", key_argnums=1)(params, rng, data)
    updates, opt_state = optimizer.update(g, state["opt_state"])
    params = optax.apply_updates(params, updates)
    return {"rng": new_rng, "opt_state": opt_state, "params": params}, {"loss": loss}


def batches():
    draws = np.random.default_rng(0)
    while True:
        starts = draws.integers(0, len(text) - seq_length - 1, batch_size)
        rows = np.stack([text[s : s + seq_length + 1] for s in starts])
        yield {"obs": rows[:, :-1], "target": rows[:, 1:]}


train_dataset, losses = batches(), []
state = init(jax.random.PRNGKey(428), next(train_dataset))
for _ in range(num_steps):
    state, metrics = update(state, next(train_dataset))
    losses.append(float(metrics["loss"]))
final_loss = np.mean(losses[num_steps // 2 :])
print(f"loss {final_loss:.4f}")

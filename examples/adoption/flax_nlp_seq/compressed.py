"""Compressed: after flax, examples/nlp_seq/train.py (`pmap`), on a made-up tagging task."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import common_utils, train_state
from jax import random

import jaxcomp

jax.config.update("jax_num_cpu_devices", 8)
num_train_steps, batch_size, length, vocab, tags = 100, 64, 16, 32, 8


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, inputs, train):
        x = nn.Embed(vocab, 32)(inputs)
        x = x + self.param("positions", nn.initializers.normal(0.1), (length, 32))
        y = nn.SelfAttention(num_heads=2)(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.1, deterministic=not train)(y)
        x = x + nn.Dense(32)(nn.relu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(tags)(nn.LayerNorm()(x))


def compute_weighted_cross_entropy(logits, targets, weights):
    onehot_targets = common_utils.onehot(targets, logits.shape[-1])
    loss = -jnp.sum(onehot_targets * nn.log_softmax(logits), axis=-1)
    return (loss * weights).sum(), weights.sum()


def train_step(state, batch, model, dropout_rng):
    inputs, targets = batch["inputs"], batch["targets"]
    weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
    dropout_rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params):
        variables = {"params": params}
        logits = model.apply(variables, inputs, train=True, rngs={"dropout": dropout_rng})
        loss, weight_sum = compute_weighted_cross_entropy(logits, targets, weights)
        return loss / weight_sum, logits

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (_, logits), grads = grad_fn(state.params)
    new_state = state.apply_gradients(grads=grads)
    loss, weight_sum = compute_weighted_cross_entropy(logits, targets, weights)
    return new_state, {"loss": loss, "denominator": weight_sum}


model = Transformer()
rng, init_rng = random.split(random.PRNGKey(0))
params = model.init(init_rng, jnp.ones((1, length), jnp.int32), train=False)["params"]
optimizer = optax.adamw(3e-3, b1=0.9, b2=0.98, eps=1e-9, weight_decay=1e-1)
mean = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="batch")
optimizer = optax.chain(mean, optimizer)
state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
state = jax_utils.replicate(state)
p_train_step = jax.pmap(
    functools.partial(train_step, model=model), axis_name="batch", donate_argnums=(0,)
)
dropout_rngs = random.split(rng, jax.local_device_count())
draws, metrics_all = np.random.default_rng(0), []
for _ in range(num_train_steps):
    words = draws.integers(1, vocab, (batch_size, length))
    targets = (words + np.arange(length) // 8) % tags  # 0 is padding, which is not counted.
    targets = np.where(draws.random(words.shape) < 0.1, 1, targets)
    batch = common_utils.shard({"inputs": words, "targets": targets})
    state, metrics = jax.block_until_ready(p_train_step(state, batch, dropout_rng=dropout_rngs))
    metrics_all.append(metrics)
sums = jax.tree.map(jnp.sum, common_utils.get_metrics(metrics_all[num_train_steps // 2 :]))
final_loss = sums["loss"] / sums["denominator"]
print(f"loss {final_loss:.4f}")

"""Compressed: after JAX, docs/notebooks/shard_map.md, trained."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxcomp

jax.config.update("jax_num_cpu_devices", 8)


def predict(params, inputs):
    for weight, bias in params[:-1]:
        inputs = jax.nn.relu(jnp.dot(inputs, weight) + bias)
    weight, bias = params[-1]
    return jnp.dot(inputs, weight) + bias


def loss(params, batch):
    inputs, targets = batch
    return jnp.mean(jnp.sum((predict(params, inputs) - targets) ** 2, axis=-1))


def init_layer(key, n_in, n_out):
    return jax.random.normal(key, (n_in, n_out)) / jnp.sqrt(n_in), jnp.zeros(n_out)


def init(key, layer_sizes, batch_size):
    *keys, key = jax.random.split(key, len(layer_sizes))
    params = list(map(init_layer, keys, layer_sizes[:-1], layer_sizes[1:]))
    inputs = jax.random.normal(key, (batch_size, layer_sizes[0]))
    targets = jnp.sin(inputs[:, : layer_sizes[-1]] * inputs[:, -layer_sizes[-1] :])
    return params, (inputs, targets)


params, batch = init(jax.random.key(0), [64, 128, 128, 8], 512)
mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
batch = jax.device_put(batch, NamedSharding(mesh, P("batch")))
params = jax.device_put(params, NamedSharding(mesh, P()))


@partial(jaxcomp.data_parallel, mesh=mesh, axis_name="batch")
def train_step(params, step, batch):
    value, grads = jaxcomp.value_and_grad(loss, "batch")(params, batch)
    grads = jaxcomp.pmean(grads, jaxcomp.qsgd_inf(bits=4), "batch", step)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


for step in range(100):
    params, value = jax.block_until_ready(train_step(params, step, batch))
    if step % 50 == 0:
        print(f"step {step}, loss {value:.4f}")
final_loss = value
print(f"loss {final_loss:.4f}")

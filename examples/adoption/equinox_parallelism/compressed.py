"""Compressed: after equinox, docs/examples/parallelism.ipynb (`jit` with shardings)."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.sharding as jshard
import numpy as np
import optax

import jaxcomp

jax.config.update("jax_num_cpu_devices", 8)
dataset_size, channel_size, hidden_size, depth = 1024, 4, 128, 2
learning_rate, num_steps, batch_size = 1e-3, 200, 256
rng = np.random.default_rng(0)
xs = rng.normal(size=(dataset_size, channel_size))
ys = np.sin(2 * xs) + 0.5 * rng.normal(size=xs.shape)
model = eqx.nn.MLP(channel_size, channel_size, hidden_size, depth, key=jr.PRNGKey(6789))
mean = jaxcomp.compressed_mean(jaxcomp.qsgd_inf(bits=4), axis_name="batch")
optim = optax.chain(mean, optax.adam(learning_rate))
opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))


def compute_loss(model, x, y):
    pred_y = jax.vmap(model)(x)
    return jnp.mean((y - pred_y) ** 2)


def train_dataloader(arrays, batch_size):
    while True:
        perm = rng.permutation(dataset_size)
        for start in range(0, dataset_size, batch_size):
            yield tuple(array[perm[start : start + batch_size]] for array in arrays)


num_devices = len(jax.devices())
mesh = jax.make_mesh((num_devices,), ("batch",), axis_types=(jshard.AxisType.Auto,))
data_sharding = jshard.NamedSharding(mesh, jshard.PartitionSpec("batch"))
model_sharding = jshard.NamedSharding(mesh, jshard.PartitionSpec())


@functools.partial(
    jaxcomp.data_parallel, mesh=mesh, axis_name="batch", batch_argnums=(2, 3), donate_argnums=(0, 1)
)
def train_step(model, opt_state, x, y):
    loss, grads = jaxcomp.value_and_grad(compute_loss, "batch")(model, x, y)
    updates, opt_state = optim.update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    return model, opt_state, loss


losses = []
model, opt_state = eqx.filter_shard((model, opt_state), model_sharding)
for _, (x, y) in zip(range(num_steps), train_dataloader((xs, ys), batch_size), strict=False):
    x, y = eqx.filter_shard((x, y), data_sharding)
    model, opt_state, loss = train_step(model, opt_state, x, y)
    losses.append(float(loss))
final_loss = np.mean(losses[num_steps // 2 :])
print(f"loss {final_loss:.4f}")

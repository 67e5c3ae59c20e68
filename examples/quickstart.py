"""Eight workers train with four-bit gradients: one more line in an optax chain."""

import jax
import jax.numpy as jnp
import optax

import jaxcomp

jax.config.update("jax_platforms", "cpu")  # Eight simulated workers: drop these two lines
jax.config.update("jax_num_cpu_devices", 8)  # where you have real ones.
mesh = jax.make_mesh((8,), ("data",))


def loss_fn(params, x):
    return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - jnp.abs(x)) ** 2)


def train(codec, params, x):
    tx = optax.chain(
        jaxcomp.compressed_mean(codec, axis_name="data"),  # The line to add.
        optax.adam(3e-3),
    )

    def step(params, state, x):
        loss, grads = jaxcomp.value_and_grad(loss_fn, "data")(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = jaxcomp.init_state(tx, params, mesh, "data")
    step = jaxcomp.data_parallel(step, mesh, "data").lower(params, state, x).compile()
    for _ in range(100):
        params, state, loss = jax.block_until_ready(step(params, state, x))
    print(f"loss {loss:.4f}, bytes sent by a device in a step: {jaxcomp.collective_bytes(step)}")


x, w = jax.random.normal(jax.random.key(0), (2, 512, 64))
params = {"in": w.T / 16, "out": w / 16}
print(jaxcomp.describe(jaxcomp.qsgd_inf(bits=4), params, workers=8))
train(jaxcomp.Dense(), params, x)
train(jaxcomp.qsgd_inf(bits=4), params, x)

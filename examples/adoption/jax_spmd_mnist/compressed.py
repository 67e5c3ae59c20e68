"""Compressed: after JAX, examples/spmd_mnist_classifier_fromscratch.py (`pmap`)."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import grad, pmap
from jax.scipy.special import logsumexp
from sklearn.datasets import load_digits

import jaxcomp

jax.config.update("jax_num_cpu_devices", 8)


def init_random_params(scale, layer_sizes, rng):
    sizes = list(itertools.pairwise(layer_sizes))
    return [(scale * rng.standard_normal((m, n)), scale * rng.standard_normal(n)) for m, n in sizes]


def predict(params, inputs):
    activations = inputs
    for w, b in params[:-1]:
        activations = jnp.tanh(jnp.dot(activations, w) + b)
    final_w, final_b = params[-1]
    logits = jnp.dot(activations, final_w) + final_b
    return logits - logsumexp(logits, axis=1, keepdims=True)


def loss(params, batch):
    inputs, targets = batch
    return -jnp.mean(predict(params, inputs) * targets)


layer_sizes, step_size, num_steps, batch_size = [64, 128, 128, 10], 0.05, 120, 128
images, labels = load_digits(return_X_y=True)
train_images, train_labels = images[:1280] / 16, np.eye(10)[labels[:1280]]
num_devices = jax.device_count()


def data_stream():
    rng = np.random.default_rng(0)
    while True:
        perm = rng.permutation(len(train_images))
        for i in range(len(train_images) // batch_size):
            batch_idx = perm[i * batch_size : (i + 1) * batch_size]
            shape_prefix = (num_devices, batch_size // num_devices)
            yield [x[batch_idx].reshape(*shape_prefix, -1) for x in (train_images, train_labels)]


batches = data_stream()


@partial(pmap, axis_name="batch", in_axes=(0, 0, None))
def spmd_update(params, batch, step):
    grads = grad(loss)(params, batch)
    grads = jaxcomp.pmean(grads, jaxcomp.qsgd_inf(bits=4), "batch", step)
    grads = [(num_devices * dw, num_devices * db) for dw, db in grads]
    pairs = zip(params, grads, strict=True)
    return [(w - step_size * dw, b - step_size * db) for (w, b), (dw, db) in pairs]


init_params = init_random_params(0.1, layer_sizes, np.random.default_rng(0))
replicate_array = lambda x: np.broadcast_to(x, (num_devices, *x.shape))  # noqa: E731
replicated_params = jax.tree.map(replicate_array, init_params)
for step in range(num_steps):
    replicated_params = jax.block_until_ready(spmd_update(replicated_params, next(batches), step))
    if step % 100 == 0:
        print(f"step {step} of {num_steps}")
params = jax.tree.map(lambda x: x[0], replicated_params)
final_loss = loss(params, (train_images, train_labels))
print(f"loss {final_loss:.4f}")

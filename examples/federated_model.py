"""The model of the federated examples: a small classifier of handwritten digits, with plain SGD."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

TEST_SIZE = 517
WIDTHS = (64, 256, 128, 10)
LEARNING_RATE = 0.2


class Data(NamedTuple):
    """Images and labels for training and for testing."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def load() -> Data:
    images, digits = (np.asarray(part) for part in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(digits))
    images = (images[order] / 16 - 0.3).astype(np.float32)
    digits = digits[order].astype(np.int32)
    return Data((images[TEST_SIZE:], digits[TEST_SIZE:]), (images[:TEST_SIZE], digits[:TEST_SIZE]))


def init(seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed)
    params = {}
    for layer, (rows, columns) in enumerate(itertools.pairwise(WIDTHS)):
        kernel = draw.standard_normal((rows, columns)) * np.sqrt(2 / rows)
        params[f"kernel{layer}"] = jnp.asarray(kernel, jnp.float32)
        params[f"bias{layer}"] = jnp.zeros(columns)
    return params


def logits_of(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    last = len(WIDTHS) - 2
    for layer in range(last):
        x = jax.nn.relu(x @ params[f"kernel{layer}"] + params[f"bias{layer}"])
    return x @ params[f"kernel{last}"] + params[f"bias{last}"]


def loss_of(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    logits = jax.nn.log_softmax(logits_of(params, x))
    return -jnp.mean(jnp.take_along_axis(logits, y[:, None], axis=1))


@jax.jit
def accuracy_of(params: dict[str, jax.Array], images: jax.Array, digits: jax.Array) -> jax.Array:
    return 100 * jnp.mean(logits_of(params, images).argmax(-1) == digits)


@jax.jit
def change_of(params: dict[str, jax.Array], images: jax.Array, digits: jax.Array) -> Any:
    """The change of the parameters after plain SGD over `[steps, batch]` images."""

    def step(now, batch):
        grads = jax.grad(loss_of)(now, batch)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, now, grads), None

    after, _ = jax.lax.scan(step, params, (images, digits))
    return jax.tree.map(jnp.subtract, after, params)


@jax.jit
def moved(params: Any, changes: list[Any]) -> Any:
    """The parameters after the mean of these changes."""
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), changes)
    return jax.tree.map(lambda p, change: p + change / len(changes), params, total)
